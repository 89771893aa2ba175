"""Measures the cost of KV events: for a change, for a large snapshot, and for a concurrent step.

Prints one JSON line. `held_ms` is the CPU time for which one slice of a snapshot holds the event
loop, and so delays a step of scheduling. `zmq_held_ms` is the same if the slice is also converted
to vLLM's format. `zmq_lost_held_ms` is the time of one part of the removal of all blocks of a lost
worker. `step_p99_ms` and `step_max_ms` say how late a task runs that is due every millisecond,
without and with a snapshot in progress; on a busy machine these two say more about the machine.
"""

import argparse
import asyncio
import gc
import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.machine import machine_facts

from contract.hashing import BlockHash, extend_chain, root_hash
from quire.v1.kv_pb2 import KvCacheCleared, KvEvent, WatchKvResponse
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.space.cache_watcher import CacheTier
from scheduler_svc.kv_events.feed import KvEvents, WorkerFeed
from scheduler_svc.kv_events.vllm_format import AsOneEngine, encode

TICK_S = 0.001
SEQ_BLOCKS = 64
REQUEST = SimpleNamespace(cache_salt="")


def fill(feed: WorkerFeed, num_blocks: int, block_size: int) -> float:
    """Name `num_blocks` blocks in chains, as a publisher does; return seconds per block."""
    index = feed.attach(block_size)
    table = index.table(CacheTier.DEVICE)
    took_s = 0.0
    for first in range(0, num_blocks, SEQ_BLOCKS):
        tokens = np.arange(first, first + SEQ_BLOCKS * block_size, dtype=np.int32)
        hashes: list[BlockHash] = []
        extend_chain(hashes, root_hash(str(first)), tokens, block_size)
        seq = cast("Sequence", SimpleNamespace(block_hashes=hashes, request=REQUEST))
        started = time.perf_counter()
        index.on_named(seq, 0, SEQ_BLOCKS, tokens)
        for block, name in enumerate(hashes, first):
            table.setdefault(name, block)
        feed.flush()
        took_s += time.perf_counter() - started
    return took_s / num_blocks


def publish_s(num_blocks: int, block_size: int, *, watched: bool) -> float:
    """Return the seconds per block of publishing to a pool, with or without a watcher."""
    pool = BlockPool(num_blocks, DeviceBlockId)
    hashes = [BlockHash(sha256(i.to_bytes(8, "little")).digest()) for i in range(num_blocks)]
    if watched:
        index = KvEvents(1).feed("w").attach(block_size)
        pool.find_in(index.table(CacheTier.DEVICE))
    blocks = pool.allocate(num_blocks)
    started = time.perf_counter()
    pool.publish(blocks, hashes)
    return (time.perf_counter() - started) / num_blocks


async def lateness(until: asyncio.Event) -> list[float]:
    """Return how late each tick runs, in seconds."""
    late: list[float] = []
    while not until.is_set():
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - due)
    return late


async def idle(seconds: float) -> list[float]:
    until = asyncio.Event()
    ticks = asyncio.create_task(lateness(until))
    await asyncio.sleep(seconds)
    until.set()
    return await ticks


@dataclass
class Snapshot:
    """The cost of one snapshot, and the delay of other tasks."""

    took_s: float = 0.0
    num_bytes: int = 0
    held_s: list[float] = field(default_factory=list)
    """CPU time of each turn of the event loop."""
    late_s: list[float] = field(default_factory=list)
    """How late the ticks ran during the snapshot."""


async def snapshot(events: KvEvents, engine: AsOneEngine | None = None) -> Snapshot:
    """Read one snapshot; serialize it as gRPC does or, with `engine`, as the ZeroMQ outlet does."""
    until, result = asyncio.Event(), Snapshot()
    ticks = asyncio.create_task(lateness(until))
    await asyncio.sleep(0.05)
    started = time.perf_counter()
    with events.reader() as reader:
        messages = reader.messages()
        is_read = False
        while not is_read:
            began = time.thread_time()
            message = await anext(messages)
            is_read = bool(message.events) and message.events[-1].HasField("end")
            if engine is None:
                result.num_bytes += len(message.SerializeToString())
                result.held_s.append(time.thread_time() - began)
                await asyncio.sleep(0)  # as a stream's write lets others run
            else:
                await convert(engine, message, result, began)
    result.took_s = time.perf_counter() - started
    until.set()
    result.late_s = await ticks
    return result


async def convert(
    engine: AsOneEngine, message: WatchKvResponse, result: Snapshot, began: float
) -> None:
    """Convert a message as the outlet to ZeroMQ does; the message's slice began at `began`."""
    for part in engine.apply(message):
        result.num_bytes += len(encode(part))
        result.held_s.append(time.thread_time() - began)
        await asyncio.sleep(0)
        began = time.thread_time()


async def loss(engine: AsOneEngine) -> Snapshot:
    """Remove all blocks of the worker."""
    result, started = Snapshot(), time.perf_counter()
    cleared = KvEvent(cleared=KvCacheCleared())
    message = WatchKvResponse(worker="w", events=[cleared])
    await convert(engine, message, result, time.thread_time())
    result.took_s = time.perf_counter() - started
    return result


def late_ms(late: list[float], name: str) -> dict[str, float]:
    p99, most = np.quantile(late, 0.99), max(late)
    return {f"step_p99_ms_{name}": round(p99 * 1e3, 3), f"step_max_ms_{name}": round(most * 1e3, 3)}


def held_ms(runs: list[Snapshot], name: str) -> dict[str, float]:
    """Return the numbers of the round whose longest turn is the shortest of all rounds."""
    held = min((run.held_s for run in runs), key=max)
    p99, most = np.quantile(held, 0.99), max(held)
    return {f"{name}held_ms_p99": round(p99 * 1e3, 3), f"{name}held_ms_max": round(most * 1e3, 3)}


async def measure(num_blocks: int, block_size: int, rounds: int) -> dict[str, float]:
    """Return the best snapshot of some rounds, and the cost of a change."""
    events = KvEvents(1)
    per_block_s = fill(events.feed("w"), num_blocks, block_size)
    gc.freeze()  # as a serving process does
    quiet = await idle(1.0)
    runs = [await snapshot(events) for _ in range(rounds)]
    best = min(runs, key=lambda run: run.took_s)
    converted, lost = [], []
    for _ in range(rounds):
        engine = AsOneEngine()
        converted.append(await snapshot(events, engine))
        lost.append(await loss(engine))
    few = min(num_blocks, 100_000)
    return {
        "num_blocks": num_blocks,
        "snapshot_s": round(best.took_s, 3),
        "snapshot_mib": round(best.num_bytes / 2**20, 1),
        **late_ms(quiet, "idle"),
        **late_ms(best.late_s, "snapshot"),
        **held_ms(runs, ""),
        "zmq_snapshot_s": round(min(run.took_s for run in converted), 3),
        **held_ms(converted, "zmq_"),
        "zmq_lost_s": round(min(run.took_s for run in lost), 3),
        **held_ms(lost, "zmq_lost_"),
        "index_us_per_block": round(per_block_s * 1e6, 2),
        "publish_us_per_block_off": round(publish_s(few, block_size, watched=False) * 1e6, 2),
        "publish_us_per_block_on": round(publish_s(few, block_size, watched=True) * 1e6, 2),
    }


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with suppress(KeyboardInterrupt):
        result = asyncio.run(measure(options.blocks, options.block_size, options.rounds))
        print(json.dumps({"machine": machine_facts(), **result}))


if __name__ == "__main__":
    main()
