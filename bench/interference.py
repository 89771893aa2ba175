"""Measures how a long prompt delays the tokens of other streams.

    python bench/interference.py --rounds 5

Eight streams run on a 125M Llama with random weights. When each has some tokens, a prompt that
fills the context arrives. The benchmark compares the gaps between the streams' tokens before the
prompt arrives with the gaps from then until the prompt's first token. It also compares the total
time with that of a service that computes long prompts as fast as it can (--max-decode-slowdown
inf): the difference is what the bound on slowdown costs in throughput. The two services take turns;
the machine should be idle otherwise.
"""

import argparse
import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from statistics import median

import aiohttp
import numpy as np
from harness.case import BenchError, Results, Table, arguments, main, progress
from harness.closed_loop import Workload, completion_body, find_model, post_stream
from harness.processes import model_directory, service
from harness.turns import Spread, turns

_VOCAB = 1000
_INPUT_LEN = 16
_SETTLE = 8
"""Tokens of each stream before its gaps count."""
_SIDES = {"paced": (), "unpaced": ("--max-decode-slowdown", "inf")}


@dataclass(slots=True)
class _Stream:
    """The arrival times of a stream's pieces, by `time.perf_counter`."""

    arrivals: list[float] = field(default_factory=list)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self) -> None:
        self.arrivals.append(time.perf_counter())
        self._came.set()

    async def has(self, count: int) -> None:
        """Wait until `count` pieces have come."""
        while len(self.arrivals) < count:
            self._came.clear()
            await self._came.wait()

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between consecutive pieces, if the later one came in (start, end]."""
        times = np.array(self.arrivals)
        late = times[1:]
        gaps: list[float] = np.diff(times)[(late > start) & (late <= end)].tolist()
        return gaps


@dataclass(frozen=True, slots=True)
class Round:
    """Times around one long prompt, in seconds."""

    p99_before: float
    p99_during: float
    ttft: float
    """The long prompt's time to first token."""
    makespan: float
    """Time from the long prompt's arrival until every stream is done."""

    @property
    def ratio(self) -> float:
        return self.p99_during / self.p99_before


async def run_round(base_url: str, model: str, given: argparse.Namespace, seed: int) -> Round:
    """Send one long prompt while the streams run."""
    draw = np.random.default_rng(seed)
    num_before = _SETTLE + given.before

    def body(input_len: int, output_len: int) -> bytes:
        workload = Workload(model, 1, input_len, output_len)
        return completion_body(workload, draw.integers(0, _VOCAB, input_len).tolist())

    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(base_url, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        streams = [_Stream() for _ in range(given.streams)]
        running = [
            tasks.create_task(
                post_stream(session, body(_INPUT_LEN, num_before + given.after), stream.add)
            )
            for stream in streams
        ]
        for stream in streams:
            await stream.has(num_before)
        long, sent = _Stream(), time.perf_counter()
        await post_stream(session, body(given.context - 1, 1), long.add)
        await asyncio.gather(*running)
    settled = max(stream.arrivals[_SETTLE - 1] for stream in streams)
    first = long.arrivals[0]
    before = [gap for stream in streams for gap in stream.gaps(settled, sent)]
    during = [gap for stream in streams for gap in stream.gaps(sent, first)]
    if not during:
        raise BenchError("no stream got a token while the long prompt was computed")
    return Round(
        p99_before=float(np.percentile(before, 99)),
        p99_during=float(np.percentile(during, 99)),
        ttft=first - sent,
        makespan=max(stream.arrivals[-1] for stream in (*streams, long)) - sent,
    )


async def measure(given: argparse.Namespace) -> Results:
    worker_flags = (
        *("--max-model-len", str(given.context)),
        *("--num-threads", str(given.num_threads)),
        *("--kv-cache-memory-gb", "0.5"),
    )
    rounds: dict[str, list[Round]] = {side: [] for side in _SIDES}
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(model_directory(None))
        urls = {}
        for side, flags in _SIDES.items():
            started = await stack.enter_async_context(service(model, (*worker_flags, *flags)))
            await started.wait_until_ready()
            urls[side] = started.base_url
        served = await find_model(urls["paced"])
        for index, side in turns(_SIDES, given.rounds, warm_ups=1):
            result = await run_round(urls[side], served, given, seed=index + 1)
            progress(f"round {index}: {side} {result}")
            if index >= 0:
                rounds[side].append(result)
    return _report(rounds)


def _report(rounds: dict[str, list[Round]]) -> dict[str, float]:
    table = Table(
        *("prompts:<8", "p99 before, ms:.1f", "during:.1f", "ratio:.2f"),
        *("its ttft, ms:.0f", "all done, ms:.0f"),
    )
    for side, each in rounds.items():
        before, during, ttft, makespan = (
            median(getattr(one, name) for one in each) * 1e3
            for name in ("p99_before", "p99_during", "ttft", "makespan")
        )
        table.row(side, before, during, median(one.ratio for one in each), ttft, makespan)
    paced, unpaced = rounds["paced"], rounds["unpaced"]

    def between(name: str, above: list[Round], below: list[Round]) -> float:
        values = ([getattr(one, name) for one in each] for each in (above, below))
        return Spread.of_ratios(*values).median

    metrics = {
        "p99_itl_ratio": median(one.ratio for one in paced),
        "p99_itl_ratio_unpaced": median(one.ratio for one in unpaced),
        "throughput_cost": 1 - between("makespan", unpaced, paced),
        "ttft_ratio": between("ttft", paced, unpaced),
    }
    for name, value in metrics.items():
        print(f"{name} {value:.3f}")
    return metrics


def _parse() -> argparse.Namespace:
    parser = arguments(__doc__, quick="a context of 1,024 and one round")
    add = parser.add_argument
    add("--streams", type=int, default=8, help="streams beside the long prompt")
    add("--context", type=int, help="tokens of the context; default: 2,048")
    add("--rounds", type=int, help="rounds of each service; default: 3")
    add("--num-threads", type=int, default=2, help="threads of a worker on a CPU")
    given = parser.parse_args()
    given.context = given.context or (1024 if given.quick else 2048)
    given.rounds = given.rounds or (1 if given.quick else 3)
    given.before, given.after = (32, 96) if given.quick else (64, 192)
    return given


if __name__ == "__main__":
    main(_parse(), measure)
