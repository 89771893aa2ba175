"""Examples of the block space that random histories seldom reach, or cannot check."""

from collections import deque

import numpy as np
import pytest
from core_driver import answer, make_core, new, schedule, submit

from contract.arrays import ints
from contract.hashing import BlockHash
from contract.step import Result
from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId
from tests.property.worker import FakeWorker


class Pair:
    """A core, and a worker that fails when it reads wrong KV."""

    def __init__(self, **overrides):
        self.core = make_core(**overrides)
        self.worker = FakeWorker(self.core.config)
        self.unanswered = deque()

    def schedule(self):
        if plan := self.core.schedule(0.0):
            self.unanswered.append(self.worker.execute(plan))
        return plan

    def answer(self):
        self.core.update(self.unanswered.popleft())

    def run(self):
        while self.schedule() or self.unanswered:
            self.answer()

    def run_alone(self, key, prompt):
        """Compute a prompt and one token; its full blocks are cached afterwards."""
        submit(self.core, key, prompt, max_tokens=1)
        self.run()


@pytest.fixture
def pair():
    """The host has the two full blocks of [1] * 9, the device none; a step swaps in one block."""
    pair = Pair(num_blocks=8, num_host_blocks=8, max_swap_blocks=1)
    pair.run_alone(0, [1] * 9)
    for key in range(2, 10):  # each evicts one block
        pair.run_alone(key, [key] * 4)
    return pair


def test_a_result_when_nothing_is_in_flight_is_a_bug():
    outcome = Result(1, ints([]), ints([]), ints([]), ints([]))
    with pytest.raises(BrokenInvariantError, match=r"result of step 1; in flight: \[\]"):
        make_core().update(outcome)


def test_a_result_before_that_of_an_older_step_is_a_bug():
    core = make_core()
    submit(core, 0, [1])
    schedule(core)
    with pytest.raises(BrokenInvariantError, match=r"result of step 2; in flight: \[1, 2\]"):
        answer(core, schedule(core))


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.allocate(3), r"allocate\(3\) with 2 available blocks"),
        (lambda pool: pool.share([1]), "share of free block 1"),
        (lambda pool: pool.drop([0, 1]), "drop of free block 1"),
    ],
)
def test_misuse_of_a_pool_is_a_bug(misuse, message):
    pool = BlockPool(3, DeviceBlockId)
    assert pool.allocate(1) == [0]
    assert pool.allocate(2) == [1, 2]
    pool.drop([1, 2])
    with pytest.raises(BrokenInvariantError, match=message):
        misuse(pool)


def test_all_of_a_pool_can_be_taken():
    pool = BlockPool(3, DeviceBlockId)
    (first,) = pool.allocate(1)
    pool.publish([first], [BlockHash(b"1")])
    pool.drop([first])
    assert sorted(pool.allocate(pool.num_available)) == [0, 1, 2]


def test_forgotten_blocks_are_free():
    pool = BlockPool(1, DeviceBlockId)
    pool.publish(pool.allocate(1), [BlockHash(b"1")])
    pool.drop([0])
    assert (pool.num_cached, pool.num_free, pool.find([b"1"])) == (1, 0, [0])
    pool.forget([0])
    assert (pool.num_cached, pool.num_free, pool.find([b"1"])) == (0, 1, [])


def test_cached_tokens_are_counted_in_all_tiers(pair):
    request = Request(SourceId(0), SeqKey(20), "", np.full(9, 1, np.int32), 1, 1, b"")
    assert pair.core.lookup.num_cached_tokens(request) == 8
    pair.run_alone(20, [1] * 5)  # now the first block is in both
    assert pair.core.lookup.num_cached_tokens(request) == 8
    without = make_core(enable_prefix_caching=False)
    assert without.lookup.num_cached_tokens(request) == 0


def test_blocks_keep_their_order_when_a_later_one_is_on_its_way_for_another(pair):
    submit(pair.core, 20, [1] * 9)
    while not pair.schedule().swap_in_dst_block_ids.size:
        pair.answer()
    pair.schedule()
    while len(pair.unanswered) > 1:  # up to the first block; the second is still in flight
        pair.answer()
    submit(pair.core, 21, [1] * 9)
    pair.run()
    assert pair.core.load().num_promoted_blocks == 4


def test_generated_tokens_are_found_while_their_sequence_runs():
    core = make_core()
    submit(core, 0, [1, 2, 3, 4], max_tokens=12)
    for _ in range(6):
        answer(core, schedule(core), 0)  # with 7
    submit(core, 1, [1, 2, 3, 4, 7, 7, 7, 7, 9])
    assert [num_computed for _, num_computed, _ in new(schedule(core))] == [8]


def test_without_a_prefix_cache_the_blocks_of_an_ended_sequence_are_free():
    core = make_core(enable_prefix_caching=False)
    submit(core, 0, range(6), max_tokens=10)
    while core.live.of_source(0):
        answer(core, schedule(core), 0)
    schedule(core)
    assert (core.load().num_cached_blocks, core.load().num_free_blocks) == (0, 16)


def test_a_source_whose_last_sequence_has_ended_is_forgotten(pair):
    assert not pair.core.live._by_source
