"""The disk tier: a loaded block equals the stored one, or is reported as lost."""

import os
import threading

import numpy as np
import pytest

from contract.hashing import HASH_BYTES
from gpu_worker.kv import disk_file
from gpu_worker.kv import disk_pool as module
from gpu_worker.kv.codecs.lossless import LosslessCodec
from gpu_worker.kv.codecs.names import parse_codec
from gpu_worker.kv.disk_pool import DiskPool
from gpu_worker.step.executor import LaunchedStep

pytestmark = pytest.mark.timeout(120)

BLOCK_BYTES = 6000  # no whole number of pages


def ints(*values):
    return np.array(values, np.int32)


@pytest.fixture
def host():
    """uint8[6, BLOCK_BYTES]: bfloat16 numbers whose exponents a codec can compress."""
    numbers = np.random.default_rng(0).standard_normal((6, BLOCK_BYTES // 2), np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


class GateCodec:
    """A codec that blocks until its gate is opened; the record is the block itself."""

    record_bytes = BLOCK_BYTES

    def __init__(self):
        self.gate = threading.Event()
        self.started = threading.Semaphore(0)

    def encode(self, block):
        self.started.release()
        assert self.gate.wait(10)
        return (block.data,)

    decode = None  # no record is shorter than its block


@pytest.fixture
def make(host, tmp_path):
    pools = []

    def make(codec=None, num_blocks=8):
        pools.append(DiskPool(host, num_blocks, tmp_path, codec))
        return pools[-1]

    yield make
    for pool in pools:
        if isinstance(pool._file._codec, GateCodec):
            pool._file._codec.gate.set()
        pool.close()


def zstd():
    return LosslessCodec(parse_codec("zstd"), BLOCK_BYTES, 2)


def ended(pool, step_id=99):
    """Waits for all moves; returns successes and failures."""
    pool.synchronize()
    ends = pool.take_ended(step_id)
    lists = (ends.stored, ends.failed_stores, ends.loaded, ends.failed_loads)
    assert all(blocks.dtype == np.int32 for blocks in lists)
    return tuple(sorted(blocks.tolist()) for blocks in lists)


def fd_of(pool):
    return pool._file._file.fileno()


def corrupt(pool, disk_block, offset, content):
    os.pwrite(fd_of(pool), content, disk_block * pool._file._extent_bytes + offset)


@pytest.mark.parametrize("codec", [None, zstd()], ids=["none", "zstd"])
def test_blocks_come_back_bit_for_bit(make, host, codec):
    pool = make(codec)
    before = host.copy()
    pool.store(ints(0, 1, 2), ints(7, 3, 0), step_id=1)
    assert ended(pool) == ([0, 3, 7], [], [], [])
    host[:] = 0
    pool.load(ints(0, 7, 3), ints(5, 4, 3), step_id=2)
    assert ended(pool) == ([], [], [3, 4, 5], [])
    assert (host[[5, 4, 3]] == before[[2, 0, 1]]).all()
    assert not host[:3].any()


def test_a_codec_makes_records_smaller(make):
    pool = make(zstd())
    pool.store(ints(0), ints(0), step_id=1)
    pool.synchronize()
    assert 0 < pool._file._record_bytes[0] < 0.8 * BLOCK_BYTES


def test_the_host_block_may_be_reused_as_soon_as_the_call_returns(make, host):
    codec = GateCodec()
    pool = make(codec)
    before = host[1].copy()
    pool.store(ints(1), ints(0), step_id=1)
    host[1] = 0
    codec.gate.set()
    assert ended(pool)[0] == [0]
    pool.load(ints(0), ints(2), step_id=2)
    assert ended(pool)[2] == [2]
    assert (host[2] == before).all()


@pytest.mark.parametrize("codec", [None, zstd()], ids=["none", "zstd"])
@pytest.mark.parametrize("offset", [0, 2999, 4000])
def test_a_block_that_has_changed_fails_alone(make, codec, offset):
    pool = make(codec)
    pool.store(ints(0, 1, 2), ints(0, 1, 2), step_id=1)
    assert ended(pool)[0] == [0, 1, 2]
    (byte,) = os.pread(fd_of(pool), 1, pool._file._extent_bytes + offset)
    corrupt(pool, 1, offset, bytes([byte ^ 1]))
    pool.load(ints(0, 1, 2), ints(3, 4, 5), step_id=2)
    assert ended(pool) == ([], [], [3, 5], [4])


def test_a_file_that_has_become_short_fails(make):
    pool = make()
    pool.store(ints(0, 1), ints(0, 7), step_id=1)
    assert ended(pool)[0] == [0, 7]
    os.ftruncate(fd_of(pool), 7 * pool._file._extent_bytes + 100)
    pool.load(ints(7, 0), ints(1, 2), step_id=2)
    assert ended(pool) == ([], [], [2], [1])


def test_an_older_record_never_passes_for_the_newer_one(make):
    pool = make()
    pool.store(ints(0), ints(0), step_id=1)
    pool.synchronize()
    old = os.pread(fd_of(pool), BLOCK_BYTES, 0)
    pool.store(ints(1), ints(0), step_id=2)
    assert ended(pool)[0] == [0, 0]
    corrupt(pool, 0, 0, old)
    pool.load(ints(0), ints(2), step_id=3)
    assert ended(pool)[3] == [2]


def test_a_record_of_another_block_never_passes(make):
    pool = make()
    pool.store(ints(0, 1), ints(0, 1), step_id=1)
    pool.synchronize()
    corrupt(pool, 0, 0, os.pread(fd_of(pool), BLOCK_BYTES, pool._file._extent_bytes))
    pool.load(ints(0), ints(2), step_id=3)
    assert ended(pool)[3] == [2]


def test_a_block_that_was_never_stored_fails(make):
    pool = make()
    pool.load(ints(4), ints(1), step_id=1)
    assert ended(pool) == ([], [], [], [1])


def test_a_store_that_fails_says_so_and_leaves_nothing(make, monkeypatch):
    pool = make()
    pool.store(ints(0), ints(0), step_id=1)
    assert ended(pool)[0] == [0]

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_file.os, "pwritev", fail)
        pool.store(ints(1), ints(0), step_id=2)
        assert ended(pool) == ([], [0], [], [])
    pool.load(ints(0), ints(2), step_id=3)
    assert ended(pool)[3] == [2], "not even the older record"
    pool.store(ints(1), ints(0), step_id=4)
    assert ended(pool)[0] == [0]


def test_a_store_cut_short_fails(make, monkeypatch):
    pool = make()
    monkeypatch.setattr(disk_file.os, "pwritev", lambda *_: 100)
    pool.store(ints(0), ints(0), step_id=1)
    assert ended(pool) == ([], [0], [], [])


def test_a_codec_that_breaks_fails_the_move(make, monkeypatch):
    codec = zstd()
    pool = make(codec)
    pool.store(ints(0), ints(0), step_id=1)
    assert ended(pool)[0] == [0]
    monkeypatch.setattr(codec, "decode", lambda *_: 1 / 0)
    pool.load(ints(0), ints(1), step_id=2)
    assert ended(pool)[3] == [1]


def test_stores_wait_for_room(make, host, monkeypatch):
    monkeypatch.setattr(module, "_STAGING_BYTES", 1)  # one place for each storing thread
    monkeypatch.setattr(module, "_MAX_WAIT_S", 20.0)
    pool = make()
    before = host.copy()
    pool.store(ints(0, 1, 2, 3, 4, 5), ints(0, 1, 2, 3, 4, 5), step_id=1)
    assert ended(pool) == ([0, 1, 2, 3, 4, 5], [], [], [])
    host[:] = 0
    pool.load(ints(0, 1, 2, 3, 4, 5), ints(0, 1, 2, 3, 4, 5), step_id=2)
    assert ended(pool)[2] == [0, 1, 2, 3, 4, 5]
    assert (host == before).all()


def test_stores_for_which_there_is_no_room_in_time_fail(make, monkeypatch):
    monkeypatch.setattr(module, "_STAGING_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr(module, "_MAX_WAIT_S", 0.0)
    codec = GateCodec()
    pool = make(codec)
    pool.store(ints(0, 1, 2, 3, 4), ints(0, 1, 2, 3, 4), step_id=1)
    assert pool.take_ended(1).failed_stores.tolist() == [3, 4]
    codec.gate.set()
    assert ended(pool) == ([0, 1, 2], [], [], [])
    pool.store(ints(3, 4), ints(3, 4), step_id=2)
    assert ended(pool) == ([3, 4], [], [], [])


def test_loads_do_not_wait_behind_stores(make, host):
    codec = GateCodec()
    codec.gate.set()
    pool = make(codec)
    pool.store(ints(0), ints(0), step_id=1)
    assert ended(pool)[0] == [0]
    codec.gate.clear()
    pool.store(ints(1, 2, 3, 4), ints(1, 2, 3, 4), step_id=2)
    pool.load(ints(0), ints(5), step_id=2)
    while not pool.has_ended_moves(2):
        pass  # no store can end: the call returns only if it waits for none
    assert pool.take_ended(2).loaded.tolist() == [5]
    assert (host[5] == host[0]).all()
    assert pool.is_busy(2)


def test_a_result_reports_only_its_own_and_earlier_steps(make):
    pool = make()
    pool.store(ints(0), ints(0), step_id=3)
    pool.store(ints(1), ints(1), step_id=4)
    pool.synchronize()
    assert not pool.has_ended_moves(2)
    assert pool.take_ended(2).stored.tolist() == []
    assert pool.take_ended(3).stored.tolist() == [0]
    assert pool.has_ended_moves(4)
    assert pool.take_ended(4).stored.tolist() == [1]
    assert not pool.has_ended_moves(4)


def test_it_is_busy_for_the_steps_whose_moves_are_under_way(make):
    codec = GateCodec()
    pool = make(codec)
    pool.store(ints(0), ints(0), step_id=3)
    assert not pool.is_busy(2)
    assert pool.is_busy(3)
    assert pool.is_busy(4)
    codec.gate.set()
    pool.synchronize()
    assert not pool.is_busy(4)


def test_draining_drops_what_waits_and_waits_for_what_runs(make, monkeypatch):
    monkeypatch.setattr(module, "_STAGING_BYTES", 4 * BLOCK_BYTES)
    codec = GateCodec()
    pool = make(codec)
    pool.store(ints(0, 1, 2, 3), ints(0, 1, 2, 3), step_id=1)
    for _ in range(module._NUM_STORING):
        assert codec.started.acquire(timeout=10)
    draining = threading.Thread(target=pool.drain)
    draining.start()
    while sum(move.cancelled() for move in pool._under_way.values()) < 2:
        pass  # the test's time limit is the proof
    codec.gate.set()
    draining.join()
    assert not pool.is_busy(1)
    assert not pool.has_ended_moves(1)
    # Stores that had begun are complete, and others wrote nothing; all staging is free again.
    pool.load(ints(0, 1, 2, 3), ints(2, 3, 4, 5), step_id=2)
    assert ended(pool) == ([], [], [2, 3], [4, 5])
    pool.store(ints(0, 1, 4, 5), ints(4, 5, 6, 7), step_id=3)
    assert ended(pool)[0] == [4, 5, 6, 7]


def test_the_file_has_no_name(make, tmp_path):
    make().store(ints(0), ints(0), step_id=1)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_an_error(host, tmp_path):
    with pytest.raises(OSError, match="No such file"):
        DiskPool(host, 1, tmp_path / "missing")


class FakeDisk:
    def __init__(self, *, is_busy, has_ended_moves):
        self.is_busy = lambda step_id: is_busy and step_id == 7
        self.has_ended_moves = lambda step_id: has_ended_moves and step_id == 7


@pytest.mark.parametrize(
    ("is_busy", "has_ended_moves", "is_done"),
    [(True, False, False), (True, True, True), (False, True, True), (False, False, True)],
)
def test_a_step_that_computes_nothing_waits_until_one_move_has_ended(
    is_busy, has_ended_moves, is_done
):
    disk = FakeDisk(is_busy=is_busy, has_ended_moves=has_ended_moves)
    step = LaunchedStep(7, None, None, None, ints(), 0.0, disk)
    assert step.is_idle
    assert step.is_done() == is_done


# --- a file that is kept --------------------------------------------------------------------------

OURS, OTHERS = b"i" * 32, b"j" * 32
LABELS = np.random.default_rng(1).integers(0, 256, (8, HASH_BYTES), np.uint8)


@pytest.fixture
def start(host, tmp_path):
    """Starts a pool as the next process would. Closing a pool writes no more than killing it."""
    pools = []

    def start(identity=OURS, num_blocks=8, codec=None):
        pools.append(DiskPool(host, num_blocks, tmp_path, codec, identity))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def keep(pool, *blocks):
    """Stores host blocks and labels them."""
    pool.store(ints(*blocks), ints(*blocks), 0)
    assert ended(pool)[0] == sorted(blocks)
    pool.name(ints(*blocks), LABELS[list(blocks)])


def found(pool):
    blocks, labels = pool.take_found()
    assert labels.tolist() == LABELS[blocks].tolist()
    return blocks.tolist()


@pytest.mark.parametrize("codec", [None, zstd()], ids=["none", "zstd"])
def test_the_next_process_finds_named_blocks_oldest_first(start, host, codec):
    before, pool = host.copy(), start(codec=codec)
    keep(pool, 2, 0)
    keep(pool, 5, 1)
    pool.store(ints(3), ints(3), 0)  # a sequence's own, without a label
    ended(pool)
    pool.close()
    pool = start(codec=codec)
    assert found(pool) == [2, 0, 5, 1]
    host[:] = 0
    pool.load(ints(0, 1, 2, 5), ints(0, 1, 2, 5), 0)
    assert ended(pool)[2] == [0, 1, 2, 5]
    assert (host[[0, 1, 2, 5]] == before[[0, 1, 2, 5]]).all()
    keep(pool, 4)
    pool.close()
    assert found(start(codec=codec)) == [2, 0, 5, 1, 4]


def test_a_block_that_is_overwritten_is_not_found(start):
    pool = start()
    keep(pool, 0, 1)
    pool.store(ints(2), ints(1), 0)  # the process was killed before the result
    pool.synchronize()
    pool.close()
    assert found(start()) == [0]


@pytest.mark.parametrize("place", ["record", "header", "first page"])
def test_what_a_disk_has_changed_is_refused(start, place):
    pool = start()
    keep(pool, 0, 1)
    first = pool._file._first_byte
    at = {"record": first + 100, "header": 4096 + 3, "first page": 20}[place]
    os.pwrite(fd_of(pool), bytes([os.pread(fd_of(pool), 1, at)[0] ^ 1]), at)
    pool.close()
    pool = start()
    assert found(pool) == {"record": [0, 1], "header": [1], "first page": []}[place]
    if place == "record":
        pool.load(ints(0, 1), ints(4, 5), 0)
        assert ended(pool) == ([], [], [5], [4])
        pool.close()
        assert found(start()) == [1]


def test_a_header_that_power_has_brought_back_is_not_the_record_s(start):
    pool = start()
    keep(pool, 0)
    header = os.pread(fd_of(pool), 64, 4096)
    pool.store(ints(1), ints(0), 0)
    ended(pool)
    os.pwrite(fd_of(pool), header, 4096)
    pool.close()
    pool = start()
    assert found(pool) == [0]
    pool.load(ints(0), ints(5), 0)
    assert ended(pool)[3] == [5]


def test_distrusted_blocks_are_not_found(start):
    pool = start()
    keep(pool, 0, 1, 2)
    pool.distrust(ints(1))
    pool.close()
    pool = start()
    assert found(pool) == [0, 2]
    keep(pool, 3)
    pool.distrust()
    keep(pool, 4)
    pool.close()
    assert found(start()) == [4]


def test_a_file_whose_names_cannot_be_erased_is_found_by_none(start, tmp_path):
    pool = start()
    keep(pool, 0)
    pool._file._headers._fd = os.open(tmp_path, os.O_RDONLY)  # a disk that fails
    pool.distrust(ints(0))
    assert not [*tmp_path.iterdir()]
    keep(pool, 1)
    pool.close()
    assert found(start()) == []


def test_another_identity_finds_nothing_and_deletes_what_no_process_has(start, tmp_path):
    first, second = start(), start()  # two workers that are alike
    keep(first, 0)
    keep(second, 1)
    second.close()
    other = start(OTHERS)
    assert found(other) == []
    assert len([*tmp_path.iterdir()]) == 2  # the first one holds the file's lock
    other.close()
    first.close()
    assert found(start()) == [0]
    assert len([*tmp_path.iterdir()]) == 1


def test_scratch_blocks_are_those_without_a_label_first(start):
    pool = start()
    keep(pool, 1, 0)
    pool.close()
    pool = start()
    assert pool.scratch(7).tolist() == [2, 3, 4, 5, 6, 7, 1]
    pool.store(ints(0, 0), ints(7, 1), 0)
    ended(pool)
    assert found(pool) == [0]
