"""Measures how fast KV moves from one worker's host memory to another's: gRPC, NIXL, memcpy.

    python bench/transfer.py [--quick] [--json FILE] [--model DIR] [--mib 256]

Three worker processes run on this machine. One has NIXL (`pip install 'quire[nixl]'`), one does
not. The third has NIXL and pulls the same number of blocks, in random order, from each of the other
two. Checksums are compared, as while serving. memcpy copies as many bytes in pieces of 4 MiB within
this process. gRPC, NIXL and memcpy take turns; a ratio compares numbers of the same round. CPU time
is the sum over all processes; on a busy machine it is more reliable than speed.
"""

import argparse
import contextlib
import importlib.util
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import grpc.aio
import numpy as np
from harness.case import SHIPPED_MODEL, BenchError, Results, Table, arguments, main, progress
from harness.processes import Process, free_ports
from harness.turns import Spread, turns

from contract.codec.packing import pack_int32
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel

EPOCH = 1
_PIECE_BYTES = 4 * 1024**2
_GIB = 1024**3


class Worker:
    """A worker process, to which this script is the scheduler."""

    def __init__(self, process: Process, target: str, channel: grpc.aio.Channel) -> None:
        self.process = process
        self.target = target
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self.info = worker_pb2.WorkerInfo()

    async def attach(self) -> None:
        answer = await self.stub.Attach(worker_pb2.AttachRequest(epoch=EPOCH))
        self.info = answer.worker

    async def pull(self, source: "Worker", sources: np.ndarray, targets: np.ndarray) -> None:
        await self.stub.PullKv(
            worker_pb2.PullKvRequest(
                epoch=EPOCH,
                source_target=source.target,
                source_instance_id=source.info.instance_id,
                source_host_block_ids=pack_int32(sources),
                host_block_ids=pack_int32(targets),
            )
        )

    async def pulled_bytes(self, means: str) -> float:
        name = f'quire_worker_kv_pulled_bytes_total{{means="{means}"}}'
        for line in (await self.process.get("/metrics") or "").splitlines():
            if line.startswith(name):
                return float(line.rpartition(" ")[2])
        return 0.0


@contextlib.asynccontextmanager
async def workers(
    model: Path, block_size: int, num_bytes: int, means: dict[str, str]
) -> AsyncIterator[dict[str, Worker]]:
    """Start workers, each with its --kv-transfer; yields when all are attached."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
        started: dict[str, Worker] = {}
        for (name, transfer), port in zip(means.items(), free_ports(len(means)), strict=True):
            flags = (
                f"--uds={directory}/{name}.sock",
                f"--http-port={port}",
                f"--model={model}",
                f"--kv-transfer={transfer}",
                f"--block-size={block_size}",
                f"--host-kv-memory-gb={num_bytes / _GIB}",
                "--num-blocks=16",
                "--num-threads=1",
            )
            process = Process(name, ("-m", "gpu_worker", *flags), directory / f"{name}.log", port)
            stack.push_async_callback(process.stop)
            process.start()
            target = f"unix:{directory}/{name}.sock"
            channel = await stack.enter_async_context(open_channel(target))
            started[name] = Worker(process, target, channel)
        for worker in started.values():
            await worker.process.wait_until_ready()
            await worker.attach()
        yield started


def copier(num_bytes: int) -> Callable[[], Coroutine[None, None, None]]:
    """Return a function that copies `num_bytes` bytes in pieces."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)

    async def copy() -> None:
        for first in range(0, num_bytes, _PIECE_BYTES):
            part = slice(first, first + _PIECE_BYTES)
            np.copyto(target[part], source[part])

    return copy


async def measure(given: argparse.Namespace) -> Results:
    if importlib.util.find_spec("nixl") is None:
        raise BenchError("NIXL is not installed: pip install 'quire[nixl]'")
    num_bytes = (32 if given.quick else given.mib) * 1024**2
    means = {"with NIXL": "nixl", "without": "grpc", "target": "nixl"}
    async with workers(given.model, given.block_size, num_bytes, means) as started:
        target = started["target"]
        block_bytes = target.info.block_bytes
        num_blocks = min(target.info.num_host_blocks, num_bytes // block_bytes)
        progress(f"{num_blocks} blocks of {block_bytes / 1024:.0f} KiB")
        rng = np.random.default_rng(1)
        order = [rng.permutation(num_blocks).astype(np.int32) for _ in range(2)]
        every = np.arange(num_blocks, dtype=np.int32)
        for name in ("with NIXL", "without"):  # writes all memory once
            await started[name].pull(target, every, every)
        before = await target.pulled_bytes("nixl")
        sides: dict[str, Callable[[], Coroutine[None, None, None]]] = {
            "gRPC": lambda: target.pull(started["without"], *order),
            "NIXL": lambda: target.pull(started["with NIXL"], *order),
            "memcpy": copier(num_blocks * block_bytes),
        }
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        cpu_s: dict[str, list[float]] = {side: [] for side in sides}

        def running_s() -> float:
            return time.process_time() + sum(each.process.running_s() for each in started.values())

        for index, side in turns(sides, 3 if given.quick else given.rounds, warm_ups=1):
            start_s, start_cpu_s = time.perf_counter(), running_s()
            await sides[side]()
            if index >= 0:
                gigabytes = num_blocks * block_bytes / 1e9
                speeds[side].append(gigabytes / (time.perf_counter() - start_s))
                cpu_s[side].append((running_s() - start_cpu_s) / gigabytes)
        num_pulls = len(speeds["NIXL"]) + 1
        if await target.pulled_bytes("nixl") - before != num_pulls * num_blocks * block_bytes:
            raise BenchError(f"NIXL failed; the log ends:\n{target.process.log_tail()}")
    results: dict[str, float] = {"block_kib": block_bytes / 1024, "num_blocks": num_blocks}
    table = Table(
        "means:<8", "GB/s:.2f", "least:.2f", "greatest:.2f", "over gRPC:.1f", "CPU s/GB:.2f"
    )
    for side, values in speeds.items():
        spread, ratio = Spread.of(values), Spread.of_ratios(values, speeds["gRPC"])
        cpu = Spread.of(cpu_s[side])
        table.row(side, spread.median, spread.least, spread.greatest, ratio.median, cpu.median)
        results |= spread.metrics(f"{side.lower()}_gb_per_s")
        results |= cpu.metrics(f"{side.lower()}_cpu_s_per_gb")
        results |= ratio.metrics(f"{side.lower()}_over_grpc")
    return results


if __name__ == "__main__":
    parser = arguments(__doc__, quick="32 MiB, three rounds")
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, help="a model directory")
    parser.add_argument("--mib", type=int, default=256, help="KV of one pull")
    parser.add_argument("--rounds", type=int, default=15, help="rounds")
    parser.add_argument("--block-size", type=int, default=256, help="tokens of a block")
    main(parser.parse_args(), measure)
