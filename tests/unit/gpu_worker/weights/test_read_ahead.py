"""Reading ahead: what is read, in which order, how far, and what a failure does."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker.models.registry import open_model
from gpu_worker.ranks.shards import Place
from gpu_worker.weights import read_ahead, reader
from gpu_worker.weights.checkpoint import Checkpoint
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.read_ahead import (
    AHEAD_BYTES,
    NUM_THREADS,
    REQUEST_BYTES,
    ReadAhead,
    read_to_cache,
)
from gpu_worker.weights.tensor_file import Extent, Piece
from model_files.locate import find_model
from tests.gguf_fixture import SIZES, write_gguf
from tests.lone_rank import LoneRank
from tests.unit.gpu_worker.models.paged_loop import CPU

MIB = 2**20
PATH = Path("model.safetensors")
TIMEOUT_S = 30


def extents(*sizes):
    """Extents of one file, one after the other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [Extent(PATH, -1, range(end - n, end)) for end, n in zip(ends, sizes, strict=True)]


def plenty():
    return 2**40


def read_ahead_threads():
    return [each for each in threading.enumerate() if each.name.startswith("read-ahead")]


class Disk:
    """Notes what is read; reads wait while it is closed."""

    def __init__(self, *, is_open=True):
        self.reads = []
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self._lock = threading.Lock()
        if is_open:
            self.gate.set()

    def __call__(self, extent):
        with self._lock:
            self.reads.append(extent.bytes)
        self.begun.release()
        assert self.gate.wait(TIMEOUT_S)

    def bytes_from(self, start):
        return sum(len(part) for part in self.reads if part.start >= start)


def test_an_extent_is_read_before_it_is_used():
    wanted = extents(MIB, 5, 9 * MIB, 0, 100)
    disk = Disk()
    with ReadAhead([wanted[0], None, *wanted[1:]], disk, plenty) as ahead:
        for extent in (wanted[0], None, *wanted[1:]):
            ahead.wait_for_next()
            if extent is not None:
                of_it = (part for part in disk.reads if part.start in extent.bytes)
                assert sum(map(len, of_it)) == len(extent.bytes)
        ahead.wait_for_next()  # more than planned: nothing to wait for
    assert max(map(len, disk.reads)) == REQUEST_BYTES
    assert sum(map(len, disk.reads)) == wanted[-1].bytes.stop


def test_requests_run_at_once_in_the_order_of_use_and_beside_the_user():
    disk = Disk(is_open=False)
    with ReadAhead(extents(*[MIB] * 20), disk, plenty) as ahead:
        user = threading.Thread(target=ahead.wait_for_next)
        user.start()
        for _ in range(NUM_THREADS):
            assert disk.begun.acquire(timeout=TIMEOUT_S)
        assert sorted(part.start // MIB for part in disk.reads) == list(range(NUM_THREADS))
        disk.gate.set()
        user.join()
        # The first extent is in use, and the others are read without another call
        for _ in range(20 - NUM_THREADS):
            assert disk.begun.acquire(timeout=TIMEOUT_S)


@pytest.mark.parametrize(("available", "most"), [(2**40, AHEAD_BYTES), (400 * MIB, 100 * MIB)])
def test_it_reads_a_bounded_way_ahead(available, most):
    size = 60 * MIB
    wanted = extents(*[size] * 30)
    disk, farthest = Disk(), []
    with ReadAhead(wanted, disk, lambda: available) as ahead:
        for extent in wanted:
            ahead.wait_for_next()
            farthest.append(disk.bytes_from(extent.bytes.stop))
    assert max(farthest) <= most + size - 1


def test_more_memory_is_not_taken_while_others_take_it():
    free = iter([2**40, 2**40, *[0] * 100])
    wanted = extents(*[100 * MIB] * 20)
    disk = Disk()
    with ReadAhead(wanted, disk, lambda: next(free)) as ahead:
        for _ in wanted:
            ahead.wait_for_next()
    assert sum(map(len, disk.reads)) <= AHEAD_BYTES + 200 * MIB


def test_what_memory_cannot_keep_is_not_read_ahead():
    disk = Disk()
    with ReadAhead(extents(MIB, 51 * MIB, MIB), disk, lambda: 100 * MIB) as ahead:
        for _ in range(3):
            ahead.wait_for_next()
    assert sorted(disk.reads, key=lambda part: part.start) == [
        range(MIB),
        range(52 * MIB, 53 * MIB),
    ]


@pytest.mark.parametrize("num_failures", [1, 2])
def test_only_what_fails_twice_fails_the_load(num_failures):
    failures = iter([OSError("Stale file handle")] * num_failures)

    def read(extent):
        if extent.bytes.start == 10 and (error := next(failures, None)) is not None:
            raise error

    with ReadAhead(extents(10, 10, 10), read, plenty) as ahead:
        ahead.wait_for_next()
        if num_failures == 1:
            ahead.wait_for_next()
        else:
            with pytest.raises(ModelError, match=f"{PATH} cannot be read any more: Stale file"):
                ahead.wait_for_next()


def test_other_errors_of_a_thread_are_none_of_the_load():
    def read(_):
        raise MemoryError

    with ReadAhead(extents(10), read, plenty) as ahead:
        ahead.wait_for_next()


def test_a_machine_without_threads(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with ReadAhead(extents(10, 10), Disk(), plenty) as ahead:
        ahead.wait_for_next()
        ahead.wait_for_next()


def test_a_failed_load_cancels_what_has_not_begun(monkeypatch):
    disk = Disk(is_open=False)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            disk.gate.set()
            super().shutdown(wait=wait)

    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", Pool)
    ahead = ReadAhead([None, *extents(*[MIB] * 100)], disk, plenty)

    def fail():
        with ahead:
            ahead.wait_for_next()
            for _ in range(NUM_THREADS):
                assert disk.begun.acquire(timeout=TIMEOUT_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert len(disk.reads) == NUM_THREADS
    assert not read_ahead_threads()


def test_a_file_that_became_shorter(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100))
    file = os.open(path, os.O_RDONLY)
    try:
        read_to_cache(Extent(path, file, range(20, 100)))
        os.truncate(path, 50)
        read_to_cache(Extent(path, file, range(20, 50)))
        with pytest.raises(OSError, match="it ends at byte 50; it had at least 100"):
            read_to_cache(Extent(path, file, range(20, 100)))
    finally:
        os.close(file)


def test_what_is_not_cached_is_read_whole(tmp_path, monkeypatch):
    """As on a system that does not tell what it has cached."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(100)))
    read, real = [], os.preadv

    def few_at_a_time(file, buffers, offset, flags=0):
        if flags:
            raise BlockingIOError
        count = real(file, [buffers[0][:7]], offset)
        read.extend(buffers[0][:count])
        return count

    monkeypatch.setattr(read_ahead.os, "preadv", few_at_a_time)
    with path.open("rb") as file:
        read_to_cache(Extent(path, file.fileno(), range(20, 95)))
    assert read == list(range(20, 95))


# Where the tensors of a model lie.


def test_the_bytes_of_rows_of_shards(model_dirs):
    directory = model_dirs.get("llama", max_shard_size="50KB")
    checkpoint = Checkpoint(directory)
    for path in directory.glob("*.safetensors"):
        for name, whole in load_file(path).items():
            for where in ((), (slice(3, 17),), (slice(None), slice(2, 4))[: whole.dim()]):
                extent = checkpoint.extent(Piece(name, tuple(whole.shape), where))
                assert extent.path == path
                found = os.pread(extent.descriptor, len(extent.bytes), extent.bytes.start)
                assert found == whole[where[:1]].numpy().tobytes()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_bytes_of_a_gguf_file(model_dirs, tmp_path, family):
    file = write_gguf(model_dirs.get(family, **SIZES), tmp_path / "model.gguf", "Q4_0")
    checkpoint = Checkpoint(find_model(str(file), tmp_path / "cache"))
    stored = [name for name in checkpoint.names if name.endswith((".Q4_0", "norm.weight"))]
    assert len(stored) > 10
    for name in stored:
        whole = checkpoint.whole(name)
        extent = checkpoint.extent(Piece(name, tuple(whole.shape)))
        found = os.pread(extent.descriptor, len(extent.bytes), extent.bytes.start)
        if "q_proj" in name or "k_proj" in name:  # in another order
            assert sorted(found) == sorted(whole.numpy().tobytes())
        else:
            assert found == whole.numpy().tobytes()


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_neox"])
def test_a_load_uses_what_was_planned_in_that_order(model_dirs, monkeypatch, family):
    directory = model_dirs.get(family, max_shard_size="50KB")
    planned, used = [], []

    class Noting(Checkpoint):
        def extent(self, piece):
            extent = super().extent(piece)
            planned.append((piece, len(extent.bytes)))
            return extent

        def read_into(self, piece, out):
            used.append(piece)
            super().read_into(piece, out)

    def read_bytes(place):
        planned.clear()
        used.clear()
        source = open_model(directory, place=place)
        source.load(
            torch.float32, CPU, lambda _: None, LoneRank(place) if place.num_ranks > 1 else None
        )
        assert used
        assert used == [piece for piece, _ in planned]
        return sum(num_bytes for _, num_bytes in planned)

    monkeypatch.setattr(reader, "Checkpoint", Noting)
    whole = read_bytes(Place())
    for place in (Place(1, tensor_size=2), Place(1, pipeline_size=2)):
        assert read_bytes(place) < 0.8 * whole


def test_after_a_load_no_thread_and_no_file_is_left(model_dirs):
    directory = model_dirs.get("llama", max_shard_size="50KB")

    def stop(_):
        raise KeyboardInterrupt

    def open_files():
        paths = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
        return [path for path in paths if directory in path.parents]

    open_model(directory).load(torch.float32, CPU, lambda _: None)
    assert not read_ahead_threads()
    assert not open_files()
    with pytest.raises(KeyboardInterrupt):
        open_model(directory).load(torch.float32, CPU, stop)
    assert not read_ahead_threads()
