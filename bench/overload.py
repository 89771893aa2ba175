"""Overload: ten times as many requests as can be served, and what becomes of the others.

A router and a scheduler before a simulated device, so that the machine's cores are theirs. First as
many requests run as the device takes at once: the peak. Then requests come at ten times that rate,
whatever becomes of them, and nobody tries again.

- `goodput_over_peak`: tokens per second of the requests that are accepted and end well, over peak.
- `refusal_p99_ms`: how long it takes to be refused, seen by a process of its own
  (`overload_probe.py`): the one that makes the load would measure itself.
- `health_idle_p99_ms`, `health_p99_ms`: what a health call of the same process takes before and
  meanwhile, and `late_p99_ms`, by how much its sleeps are too long: what the machine costs, whoever
  else uses it. `refusal_over_idle` is the refusals' p99 over the idle health calls'.
- `rss_growth`: what each process's memory at the end is of what it was after a quarter of the time.

Ends with 1 if a refusal does not say when to come back, or an accepted request does not end well.

    python bench/overload.py [--seconds S] [--times X] [--quick] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import uvloop
from chaos_process import Process

from contract.errors import TooBusyError
from quire.cli.up import ports
from quire.v1 import common_pb2, inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from rpc.peers.channel import open_channel
from rpc.status import PUSHBACK_KEY, status_to_error

SHIPPED_MODEL = Path(__file__).parents[1] / "models" / "quire-tiny-python"
_PROBE = Path(__file__).with_name("overload_probe.py")
_PROBE_START_S = 2.0
"""For it to be there, and for the queue to fill."""
_HOST = "127.0.0.1"
_NUM_SEQS = 16
_OUTPUT_LEN = 32
_PROMPT_LEN = 32
_START_S = 120.0


@dataclass(slots=True)
class Outcome:
    """What became of requests."""

    token_times_s: list[float] = field(default_factory=list)
    """Of accepted requests that ended well, by the monotonic clock."""
    num_accepted: int = 0
    refusals_s: list[float] = field(default_factory=list)
    """How long each took."""
    faults: list[str] = field(default_factory=list)

    def tokens_per_s(self, start_s: float, end_s: float) -> float:
        """Of the tokens that came in between."""
        return sum(start_s <= at_s < end_s for at_s in self.token_times_s) / (end_s - start_s)


async def ask(stub: InferenceServiceStub, draw: random.Random, outcome: Outcome) -> None:
    """Make one request, once, and note what becomes of it."""
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
        told = status_to_error(error)
        pushback = dict(error.trailing_metadata() or ()).get(PUSHBACK_KEY)
        if isinstance(told, TooBusyError) and pushback is not None:
            outcome.refusals_s.append(time.monotonic() - started_s)
        else:
            outcome.faults.append(f"{error.code().name}: {error.details()}")
        return
    outcome.num_accepted += 1
    outcome.token_times_s += times_s
    if len(times_s) != _OUTPUT_LEN:
        outcome.faults.append(f"an accepted request ended with {len(times_s)} tokens")


async def probe(target: str, seconds: float) -> dict[str, list[float]]:
    """Have a process of its own ask, one call at a time."""
    lengths = (f"--prompt-len={_PROMPT_LEN}", f"--output-len={_OUTPUT_LEN}")
    prober = await asyncio.create_subprocess_exec(
        *(sys.executable, _PROBE, target, f"--seconds={seconds}", *lengths),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await prober.communicate()
    finally:
        if prober.returncode is None:
            prober.kill()
    if prober.returncode:
        raise RuntimeError(f"the probe ended with {prober.returncode}")
    took: dict[str, list[float]] = json.loads(output)
    return took


async def find_peak(stub: InferenceServiceStub, draw: random.Random, seconds: float) -> float:
    """Keep the device full, no more; give its tokens per second, after a start."""
    outcome = Outcome()
    start_s = time.monotonic() + seconds / 4
    end_s = start_s + seconds

    async def slot() -> None:
        while time.monotonic() < end_s:
            await ask(stub, draw, outcome)

    async with asyncio.TaskGroup() as slots:
        for _ in range(_NUM_SEQS + 4):  # some wait, so that no row stays free
            slots.create_task(slot())
    if outcome.faults or outcome.refusals_s:
        raise RuntimeError(f"at the peak: {len(outcome.refusals_s)} refused, {outcome.faults[:3]}")
    return outcome.tokens_per_s(start_s, end_s)


async def overload(
    stub: InferenceServiceStub,
    draw: random.Random,
    rate: float,
    seconds: float,
    processes: list[Process],
) -> tuple[Outcome, float, dict[str, float]]:
    """Ask at a rate; give what became of it, the goodput, and how each process has grown."""
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
async def service(directory: Path) -> AsyncIterator[list[Process]]:
    """Start router, scheduler and simulated worker; they end with the block, or with us."""
    model = f"--model={SHIPPED_MODEL}"
    flags = {
        # A step takes 19 ms, whatever is in it.
        "sim_worker": [model, f"--max-num-seqs={_NUM_SEQS}", "--num-blocks=4096", "--speedup=0.25"],
        "scheduler_svc": [f"--workers=unix:{directory}/sim_worker.sock", "--max-waiting=32"],
        "router": [model, f"--scheduler=unix:{directory}/scheduler_svc.sock"],
    }
    processes: list[Process] = []
    for module, own in flags.items():
        taken = [int(process.http.rsplit(":", 1)[1]) for process in processes]
        http = ports.join(_HOST, ports.prefer(_HOST, 0, taken))
        port = f"--http-port={http.rsplit(':', 1)[1]}"
        log = directory / f"{module}.log"
        where = [f"--uds={directory}/{module}.sock", port]
        processes.append(Process(module, module, [*where, *own], http, log))
    try:
        for process in processes:
            process.start()
        async with asyncio.timeout(_START_S):
            while not await asyncio.to_thread(is_ready, processes[-1]):
                for process in processes:
                    if process.exit_code is not None:
                        raise RuntimeError(f"{process.name} ended:\n{process.log_tail()}")
                await asyncio.sleep(0.1)
        yield processes
    finally:
        for process in reversed(processes):
            await process.stop(10.0)


def is_ready(process: Process) -> bool:
    """Ask it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{process.http}/ready", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


async def measure(args: argparse.Namespace) -> dict[str, object]:
    """Find the peak, go beyond it, and say what came of it."""
    draw = random.Random(0)

    async def probe_crowd() -> dict[str, list[float]]:
        await asyncio.sleep(_PROBE_START_S)
        return await probe(target, max(1.0, args.seconds - 2 * _PROBE_START_S))

    with tempfile.TemporaryDirectory(prefix="quire-overload-") as name:
        directory = Path(name)
        target = f"unix:{directory}/router.sock"
        async with service(directory) as processes, open_channel(target) as channel:
            idle = await probe(target, min(10.0, args.seconds / 3))
            stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            peak = await find_peak(stub, draw, min(10.0, args.seconds / 3))
            rate = args.times * peak / _OUTPUT_LEN
            async with asyncio.TaskGroup() as tasks:
                probing = tasks.create_task(probe_crowd())
                outcome, goodput, growth = await overload(stub, draw, rate, args.seconds, processes)
            took = probing.result()
    for fault in outcome.faults[:10]:
        print(f"  wrong: {fault}")
    return {
        "peak_tok_s": round(peak, 1),
        "requests_per_s": round(rate, 1),
        "accepted": outcome.num_accepted,
        "refused": len(outcome.refusals_s),
        "faults": len(outcome.faults),
        "goodput_over_peak": round(goodput / peak, 3),
        "refusal_p50_ms": percentile_ms(took["refusal_s"], 50),
        "refusal_p99_ms": percentile_ms(took["refusal_s"], 99),
        "refusal_over_idle": round(
            percentile_ms(took["refusal_s"], 99) / percentile_ms(idle["health_s"], 99), 1
        ),
        "health_idle_p99_ms": percentile_ms(idle["health_s"], 99),
        "health_p99_ms": percentile_ms(took["health_s"], 99),
        "late_p99_ms": percentile_ms(took["late_s"], 99),
        "refusals_probed": len(took["refusal_s"]),
        "crowd_refusal_p99_ms": percentile_ms(outcome.refusals_s, 99),
        "rss_growth": growth,
    }


def percentile_ms(seconds: list[float], percent: float) -> float:
    """Give one, in milliseconds."""
    return round(float(np.percentile(seconds, percent)) * 1e3, 2)


def main() -> None:
    """Measure, print, write JSON, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--times", type=float, default=10.0, help="the rate, over the peak's")
    parser.add_argument("--quick", action="store_true", help="for 15 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()
    if args.quick:
        args.seconds = 15.0
    results = uvloop.run(measure(args))
    for name, value in results.items():
        print(f"  {name:>20}  {value}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    if results["faults"]:
        sys.exit("some requests were neither served nor refused as they should be: see above")


if __name__ == "__main__":
    main()
