"""Measures overload: sends ten times as many requests as the service can serve.

    python bench/overload.py --quick

A router and a scheduler run on a simulated device, so that they have the machine's cores to
themselves. First as many requests run as the device takes at once; their tokens per second are the
peak. Then ten times as many requests arrive per second as the service completes at the peak,
whether they are accepted or not; no client retries.

- `goodput_over_peak`: tokens per second of the accepted requests that end well ÷ peak.
- `refusal_p99_ms`: how long a refusal takes, measured by a separate process (faults/probe.py),
  because the process that makes the load is busy itself.
- `health_idle_p99_ms`, `health_p99_ms`: how long a health call of the separate process takes,
  before and during the load; `late_p99_ms`: by how much its sleeps are too long. These numbers show
  the machine's own delays. `refusal_over_idle` is `refusal_p99_ms` ÷ `health_idle_p99_ms`.
- `rss_growth`: each process's memory at the end ÷ its memory after a quarter of the time.

Exits with 1 if a refusal has no retry delay, or an accepted request does not end well.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from harness.case import SHIPPED_MODEL, BenchError, Results, arguments, main
from harness.processes import Process, modules, run_script

from contract.errors import TooBusyError
from quire.v1 import common_pb2, inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from rpc.peers.channel import open_channel
from rpc.status import PUSHBACK_KEY, status_to_error

_PROBE_START_S = 2.0
"""Time for the probe to start and the queue to fill."""
_NUM_SEQS = 16
_OUTPUT_LEN = 32
_PROMPT_LEN = 32


@dataclass(slots=True)
class Outcome:
    """How requests ended."""

    token_times_s: list[float] = field(default_factory=list)
    """Monotonic times of the tokens of accepted requests that ended well."""
    num_accepted: int = 0
    refusals_s: list[float] = field(default_factory=list)
    """How long each refusal took."""
    faults: list[str] = field(default_factory=list)

    def tokens_per_s(self, start_s: float, end_s: float) -> float:
        """Return the rate of the tokens that came in [start_s, end_s)."""
        return sum(start_s <= at_s < end_s for at_s in self.token_times_s) / (end_s - start_s)


async def ask(stub: InferenceServiceStub, draw: random.Random, outcome: Outcome) -> None:
    """Send one request without retry, and record how it ends."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[draw.randrange(2, 4000) for _ in range(_PROMPT_LEN)]),
        sampling=common_pb2.SamplingParams(max_tokens=_OUTPUT_LEN, ignore_eos=True),
    )
    started_s = time.monotonic()
    times_s: list[float] = []
    try:
        async for response in stub.Generate(request):
            times_s += [time.monotonic()] * len(response.delta.token_ids)
    except grpc.aio.AioRpcError as error:
        pushback = dict(error.trailing_metadata() or ()).get(PUSHBACK_KEY)
        if isinstance(status_to_error(error), TooBusyError) and pushback is not None:
            outcome.refusals_s.append(time.monotonic() - started_s)
        else:
            outcome.faults.append(f"{error.code().name}: {error.details()}")
        return
    outcome.num_accepted += 1
    outcome.token_times_s += times_s
    if len(times_s) != _OUTPUT_LEN:
        outcome.faults.append(f"an accepted request ended with {len(times_s)} tokens")


async def probe(target: str, seconds: float) -> dict[str, list[float]]:
    """Run the separate process for `seconds`; each of its callers makes one call after another."""
    lengths = (f"--prompt-len={_PROMPT_LEN}", f"--output-len={_OUTPUT_LEN}")
    output = await run_script("-m", "faults.probe", target, f"--seconds={seconds}", *lengths)
    took: dict[str, list[float]] = json.loads(output)
    return took


async def find_peak(stub: InferenceServiceStub, draw: random.Random, seconds: float) -> float:
    """Keep the device just full; return its tokens per second, after a warm-up."""
    outcome = Outcome()
    start_s = time.monotonic() + seconds / 4
    end_s = start_s + seconds

    async def slot() -> None:
        while time.monotonic() < end_s:
            await ask(stub, draw, outcome)

    async with asyncio.TaskGroup() as slots:
        for _ in range(_NUM_SEQS + 4):  # a few requests wait, so that no row stays free
            slots.create_task(slot())
    if outcome.faults or outcome.refusals_s:
        raise BenchError(f"at the peak: {len(outcome.refusals_s)} refused, {outcome.faults[:3]}")
    return outcome.tokens_per_s(start_s, end_s)


async def overload(
    stub: InferenceServiceStub,
    draw: random.Random,
    rate: float,
    seconds: float,
    processes: list[Process],
) -> tuple[Outcome, float, dict[str, float]]:
    """Send requests at a rate; return their ends, the goodput, and each process's memory growth."""
    outcome = Outcome()
    started_s = time.monotonic()
    settled_s, end_s = started_s + seconds / 4, started_s + seconds
    early: dict[str, int] = {}
    async with asyncio.TaskGroup() as requests:
        next_s = started_s
        while next_s < end_s:
            next_s += draw.expovariate(rate)
            await asyncio.sleep(next_s - time.monotonic())
            if not early and next_s >= settled_s:
                early = {process.name: process.rss_bytes() for process in processes}
            requests.create_task(ask(stub, draw, outcome))
    growth = {p.name: round(p.rss_bytes() / early[p.name], 3) for p in processes}
    return outcome, outcome.tokens_per_s(settled_s, end_s), growth


@contextlib.asynccontextmanager
async def simulated_service(directory: Path) -> AsyncIterator[list[Process]]:
    """Run router, scheduler and simulated worker during the block."""
    model = f"--model={SHIPPED_MODEL}"
    module_to_flags = {
        # every step takes 19 ms
        "sim_worker": [model, f"--max-num-seqs={_NUM_SEQS}", "--num-blocks=4096", "--speedup=0.25"],
        "scheduler_svc": [f"--workers=unix:{directory}/sim_worker.sock", "--max-waiting=32"],
        "router": [model, f"--scheduler=unix:{directory}/scheduler_svc.sock"],
    }
    async with modules(directory, module_to_flags) as processes:
        yield list(processes.values())


async def measure(given: argparse.Namespace) -> Results:
    draw = random.Random(0)
    seconds = 15.0 if given.quick else given.seconds

    async def probe_load() -> dict[str, list[float]]:
        await asyncio.sleep(_PROBE_START_S)
        return await probe(target, max(1.0, seconds - 2 * _PROBE_START_S))

    with tempfile.TemporaryDirectory(prefix="quire-overload-") as name:
        target = f"unix:{name}/router.sock"
        async with simulated_service(Path(name)) as processes, open_channel(target) as channel:
            idle = await probe(target, min(10.0, seconds / 3))
            stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            peak = await find_peak(stub, draw, min(10.0, seconds / 3))
            rate = given.times * peak / _OUTPUT_LEN
            async with asyncio.TaskGroup() as tasks:
                probing = tasks.create_task(probe_load())
                outcome, goodput, growth = await overload(stub, draw, rate, seconds, processes)
            took = probing.result()
    for fault in outcome.faults[:10]:
        print(f"  wrong: {fault}")
    refusal_p99_ms = percentile_ms(took["refusal_s"], 99)
    health_idle_p99_ms = percentile_ms(idle["health_s"], 99)
    return {
        "peak_tok_s": peak,
        "requests_per_s": rate,
        "accepted": outcome.num_accepted,
        "refused": len(outcome.refusals_s),
        "faults": len(outcome.faults),
        "goodput_over_peak": goodput / peak,
        "refusal_p50_ms": percentile_ms(took["refusal_s"], 50),
        "refusal_p99_ms": refusal_p99_ms,
        "refusal_over_idle": refusal_p99_ms / health_idle_p99_ms,
        "health_idle_p99_ms": health_idle_p99_ms,
        "health_p99_ms": percentile_ms(took["health_s"], 99),
        "late_p99_ms": percentile_ms(took["late_s"], 99),
        "refusals_probed": len(took["refusal_s"]),
        "crowd_refusal_p99_ms": percentile_ms(outcome.refusals_s, 99),
        "rss_growth": growth,
    }


def percentile_ms(seconds: list[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) * 1e3


if __name__ == "__main__":
    parser = arguments(__doc__, quick="for 15 seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of overload")
    parser.add_argument("--times", type=float, default=10.0, help="the rate of requests ÷ the peak")
    results = main(parser.parse_args(), measure)
    for name, value in results.items():
        print(f"  {name:>20}  {f'{value:.3f}' if isinstance(value, float) else value}")
    if results["faults"]:
        sys.exit("some requests were neither served nor refused as they should be: see above")
