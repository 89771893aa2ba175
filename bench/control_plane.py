"""Measures the control plane's cost per token: router and scheduler beside a simulated device.

    python bench/control_plane.py --quick

A simulated worker replaces an H200 with a model of 8 billion parameters. One router and one
scheduler serve it; a separate, cheap process reads all streams as they arrive
(harness/many_streams.py). Each row of the table is a number of streams through one API. `http` and
`grpc` use the defaults: each token is a separate SSE event or message. The other two rows call the
service as a gateway does: `gateway_http` has `--gateway-interval` tokens in an event, and
`gateway_grpc` is one call of `GenerateMany`, on one connection, which sends each token at once.

Each number of streams is measured twice:

- First the device is slowed down, so that no reader falls behind: each stream gets `--rate` tokens
  a second, or fewer if all streams would exceed `--most` tokens/s together. The row has the
  processor time of router and scheduler per token; "tokens/piece" is the number of tokens that came
  in one event.
- Then the device runs at full speed. The row has the highest tokens/s, and the tokens/s that the
  device could give. All processes, including the reader, share this machine's cores. So on a small
  machine the highest tokens/s are the machine's limit, and not the router's.
"""

import argparse
import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from harness.case import (
    SHIPPED_MODEL,
    BenchError,
    Results,
    Table,
    arguments,
    main,
    numbers,
    progress,
)
from harness.processes import HOST, Process, environment, free_ports, modules
from harness.turns import Spread

from sim_worker.time_model import TimeModel

_H200 = TimeModel(
    num_params=8e9, kv_bytes_per_token=131_072, bytes_per_s=4.8e12, operations_per_s=8e14
)
_NUM_BLOCKS = 52_000
"""Blocks of 16 tokens that fit in 141 GB next to the weights."""
_MODEL = SHIPPED_MODEL.name
_PROMPT_LEN = 16
_NUM_WINDOWS = 5
"""Periods of time in a measurement. Their median counts, because other programs disturb some; the
least shows how much."""
_WARM_UP_S = 2.0
_START_S = 60.0
_MAX_MODEL_LEN = 32_768


@dataclass(frozen=True, slots=True)
class Cost:
    """One measurement."""

    router_us: Spread
    """Processor time per token."""
    scheduler_us: Spread
    tokens_per_s: float
    tokens_per_piece: float
    device_tokens_per_s: float
    """The device's maximum rate."""


@dataclass(frozen=True, slots=True)
class Client:
    """A way to request the streams."""

    name: str
    """The client's name in the table and in the results."""
    api: str
    """The name of the API in `harness.many_streams`."""
    stream_interval: int = 1
    per_connection: int = 64
    """Streams per connection, for gRPC."""


def clients(interval: int) -> dict[str, Client]:
    """Return all clients by name; an event of `gateway_http` has `interval` tokens."""
    return {
        client.name: client
        for client in (
            Client("http", "http"),
            Client("grpc", "grpc"),
            Client("gateway_http", "http", stream_interval=interval),
            Client("gateway_grpc", "grpc-many", per_connection=1 << 20),
        )
    }


async def measure_one(client: Client, num_streams: int, rate: float | None, seconds: float) -> Cost:
    """Measure a number of streams; `rate` is each stream's tokens per second, None: full speed."""
    steps_per_s = 1 / _H200.step_s(num_streams, num_streams * 256)
    # Streams start one after another, and none may end before the last window.
    num_tokens = min(int((_WARM_UP_S + seconds + 60) * (rate or steps_per_s)), _MAX_MODEL_LEN - 64)
    speedup = 1.0 if rate is None else rate / steps_per_s
    flags = (
        *(f"--params-b={_H200.num_params / 1e9}", f"--speedup={speedup}"),
        f"--bandwidth-gb-s={_H200.bytes_per_s / 1e9}",
        f"--tflops={_H200.operations_per_s / 1e12}",
        *(f"--num-blocks={_NUM_BLOCKS}", f"--max-num-seqs={num_streams}"),
        *("--max-num-batched-tokens=8192", f"--max-model-len={_MAX_MODEL_LEN}"),
    )
    with tempfile.TemporaryDirectory(prefix="quire-plane-") as name:
        (port,) = free_ports(1)
        model, target = f"--model={SHIPPED_MODEL}", f"unix:{name}/scheduler_svc.sock"
        module_to_flags = {
            "sim_worker": (model, *flags),
            "scheduler_svc": (f"--workers=unix:{name}/sim_worker.sock",),
            "router": (model, f"--scheduler={target}", f"--grpc-port={port}"),
        }
        async with modules(Path(name), module_to_flags) as processes:
            router, scheduler = processes["router"], processes["scheduler_svc"]
            http = router.base_url.removeprefix("http://")
            address = http if client.api == "http" else f"{HOST}:{port}"
            async with reader(client, address, num_streams, num_tokens) as reading:
                await asyncio.sleep(_WARM_UP_S)
                windows = [
                    await measure_window(router, scheduler, seconds / _NUM_WINDOWS)
                    for _ in range(_NUM_WINDOWS)
                ]
                num_tokens = await num_generated(router)
                num_pieces = await reading()
                in_all = await num_generated(router)
    router_us, scheduler_us, tokens_per_s = map(Spread.of, zip(*windows, strict=True))
    num_context_tokens = num_streams * _PROMPT_LEN + num_tokens
    return Cost(
        router_us=router_us,
        scheduler_us=scheduler_us,
        tokens_per_s=tokens_per_s.median,
        tokens_per_piece=in_all / num_pieces,
        device_tokens_per_s=num_streams * speedup / _H200.step_s(num_streams, num_context_tokens),
    )


async def measure_window(
    router: Process, scheduler: Process, seconds: float
) -> tuple[float, float, float]:
    """Return the processor time per token of router and scheduler, in us, and the tokens/s."""
    tokens, started_s = await num_generated(router), time.monotonic()
    router_s, scheduler_s = router.running_s(), scheduler.running_s()
    await asyncio.sleep(seconds)
    router_s, scheduler_s = router.running_s() - router_s, scheduler.running_s() - scheduler_s
    took_s = time.monotonic() - started_s
    tokens = max(1, await num_generated(router) - tokens)
    return router_s / tokens * 1e6, scheduler_s / tokens * 1e6, tokens / took_s


@contextlib.asynccontextmanager
async def reader(
    client: Client, address: str, num_streams: int, num_tokens: int
) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Read streams in a separate process; the block begins when each has its first token.

    Yields a function that ends the reading and returns how many pieces have arrived.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "harness.many_streams", client.api, address, f"--model={_MODEL}"),
        *(f"--streams={num_streams}", f"--tokens={num_tokens}"),
        *(
            f"--stream-interval={client.stream_interval}",
            f"--per-connection={client.per_connection}",
        ),
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None

    async def report() -> int:
        assert process.stdout is not None
        if not (line := await process.stdout.readline()):
            raise BenchError("the reader has ended; its error is above")
        num_pieces: int = json.loads(line)["num_pieces"]
        return num_pieces

    async def end() -> int:
        process.terminate()
        return await report()

    try:
        async with asyncio.timeout(_START_S):
            await report()
        yield end
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def num_generated(router: Process) -> int:
    """Return how many tokens the router has delivered."""
    text = await router.get("/metrics") or ""
    found = re.search(r"^quire_generation_tokens_total\S* (\S+)", text, re.MULTILINE)
    if found is None:
        raise BenchError("the router's metrics have no count of tokens")
    return int(float(found[1]))


async def measure(given: argparse.Namespace) -> Results:
    results: dict[str, float] = {}
    seconds = 5.0 if given.quick else given.seconds
    known = clients(given.gateway_interval)
    columns = ("streams:d", "rate/stream:.0f", "tokens/s:,.0f", "device's:,.0f")
    table = Table(
        *("api:<12", *columns, "tokens/piece:.2f"),
        *("router us/token:.1f", "least:.1f", "scheduler us/token:.1f", "least:.1f"),
    )
    for num_streams in given.streams:
        rate = min(given.rate, given.most / num_streams)
        for name in given.apis:
            client = known[name]
            for each_rate in (rate,) if given.paced_only else (rate, None):
                progress(f"{num_streams} streams by {name} ...")
                cost = await measure_one(client, num_streams, each_rate, seconds)
                table.row(
                    *(name, num_streams, each_rate, cost.tokens_per_s, cost.device_tokens_per_s),
                    *(cost.tokens_per_piece, cost.router_us.median, cost.router_us.least),
                    *(cost.scheduler_us.median, cost.scheduler_us.least),
                )
                key = f"{name}_{num_streams}"
                if each_rate is None:
                    results[f"max_tokens_per_s_{key}"] = cost.tokens_per_s
                    results[f"device_tokens_per_s_{key}"] = cost.device_tokens_per_s
                    continue
                results[f"router_us_per_token_{key}"] = cost.router_us.median
                results[f"scheduler_us_per_token_{key}"] = cost.scheduler_us.median
                results[f"tokens_per_piece_{key}"] = cost.tokens_per_piece
                results.setdefault(
                    f"scheduler_us_per_token_{num_streams}", cost.scheduler_us.median
                )
    progress(json.dumps(results))
    return results


if __name__ == "__main__":
    parser = arguments(__doc__, quick="5 seconds a row, and 256 streams only unless given")
    parser.add_argument("--streams", type=numbers, help="numbers of streams")
    parser.add_argument(
        "--apis",
        type=lambda text: text.split(","),
        default=[*clients(1)],
        help=", ".join(clients(1)),
    )
    parser.add_argument(
        "--gateway-interval", type=int, default=4, help="tokens per event of gateway_http"
    )
    parser.add_argument("--rate", type=float, default=40.0, help="tokens/s of a stream")
    parser.add_argument("--most", type=float, default=10_240.0, help="tokens/s of all streams")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement")
    parser.add_argument("--paced-only", action="store_true", help="leave out full speed")
    given = parser.parse_args()
    given.streams = given.streams or ((256,) if given.quick else (64, 256, 1024))
    main(given, measure)
