"""Measures a gRPC server's own cost: at each tick it sends one serialized message to many streams.

    python bench/grpc_server.py --streams 256

One process runs the server, with `grpc.aio` and `rpc.http2` in turns; a second process reads. The
result is the server's processor time per message. The least of the turns counts, because other
programs disturb some turns.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import uvloop
from harness.case import Results, Table, arguments, main
from harness.processes import HOST, environment

from rpc.http2.limits import ConnectionLimits
from rpc.http2.server import Http2Server

_METHOD = "Stream"
_SERVICE = "quire.bench.Messages"
_MIB = 2**20
_NUM_BYTES = 48
"""About the size of a token's message."""
_TICKS_PER_S = 40
_WARM_UP_TICKS = 20
_START_S = 30.0
_PER_CONNECTION = 64

SERVERS: dict[str, Any] = {
    "grpc.aio": lambda: grpc.aio.server(options=[("grpc.max_concurrent_streams", 4096)]),
    "rpc.http2": lambda: Http2Server(ConnectionLimits(_MIB, _MIB, 16384, 4096)),
}


async def measure_one(name: str, num_streams: int, num_ticks: int) -> float:
    """Return the processor time per message, in us."""
    message = bytes(_NUM_BYTES)
    tick = asyncio.Event()
    begun: asyncio.Queue[None] = asyncio.Queue()

    async def stream(_request: bytes, context: Any) -> None:
        begun.put_nowait(None)
        while True:
            await tick.wait()
            await context.write(message)

    server = SERVERS[name]()
    handler = grpc.unary_stream_rpc_method_handler(stream)
    generic = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()

    async def run_ticks(count: int) -> None:
        nonlocal tick
        for _ in range(count):
            due, tick = tick, asyncio.Event()
            due.set()
            await asyncio.sleep(1 / _TICKS_PER_S)

    async with reader(port, num_streams):
        async with asyncio.timeout(_START_S):
            for _ in range(num_streams):
                await begun.get()
        await run_ticks(_WARM_UP_TICKS)
        before_s = time.process_time()
        await run_ticks(num_ticks)
        took_s = time.process_time() - before_s
    await server.stop(None)
    return took_s / (num_ticks * num_streams) * 1e6


@contextlib.asynccontextmanager
async def reader(port: int, num_streams: int) -> AsyncIterator[None]:
    """Read the streams in another process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, f"--read={port}", f"--streams={num_streams}"),
        env=environment(),
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def read(port: int, num_streams: int) -> None:
    async def read_all(channel: grpc.aio.Channel) -> None:
        call = channel.unary_stream(f"/{_SERVICE}/{_METHOD}")(b"")
        while await call.read():
            pass

    num_connections = -(-num_streams // _PER_CONNECTION)
    channels = [
        grpc.aio.insecure_channel(
            f"{HOST}:{port}", options=[("grpc.use_local_subchannel_pool", 1), ("n", i)]
        )
        for i in range(num_connections)
    ]
    calls = [read_all(channels[i % num_connections]) for i in range(num_streams)]
    await asyncio.gather(*calls, return_exceptions=True)


async def measure(given: argparse.Namespace) -> Results:
    num_ticks = 40 if given.quick else 200
    table = Table("server:<12", "streams:d", "us/message:.1f")
    results: dict[str, float] = {}
    for name in list(SERVERS) * given.turns:
        took_us = await measure_one(name, given.streams, num_ticks)
        table.row(name, given.streams, took_us)
        key = f"us_per_message_{name}"
        results[key] = min(took_us, results.get(key, took_us))
    sys.stdout.write(json.dumps(results) + "\n")
    return results


if __name__ == "__main__":
    parser = arguments(__doc__, quick="one second a turn")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--read", type=int, help="only read from a server at this port")
    given = parser.parse_args()
    if given.read:
        uvloop.run(read(given.read, given.streams))
    else:
        main(given, measure)
