"""The far tier's store: a load gives the stored block or fails; steps never wait for it."""

import asyncio
import os
import threading
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from contract.errors import UnavailableError
from contract.hashing import BlockHash
from gpu_worker.kv import far_store
from gpu_worker.kv.far_store import FarStore, open_far_store
from gpu_worker.service.far_tier import fetch_far, store_far

IDENTITY = bytes(range(32))
LABELS = [BlockHash(bytes([number]) * 32) for number in range(20)]
BLOCK_BYTES = 64
CONTENTS = [bytes([number + 1]) * BLOCK_BYTES for number in range(20)]


@pytest.fixture(scope="module")
def s3_endpoint():
    """A local server of S3's protocol (`make s3-test`)."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: run make s3-test")
    moto = pytest.importorskip("moto.server", reason="moto is not installed: run make s3-test")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request, tmp_path):
    match request.param:
        case "file":
            yield f"file://{tmp_path}/far"
        case "memory":
            yield f"memory://{tmp_path}"
            MemoryFileSystem.store.clear()
        case "s3":
            patch = request.getfixturevalue("monkeypatch")
            patch.setattr(far_store, "_LOAD_S", 60.0)  # a server in Python, on a busy machine
            patch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_endpoint"))
            patch.setenv("AWS_ACCESS_KEY_ID", "none")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "none")
            bucket = f"b{uuid.uuid4().hex}"
            fsspec.filesystem("s3").mkdir(bucket)
            yield f"s3://{bucket}/far"
            fsspec.filesystem("s3").rm(bucket, recursive=True)


@pytest.fixture
def memory_url(tmp_path):
    yield f"memory://{tmp_path}"
    MemoryFileSystem.store.clear()


def open_store(url, *, identity=IDENTITY, max_bytes=1 << 30):
    return open_far_store(url, identity, max_bytes)


async def settle(store):
    """Wait until all stores have ended, and their results are handled."""
    async with asyncio.timeout(30):
        while store._num_storing_bytes:  # noqa: ASYNC110 - threads end it
            await asyncio.sleep(0.001)
        free = threading.Barrier(far_store._NUM_THREADS)  # all threads have ended their work
        calls = [far_store._call(store._stores, free.wait) for _ in range(free.parties)]
        await asyncio.gather(*calls)


async def keep(store, *numbers):
    for number in numbers:
        assert store.store(LABELS[number], CONTENTS[number])
    await settle(store)


def objects(store):
    return sorted(store._system.find(store._root))


def mode_of(path):
    return Path(path).stat().st_mode & 0o777


async def test_another_process_finds_what_was_stored(url):
    store = open_store(url)
    await keep(store, 1, 2)
    await keep(store, 1)  # a second store of the block changes nothing
    other = open_store(url)
    assert await other.load(LABELS[1]) == CONTENTS[1]
    assert await other.load(LABELS[2]) == CONTENTS[2]
    assert await other.load(LABELS[3]) is None
    assert len(objects(store)) == 2
    assert await open_store(url, identity=bytes(32)).load(LABELS[1]) is None, "other KV"


@pytest.mark.parametrize("harm", ["truncated", "changed", "empty", "another's", "longer"])
async def test_damaged_object_is_not_used_and_can_be_stored_again(url, harm):
    store = open_store(url)
    await keep(store, 1, 2)
    path, other = store._path(LABELS[1]), store._path(LABELS[2])
    data = store._system.cat_file(path)
    harmed = {
        "truncated": data[:-1],
        "changed": data[:-1] + bytes([data[-1] ^ 1]),
        "empty": b"",
        "another's": store._system.cat_file(other),
        "longer": data + b"0",
    }
    store._system.pipe_file(path, harmed[harm])
    assert await store.load(LABELS[1]) is None
    await keep(store, 1)
    assert await store.load(LABELS[1]) == CONTENTS[1]


async def test_oldest_objects_make_room(url, monkeypatch):
    monkeypatch.setattr(far_store, "_time_of", lambda info: info["name"])
    size = BLOCK_BYTES + far_store._HEADER.size
    store = open_store(url, max_bytes=4 * size)
    for number in range(10):
        await keep(store, number)
        await settle(store)
    assert len(objects(store)) <= 5
    assert await store.load(LABELS[0]) is None
    assert await store.load(LABELS[9]) == CONTENTS[9]


async def test_what_others_keep_in_the_directory_stays(url):
    store = open_store(url, max_bytes=1)
    root = store._root.removesuffix("/quire-kv")
    store._system.makedirs(store._root)
    for path in (f"{root}/model.safetensors", f"{store._root}/notes.txt"):
        store._system.pipe_file(path, b"weights")
    await keep(store, 1)
    await settle(store)
    assert objects(store) == [f"{store._root}/notes.txt"]
    assert store._system.cat_file(f"{root}/model.safetensors") == b"weights"


async def test_a_sweep_goes_on_past_an_object_that_cannot_be_deleted(url, monkeypatch):
    store = open_store(url, max_bytes=1)
    delete = store._system.rm_file

    def refuse_one(path):
        if LABELS[1].hex() in path:
            raise PermissionError(path)
        delete(path)

    monkeypatch.setattr(store._system, "rm_file", refuse_one)
    await keep(store, 1, 2)
    await settle(store)
    assert objects(store) == [store._path(LABELS[1])]


def test_time_sorts_as_text():
    assert far_store._time_of({"mtime": 999.5}) < far_store._time_of({"mtime": 1000.25})
    assert far_store._time_of({}) == ""


@pytest.mark.skipif(os.name != "posix", reason="permissions")
async def test_files_are_their_owners_only(tmp_path):
    store = open_store(f"file://{tmp_path}/far")
    await keep(store, 1)
    (path,) = objects(store)
    assert mode_of(path) == 0o600


class BadSystem:
    """A storage that fails, or hangs until `go` is set."""

    protocol = "bad"

    def __init__(self, *, hangs=False):
        self.hangs = hangs
        self.num_calls = 0
        self.go = threading.Event()

    def cat_file(self, path):  # noqa: ARG002
        self.num_calls += 1
        if self.hangs:
            self.go.wait()
        raise OSError("out of order")

    pipe_file = exists = cat_file


async def test_store_that_fails_is_left_alone_for_a_time(monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(far_store, "monotonic", lambda: now.s)
    system = BadSystem()
    store = FarStore(system, "bad", IDENTITY, 1 << 30)
    for _ in range(far_store._MAX_FAILURES):
        assert not store.is_paused
        assert await store.load(LABELS[1]) is None
    assert store.is_paused
    assert await store.load(LABELS[1]) is None
    assert not store.store(LABELS[1], CONTENTS[1])
    assert system.num_calls == far_store._MAX_FAILURES
    now.s += far_store._FIRST_PAUSE_S
    assert not store.is_paused
    assert await store.load(LABELS[1]) is None
    assert store.is_paused, "one more failure is enough"
    now.s += far_store._FIRST_PAUSE_S
    assert store.is_paused, "for longer"


async def test_store_that_hangs_costs_a_bounded_time_and_memory(monkeypatch):
    monkeypatch.setattr(far_store, "_LOAD_S", 0.0)
    monkeypatch.setattr(far_store, "_MAX_STORING_BYTES", 3 * BLOCK_BYTES)
    system = BadSystem(hangs=True)
    store = FarStore(system, "bad", IDENTITY, 1 << 30)
    accepted = [store.store(label, CONTENTS[0]) for label in LABELS]
    assert accepted == [True] * 3 + [False] * 17
    for _ in range(far_store._MAX_FAILURES):
        assert await store.load(LABELS[1]) is None
    assert store.is_paused
    system.go.set()
    await settle(store)


class GatedSystem(MemoryFileSystem):
    """Memory, but calls of the methods `gated` wait until `go` is set."""

    cachable = False

    def __init__(self, *gated):
        super().__init__()
        self.calls = []
        self.go = threading.Event()
        for name in gated:
            setattr(self, name, partial(self._wait, getattr(self, name)))

    def _wait(self, method, *args, **kwargs):
        self.calls.append(method)
        self.go.wait()
        return method(*args, **kwargs)


async def begun(system, num_calls):
    async with asyncio.timeout(30):
        while len(system.calls) < num_calls:  # noqa: ASYNC110 - threads make them
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("gated", ["pipe_file", "find"])
async def test_loads_do_not_wait_for_stores_nor_for_the_sweep(memory_url, gated, monkeypatch):
    monkeypatch.setattr(far_store, "_LOAD_S", 30.0)
    await keep(open_store(memory_url), 0)
    system = GatedSystem(gated)
    store = FarStore(system, system._strip_protocol(memory_url), IDENTITY, 1)
    for label in LABELS[1:]:
        assert store.store(label, CONTENTS[1])
    await begun(system, far_store._NUM_THREADS)
    assert await store.load(LABELS[0]) == CONTENTS[0]
    system.go.set()
    await settle(store)


async def test_load_that_gets_no_turn_is_no_failure(memory_url, monkeypatch):
    monkeypatch.setattr(far_store, "_LOAD_S", 30.0)
    await keep(open_store(memory_url), 0)
    system = GatedSystem("cat_file")
    store = FarStore(system, system._strip_protocol(memory_url), IDENTITY, 1 << 30)
    busy = [asyncio.create_task(store.load(LABELS[0])) for _ in range(far_store._NUM_THREADS)]
    await begun(system, far_store._NUM_THREADS)
    with monkeypatch.context() as patch:
        patch.setattr(far_store, "_LOAD_S", 0.0)
        assert [await store.load(LABELS[0]) for _ in range(5)] == [None] * 5
    assert not store.is_paused
    assert store._num_failures == 0
    system.go.set()
    assert await asyncio.gather(*busy) == [CONTENTS[0]] * far_store._NUM_THREADS


class Blocks:
    """Host blocks, as `HostBlocks`."""

    def __init__(self):
        self.content = np.zeros((20, BLOCK_BYTES), np.uint8)

    async def read_host_blocks(self, block_ids):
        return self.content[block_ids].tobytes()

    async def write_host_blocks(self, block_ids, content):
        self.content[block_ids] = np.frombuffer(content, np.uint8).reshape(len(block_ids), -1)


async def test_leading_blocks_come_and_no_block_after_a_missing_one(url):
    blocks, store = Blocks(), open_store(url)
    for number in range(20):
        blocks.content[number] = number + 1
    every = np.arange(20, dtype=np.int32)
    assert await store_far(blocks, store, every, LABELS, lambda: None) == 20
    await settle(store)
    checks = []
    target = Blocks()
    store._system.rm_file(store._path(LABELS[13]))
    fetched = await fetch_far(
        target, store, every[::-1], LABELS, BLOCK_BYTES, lambda: checks.append(1)
    )
    assert (fetched, len(checks)) == (13, 13)
    assert (target.content[::-1][:13] == blocks.content[:13]).all()
    assert await fetch_far(target, store, every, LABELS, BLOCK_BYTES + 1, lambda: None) == 0
    store._system.rm(store._root, recursive=True)
    assert await fetch_far(target, store, every, LABELS, BLOCK_BYTES, lambda: None) == 0


async def test_a_block_that_a_newer_scheduler_may_have_changed_is_not_stored(url):
    store = open_store(url)

    def refuse():
        raise UnavailableError("a newer scheduler has attached")

    with pytest.raises(UnavailableError):
        await store_far(Blocks(), store, np.arange(20, dtype=np.int32), LABELS, refuse)
    await settle(store)
    assert not objects(store)


async def test_closed_store_finishes_its_work_and_ends_its_threads(url):
    def num_threads():
        return sum(thread.name == "far-kv" for thread in threading.enumerate())

    before = num_threads()
    store = open_store(url)
    assert num_threads() > before
    assert store.store(LABELS[1], CONTENTS[1])
    store.close()
    async with asyncio.timeout(30):
        while num_threads() > before:  # noqa: ASYNC110 - they end by themselves
            await asyncio.sleep(0.001)
    assert len(objects(store)) == 1
