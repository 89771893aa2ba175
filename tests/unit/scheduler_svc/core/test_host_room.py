"""The sequences that give up host blocks for one that resumes, and the number of blocks."""

import pytest
from core_driver import answer, make_core, schedule, submit

from contract.step import StepId
from scheduler_svc.core.interface.config import PreemptionMode
from scheduler_svc.core.invariants import check
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.sequence import SeqStatus
from scheduler_svc.core.space.blocks import DeviceBlockId, DiskBlockId


class Host:
    """A host whose six blocks belong to sequences 0, 1 and 2, in this order, two each."""

    def __init__(self, num_disk_blocks, num_host_blocks=6):
        self.core = make_core(
            num_host_blocks=num_host_blocks,
            num_disk_blocks=num_disk_blocks,
            preemption_mode=PreemptionMode.SWAP,
            enable_prefix_caching=False,
        )
        for key in range(3):
            submit(self.core, key, [key] * 5)
        answer(self.core, schedule(self.core), 0, 1, 2)
        for _ in range(3):
            self.core.preemption.preempt(max(self.core.running, key=self.core.queue.sort_key))
        self.seqs = sorted(self.core.live, key=lambda seq: seq.seq_key)
        self.tier = self.core.tier
        self.tier.send(PlanBuilder(StepId(2), 0.0, 0))
        assert [self.blocks(key) for key in range(3)] == [(2, 0)] * 3

    def blocks(self, key):
        """A sequence's number of blocks on the host and on the disk."""
        return len(self.seqs[key].host_block_ids), len(self.seqs[key].disk_block_ids)

    def make_room(self, key, num_blocks):
        has_room = self.core.host_room.make_for_fetch(self.seqs[key], num_blocks)
        assert has_room == (self.tier.pool.num_available >= num_blocks)
        return has_room

    @property
    def swapped(self):
        return [seq.seq_key for seq in self.seqs if seq.status is SeqStatus.SWAPPED]


@pytest.mark.parametrize(
    ("key", "num_blocks", "left"),
    [
        (0, 2, [(2, 0), (2, 0), (0, 2)]),
        (0, 3, [(2, 0), (1, 1), (0, 2)]),
        (2, 3, [(1, 1), (0, 2), (2, 0)]),
        (1, 0, [(2, 0), (2, 0), (2, 0)]),
    ],
)
def test_the_others_spill_the_last_first_and_no_more_than_there_is_need_for(key, num_blocks, left):
    host = Host(num_disk_blocks=4)
    assert host.make_room(key, num_blocks)
    check(host.core)
    assert [host.blocks(each) for each in range(3)] == left
    assert host.swapped == [0, 1, 2]


@pytest.mark.parametrize(
    ("key", "num_blocks", "swapped"), [(0, 2, [0, 1]), (0, 3, [0]), (2, 2, [0, 2]), (2, 4, [2])]
)
def test_if_the_disk_is_full_they_lose_their_kv(key, num_blocks, swapped):
    host = Host(num_disk_blocks=1)
    assert host.make_room(key, num_blocks)
    check(host.core)
    assert host.swapped == swapped


def test_there_may_be_no_room_at_all():
    host = Host(num_disk_blocks=1)
    assert not host.make_room(0, 5)
    assert host.swapped == [0]


def test_no_sequence_loses_kv_while_a_swap_in_may_make_room():
    host = Host(num_disk_blocks=1)
    host.tier.swap_in(host.seqs[2].host_block_ids, [DeviceBlockId(8), DeviceBlockId(9)])
    assert not host.make_room(0, 2)
    assert host.make_room(0, 0)
    assert host.swapped == [0, 1, 2]


def test_no_sequence_loses_kv_while_a_load_may_make_room():
    host = Host(num_disk_blocks=1, num_host_blocks=7)
    host.tier.disk.load(*host.tier.disk.pool.allocate(1), host.tier.take_free(), None)
    assert not host.make_room(0, 2)
    assert host.make_room(0, 0)
    assert host.swapped == [0, 1, 2]


def test_a_store_that_fails_concerns_who_needs_it_and_waits():
    host = Host(num_disk_blocks=4)
    block = DiskBlockId(3)
    for seq in host.seqs[:2]:
        seq.disk_block_ids = (block,)
    host.seqs[1].set_status(SeqStatus.FETCHING)  # the cache has found the content on the host again
    assert host.core.host_room.spilled_to(block) == host.seqs[:1]
