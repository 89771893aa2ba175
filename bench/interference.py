"""Measures what a long prompt does to the streams beside it: how far apart their tokens come.

    python bench/interference.py

Eight streams run on a 125M Llama with random weights. When each has some tokens, a prompt that
fills the context arrives. Compared are the gaps between the streams' tokens before it came and
until its own first token; and the time until all is done, against a service that computes long
prompts as fast as it can (--max-decode-slowdown inf), which is what the bound costs in throughput.
The two services take turns; nothing else should run on the machine.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np
import uvloop
from load import find_model
from processes import Service, make_model, service

_VOCAB = 1000
_INPUT_LEN = 16


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    num_streams: int
    context: int
    """Tokens: the long prompt has all but one of them."""
    settle: int
    """Tokens that each stream has before it counts."""
    before: int
    """Tokens of each stream that count as undisturbed."""
    after: int
    """Tokens of each stream from the long prompt's arrival on."""
    rounds: int
    worker_flags: tuple[str, ...]


@dataclass(slots=True)
class _Stream:
    """When the pieces of a stream came, on the clock of `time.perf_counter`."""

    arrivals: list[float] = field(default_factory=list)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self) -> None:
        """Note that a piece has come."""
        self.arrivals.append(time.perf_counter())
        self._came.set()

    async def has(self, count: int) -> None:
        """Wait until `count` pieces have come."""
        while len(self.arrivals) < count:
            self._came.clear()
            await self._came.wait()

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between neighbours of which the later came in (start, end]."""
        times = np.array(self.arrivals)
        late = times[1:]
        gaps: list[float] = np.diff(times)[(late > start) & (late <= end)].tolist()
        return gaps


@dataclass(frozen=True, slots=True)
class Round:
    """One long prompt, in seconds."""

    p99_before: float
    p99_during: float
    ttft: float
    """Of the long prompt."""
    makespan: float
    """From its arrival until every stream is done."""


async def run_round(base_url: str, model: str, options: Options, seed: int) -> Round:
    """Let one long prompt come; raises RuntimeError if the server refuses a request."""
    draw = np.random.default_rng(seed)
    num_before = options.settle + options.before
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(base_url, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        streams = [_Stream() for _ in range(options.num_streams)]
        running = [
            tasks.create_task(
                _read(session, _body(model, draw, _INPUT_LEN, num_before + options.after), stream)
            )
            for stream in streams
        ]
        for stream in streams:
            await stream.has(num_before)
        long, sent = _Stream(), time.perf_counter()
        await _read(session, _body(model, draw, options.context - 1, 1), long)
        await asyncio.gather(*running)
    settled = max(stream.arrivals[options.settle - 1] for stream in streams)
    first = long.arrivals[0]
    before = [gap for stream in streams for gap in stream.gaps(settled, sent)]
    during = [gap for stream in streams for gap in stream.gaps(sent, first)]
    if not during:
        raise RuntimeError("no stream got a token while the long prompt was computed")
    return Round(
        p99_before=float(np.percentile(before, 99)),
        p99_during=float(np.percentile(during, 99)),
        ttft=first - sent,
        makespan=max(stream.arrivals[-1] for stream in (*streams, long)) - sent,
    )


def _body(model: str, draw: np.random.Generator, input_len: int, output_len: int) -> bytes:
    body = {
        "model": model,
        "prompt": draw.integers(0, _VOCAB, input_len).tolist(),
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(body).encode()


async def _read(session: aiohttp.ClientSession, body: bytes, stream: _Stream) -> None:
    headers = {"Content-Type": "application/json"}
    async with session.post("/v1/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                stream.add()


async def measure(options: Options) -> dict[str, float]:
    """Measure, print a table, and give the numbers by name."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-model-") as name:
        model = Path(name)
        await make_model(model)
        async with contextlib.AsyncExitStack() as stack:
            services: dict[str, Service] = {}
            for kind, flags in (("paced", ()), ("unpaced", ("--max-decode-slowdown", "inf"))):
                all_flags = (*options.worker_flags, *flags)
                services[kind] = await stack.enter_async_context(service(model, all_flags))
                await services[kind].wait_until_ready()
            served = await find_model(services["paced"].base_url)
            rounds: dict[str, list[Round]] = {"paced": [], "unpaced": []}
            for turn in range(-1, options.rounds):  # the first warms up
                for kind, each in services.items():
                    result = await run_round(each.base_url, served, options, seed=turn + 1)
                    print(f"round {turn}: {kind} {result}", file=sys.stderr, flush=True)
                    if turn >= 0:
                        rounds[kind].append(result)
    return _report(rounds)


def _report(rounds: dict[str, list[Round]]) -> dict[str, float]:
    print(f"{'':>8}  {'p99 before':>10}  {'p99 during':>10}  ratio  {'ttft':>8}  all done")
    for kind, each in rounds.items():
        before, during, ttft, makespan = (
            median(getattr(one, name) for one in each) * 1e3
            for name in ("p99_before", "p99_during", "ttft", "makespan")
        )
        ratio = median(one.p99_during / one.p99_before for one in each)
        print(
            f"{kind:>8}  {before:>7.1f} ms  {during:>7.1f} ms  {ratio:>5.2f}  {ttft:>5.0f} ms  "
            f"{makespan:>5.0f} ms"
        )
    paced, unpaced = rounds["paced"], rounds["unpaced"]
    metrics = {
        "p99_itl_ratio": median(one.p99_during / one.p99_before for one in paced),
        "p99_itl_ratio_unpaced": median(one.p99_during / one.p99_before for one in unpaced),
        "throughput_cost": 1
        - median(b.makespan / a.makespan for a, b in zip(paced, unpaced, strict=True)),
        "ttft_ratio": median(a.ttft / b.ttft for a, b in zip(paced, unpaced, strict=True)),
    }
    for name, value in metrics.items():
        print(f"{name} {value:.3f}")
    return {name: round(value, 4) for name, value in metrics.items()}


def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a context of 1,024 and one round")
    add("--json", type=Path, metavar="FILE", help="write the numbers here")
    add("--streams", type=int, default=8, help="that run beside the long prompt; default: 8")
    add("--context", type=int, help="tokens of the context; default: 2,048")
    add("--rounds", type=int, help="of each service; default: 3")
    add("--num-threads", type=int, default=2, help="threads of a worker on a CPU; default: 2")
    given = parser.parse_args()
    context = given.context or (1024 if given.quick else 2048)
    options = Options(
        num_streams=given.streams,
        context=context,
        settle=8,
        before=32 if given.quick else 64,
        after=96 if given.quick else 192,
        rounds=given.rounds or (1 if given.quick else 3),
        worker_flags=(
            *("--max-model-len", str(context)),
            *("--num-threads", str(given.num_threads)),
            *("--kv-cache-memory-gb", "0.5"),
        ),
    )
    try:
        metrics = uvloop.run(measure(options))
    except (RuntimeError, aiohttp.ClientError) as error:
        sys.exit(f"interference.py: {error}")
    if given.json is not None:
        given.json.write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    _main()
