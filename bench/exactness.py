"""Checks that streams stay exact in every format while their KV is preempted, moved and lost.

    python bench/exactness.py --streams 2500
    python bench/exactness.py --formats bfloat16,bfloat16+int8 --streams 500 --json FILE

For each format of weights and KV, a service of one router, one scheduler and two workers serves 64
streams at a time. The streams have greedy and sampled outputs, several outputs per prompt,
penalties, grammars, beams, and LoRA adapters; the workers guess tokens by n-grams. The KV pools
hold only a sixth of the streams. So sequences are preempted, swapped to the host, spilled to the
disk, and recomputed. In addition:

- The disk tier's file system is repeatedly filled up and freed, so that moves to the disk fail.
- Live requests move with their KV from one worker to the other: one by one, or all of them because
  their worker drains.
- The scheduler is killed, and the next one takes over.
- Workers are killed, so that the other worker recomputes their sequences.

Each stream is compared, token for token, with the output of the same request alone.

The disk tier needs a separate small file system, so the benchmark mounts a tmpfs. Without the right
to mount, moves to the disk do not fail, and the table leaves out the number of failed moves.

Exits with 1 if a token differs, or if one of these disturbances did not happen.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import grpc.aio
from adapters import write_adapter
from faults.service import ChaosService, Fault, What, chaos_service
from faults.streams import Case, Streams, make_cases
from harness.case import SHIPPED_MODEL, BenchError, Results, Table, arguments, main, progress

from contract.errors import QuireError
from contract.sampling import BeamSearch, SamplingParams
from gpu_worker.lora.adapted_maps import AdaptableConfig
from gpu_worker.models.registry import open_model
from quire.client import AsyncClient
from quire.v1 import kv_pb2, scheduler_pb2
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub

FORMATS = ("float32", "bfloat16", "bfloat16+int8", "bfloat16+fp8")
"""The dtype of the weights, and the format of the KV if it differs."""
_NUM_BLOCKS = 160
"""Enough for the longest request, and for a sixth of the streams."""
_HOST_GB = 0.004
_DISK_GB = 0.02
_DISK_MB = 48
"""The size of the file system of both disk tiers, and of the file that fills it."""
_FULL_S = 1.0
_MOVE_EVERY_S = 0.2
_MOVE_TIMEOUT_S = 30.0
_PROGRESS_S = 10.0
_NUM_QUICK = 150
_ADAPTER = "exact-adapter"
_DISTURBANCES = (
    ("preempted", "scheduler", "quire_num_preemptions_total"),
    ("recomputed tokens", "scheduler", "quire_recomputed_tokens_total"),
    ("swapped out", "scheduler", "quire_kv_swapped_out_blocks_total"),
    ("stored on disk", "scheduler", "quire_kv_stored_blocks_total"),
    ("failed disk moves", "scheduler", "quire_kv_failed_disk_moves_total"),
    ("moved requests", "scheduler", 'quire_migrations_total{end="arrived"}'),
    ("adopted tokens", "scheduler", "quire_adopted_tokens_total"),
    ("right guesses", "worker-0", "quire_worker_spec_decode_num_accepted_tokens_total"),
)
"""The disturbances that each format's streams must experience: title, process and counter."""
_ORPHANED = "orphaned"
"""The title of one more disturbance: sequences whose worker was killed."""


@dataclass(slots=True)
class Counts:
    """The processes' counters, summed over their restarts."""

    totals: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0
    num_drains: int = 0
    may_fill: bool = True
    """Whether this user may mount the file system that is filled up."""

    async def add(self, service: ChaosService, process: str) -> None:
        """Add the counters of a process that is about to end."""
        metrics: Mapping[str, float] = await service.metrics(process)
        for title, of, counter in _DISTURBANCES:
            if of == process:
                self.totals[title] += int(metrics.get(counter, 0))


def more_cases(chance: random.Random, num: int) -> Iterator[Case]:
    """Draw beam searches, and requests for an adapter, which `make_cases` lacks."""
    for index in range(num):
        prompt = tuple(chance.randrange(2, 4000) for _ in range(chance.randrange(20, 200)))
        sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        if index % 2:
            yield Case(prompt, sampling, model=_ADAPTER)
        else:
            beam = BeamSearch(width=3)
            yield Case(prompt, replace(sampling, max_tokens=32), n=2, beam=beam)


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """Mount a tmpfs at `directory`; yields whether that was allowed."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(directory)]
    is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=False)


async def fill_and_free(directory: Path, has_space: asyncio.Lock) -> None:
    """Until cancelled, fill the file system and free it again, except while a worker restarts."""
    filler = directory / "filler"
    while True:
        async with has_space:
            with contextlib.suppress(OSError):  # no space left, as intended
                filler.write_bytes(bytes(_DISK_MB * 2**20))
            await asyncio.sleep(_FULL_S)
            filler.unlink(missing_ok=True)
        await asyncio.sleep(_FULL_S)


async def end_often(
    service: ChaosService, counts: Counts, every_s: float, has_space: asyncio.Lock
) -> None:
    """Until cancelled, end processes in turn: kill the scheduler, kill a worker, or drain one."""
    ends = itertools.cycle(
        (
            *(("worker-0", False), ("scheduler", False), ("worker-1", True), ("scheduler", False)),
            *(("worker-1", False), ("scheduler", False), ("worker-0", True), ("scheduler", False)),
        )
    )
    async with AsyncClient(service.targets) as client:
        for name, drains in ends:
            await asyncio.sleep(every_s)
            await counts.add(service, name)
            async with contextlib.AsyncExitStack() as stack:
                if name != "scheduler":  # a worker does not start where its tier has no space
                    await stack.enter_async_context(has_space)
                if drains:
                    counts.num_drains += 1
                    await service.drain(name)
                else:
                    counts.num_kills += 1
                    counts.totals[_ORPHANED] += sum(
                        each.num_sequences
                        for each in await workers_kv(client)
                        if each.worker.endswith(f"to-{name}.sock")
                    )
                    await service.befall(Fault(What.KILLED, name))
                await service.wait_until_ready()


async def workers_kv(client: AsyncClient) -> Sequence[kv_pb2.WorkerKv]:
    return await client.describe_kv(max_blocks=0, timeout_s=_MOVE_TIMEOUT_S)


async def move_often(service: ChaosService, chance: random.Random) -> None:
    """Until cancelled, move one live request after another to the other worker.

    Beam searches cannot move, and a worker without room for a request refuses it.
    """
    async with (
        AsyncClient(service.targets) as client,
        grpc.aio.insecure_channel(service.scheduler_target) as channel,
    ):
        stub = SchedulerServiceStub(channel)
        while True:
            await asyncio.sleep(_MOVE_EVERY_S)
            with contextlib.suppress(QuireError, grpc.aio.AioRpcError):
                at = {
                    sequence.request_id: each.worker
                    for each in await workers_kv(client)
                    for sequence in each.sequences
                }
                if len({*at.values()}) == 2:
                    request_id, worker = chance.choice([*at.items()])
                    (other,) = {*at.values()} - {worker}
                    moved = scheduler_pb2.MigrateRequest(request_id=request_id, worker=other)
                    await stub.Migrate(moved, timeout=_MOVE_TIMEOUT_S)


@contextlib.asynccontextmanager
async def running(*tasks: asyncio.Task[None]) -> AsyncIterator[None]:
    """Cancel the tasks at the end; raise an error of one of them, if any."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def run_format(given: argparse.Namespace, name: str) -> tuple[Streams, Counts]:
    """Serve and disturb streams in one format, and compare each with its request's output alone."""
    dtype, _, kv_dtype = name.partition("+")
    num_streams = _NUM_QUICK if given.quick else given.streams
    chance = random.Random(given.seed)
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="quire-exact-") as root:
        adapter, disk = Path(root) / _ADAPTER, Path(root) / "disk"
        adapter.mkdir()
        config = open_model(given.model).config
        assert isinstance(config, AdaptableConfig), "adapters are for these"
        write_adapter(adapter, config, rank=4)
        worker_flags = [
            *(f"--dtype={dtype}", f"--kv-cache-dtype={kv_dtype or 'auto'}"),
            *(f"--host-kv-memory-gb={_HOST_GB}", f"--disk-kv-memory-gb={_DISK_GB}"),
            *(f"--disk-kv-dir={disk}", "--kv-checksum", "--speculative=ngram"),
            f"--lora={_ADAPTER}={adapter}",
        ]
        with small_disk(disk) as counts.may_fill:
            async with chaos_service(
                Path(root), given.model, _NUM_BLOCKS, worker_flags=worker_flags
            ) as service:
                streams = Streams(service.targets)
                try:
                    cases = make_cases(chance, given.cases * 2 // 3)
                    cases += more_cases(chance, given.cases // 3)
                    await streams.prepare(cases)
                    has_space = asyncio.Lock()
                    tasks = [
                        end_often(service, counts, given.every, has_space),
                        move_often(service, random.Random(given.seed)),
                    ]
                    tasks += [fill_and_free(disk, has_space)] if counts.may_fill else []
                    async with (
                        running(*map(asyncio.ensure_future, tasks)),
                        streams.keep_live(given.live, chance),
                    ):
                        await until_judged(streams, num_streams, name)
                    await service.wait_until_ready()
                    for process in ("scheduler", "worker-0"):
                        await counts.add(service, process)
                finally:
                    await streams.close()
                    if given.logs is not None:
                        service.save_logs(given.logs / name)
    return streams, counts


async def until_judged(streams: Streams, num: int, name: str) -> None:
    """Wait until `num` streams were compared; print errors and the progress."""
    next_s = time.monotonic() + _PROGRESS_S
    num_said = 0
    while streams.verdict.num_streams < num:
        await asyncio.sleep(0.2)
        for problem in streams.verdict.errors[num_said:20]:
            progress(f"{name}: wrong: {problem}")
            num_said += 1
        if time.monotonic() > next_s:
            next_s += _PROGRESS_S
            verdict = streams.verdict
            progress(f"{name}: {verdict.num_streams} of {num}, {len(verdict.errors)} wrong")


async def run(given: argparse.Namespace) -> Results:
    unknown = set(given.formats) - set(FORMATS)
    if unknown:
        raise BenchError(f"--formats has {', '.join(unknown)}; it may have {', '.join(FORMATS)}")
    titles = [*(title for title, _, _ in _DISTURBANCES), _ORPHANED]
    table = Table(
        *("format:<14", "streams:d", "tokens:d", "wrong outputs:d", "wrong tokens:d", "kills:d"),
        "drains:d",
        *(f"{title}:d" for title in titles),
    )
    results = dict.fromkeys(("streams", "wrong_outputs", "wrong_tokens", "undisturbed"), 0)
    for name in given.formats:
        streams, counts = await run_format(given, name)
        verdict = streams.verdict
        num_wrong = verdict.lost + verdict.duplicated + verdict.contradicted
        totals = {title: counts.totals[title] for title in titles}
        if not counts.may_fill:
            del totals["failed disk moves"]
        table.row(
            *(name, verdict.num_streams, verdict.num_tokens, len(verdict.errors), num_wrong),
            *(counts.num_kills, counts.num_drains, *map(totals.get, titles)),
        )
        for problem in verdict.errors[:20]:
            print(f"  wrong: {problem}")
        key = name.replace("+", "_")
        results |= {f"{key}_{title.replace(' ', '_')}": num for title, num in totals.items()}
        results["streams"] += verdict.num_streams
        results["wrong_outputs"] += len(verdict.errors)
        results["wrong_tokens"] += num_wrong
        results["undisturbed"] += sum(num == 0 for num in totals.values())
    return results


def formats(text: str) -> Sequence[str]:
    return tuple(text.split(","))


def _parse() -> argparse.Namespace:
    parser = arguments(__doc__, quick=f"{_NUM_QUICK} streams of each format")
    add = parser.add_argument
    add("--formats", type=formats, default=FORMATS, help="separated by commas")
    add("--streams", type=int, default=2500, help="streams to compare in each format")
    add("--live", type=int, default=64, help="streams at a time")
    add("--cases", type=int, default=48, help="different requests")
    add("--every", type=float, default=4.0, metavar="S", help="seconds between kills and drains")
    add("--seed", type=int, default=0, help="seed of the requests")
    add("--model", type=Path, default=SHIPPED_MODEL)
    add("--logs", type=Path, metavar="DIR", help="also keep the processes' logs here")
    return parser.parse_args()


if __name__ == "__main__":
    results = main(_parse(), run)
    if results["wrong_outputs"] or results["wrong_tokens"] or results["undisturbed"]:
        sys.exit("a stream is wrong, or was not disturbed in each way: see above")
