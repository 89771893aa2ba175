"""Open-loop clients: requests of mixed lengths arrive at random, however busy the server is."""

import asyncio
import random
import time
from dataclasses import dataclass

import aiohttp
from harness.closed_loop import (
    LoadResult,
    Stream,
    Workload,
    completion_body,
    in_parallel,
    summarize,
    timed_stream,
)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests arrive, and how long they are."""

    requests_per_s: float
    duration_s: float
    """The time in which they arrive; the answers may take longer."""
    input_lens: tuple[int, int]
    """The bounds of a prompt's length; short ones are more frequent."""
    output_lens: tuple[int, int]


def lengths(chance: random.Random, bounds: tuple[int, int]) -> int:
    """Draw a length between the bounds; its logarithm is uniform."""
    least, most = bounds
    return round(least * (most / least) ** chance.random())


async def run_arrivals(base_url: str, model: str, arrivals: Arrivals) -> LoadResult:
    """Send the requests; raises BenchError if one is refused. `concurrency` is their number."""
    chance = random.Random(0)
    streams: list[Stream] = []
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:

        async def send(request: tuple[float, bytes]) -> None:
            delay_s, body = request
            await asyncio.sleep(delay_s)
            streams.append(await timed_stream(session, body))

        requests = []
        delay_s = 0.0
        while delay_s < arrivals.duration_s:
            length = lengths(chance, arrivals.input_lens)
            load = Workload(model, 1, length, lengths(chance, arrivals.output_lens))
            prompt = [chance.randrange(load.vocab_size) for _ in range(length)]
            requests.append((delay_s, completion_body(load, prompt)))
            delay_s += chance.expovariate(arrivals.requests_per_s)
        started = time.perf_counter()
        await in_parallel(requests, len(requests), send)
        return summarize(streams, len(streams), time.perf_counter() - started)
