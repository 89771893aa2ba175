"""Reports of sequences and blocks: an example with every kind of block."""

import numpy as np
import pytest

from scheduler_svc.core.interface.config import PreemptionMode
from scheduler_svc.core.interface.request import Request, SeqKey
from scheduler_svc.core.reports import describe as module
from scheduler_svc.core.reports.describe import BlockState, Query, Tier, describe
from scheduler_svc.core.sequence import SeqStatus
from tests.unit.scheduler_svc.core.core_driver import ROUTER, answer, make_core, schedule, submit
from tests.unit.scheduler_svc.core.test_moves import make_host_core
from tests.unit.scheduler_svc.core.test_spilling import make_spilled

FREE, CACHED, HELD, SHARED = (
    BlockState.FREE,
    BlockState.CACHED,
    BlockState.HELD,
    BlockState.SHARED,
)


@pytest.fixture
def core():
    """Sequence 1 has ended; 2 and 3 share a block; 4 is on the host."""
    core = make_host_core(num_blocks=9, preemption_mode=PreemptionMode.SWAP)
    submit(core, 1, [1] * 5, max_tokens=1)
    answer(core, schedule(core), 0)
    submit(core, 2, [2, 2, 2, 2, 3])
    answer(core, schedule(core), 0)
    submit(core, 3, [2, 2, 2, 2, 4, 5])
    submit(core, 4, [9] * 4)
    answer(core, schedule(core), 0, 1, 2)
    core.preemption.preempt(next(seq for seq in core.live if seq.seq_id == 4))
    return core


def test_every_block_is_counted_once(core):
    device, host = describe(core, Query(with_ref_counts=True)).tiers
    assert (device.tier, host.tier) == (Tier.DEVICE, Tier.HOST)
    states = [BlockState(state) for state in device.states]
    assert states[0] is CACHED
    assert states.count(SHARED) == 1
    assert states.count(HELD) == 3 - 1  # the second block of each
    assert states.count(CACHED) == 2  # of sequences 1 and 4
    assert states.count(FREE) == 4
    assert {state: count for state, count in device.state_to_num_blocks.items() if count} == {
        state: states.count(state) for state in (FREE, CACHED, HELD, SHARED)
    }
    counts = device.ref_counts.tolist()
    assert [count > 1 for count in counts] == [state is SHARED for state in states]
    assert [BlockState(state) for state in host.states[:2]] == [HELD, FREE]
    assert host.state_to_num_blocks[HELD] == 1


def test_sequences(core):
    first, second, third = describe(core, Query(with_block_tables=True)).sequences
    assert (first.seq_id, first.request_id, first.status) == (2, "request-2", SeqStatus.DECODE)
    assert (first.num_tokens, first.num_prompt_tokens, first.num_computed_tokens) == (7, 5, 6)
    assert (first.num_device_blocks, first.num_shared_blocks) == (2, 1)
    assert second.num_cached_tokens == 4
    assert first.device_block_ids[0] == second.device_block_ids[0]
    assert first.device_block_ids[1] != second.device_block_ids[1]
    assert third.status is SeqStatus.SWAPPED
    assert (third.num_device_blocks, third.num_host_blocks) == (0, 1)
    assert (third.num_tokens, third.num_computed_tokens) == (5, 4)
    assert third.host_block_ids.tolist() == [0]


def test_tables_and_counts_come_only_if_asked_for(core):
    description = describe(core, Query())
    assert not any(len(seq.device_block_ids) for seq in description.sequences)
    assert not any(len(tier.ref_counts) for tier in description.tiers)


def test_sequences_come_in_pages(core):
    page = describe(core, Query(max_sequences=2))
    assert [seq.seq_id for seq in page.sequences] == [2, 3]
    assert (page.num_sequences, page.next_seq_id) == (3, 4)
    page = describe(core, Query(first_seq_id=4, max_sequences=2))
    assert [seq.seq_id for seq in page.sequences] == [4]
    assert page.next_seq_id is None


def test_long_tables_end_a_page(core, monkeypatch):
    for max_blocks, seq_ids in ((3, [2]), (4, [2, 3]), (5, [2, 3, 4])):
        monkeypatch.setattr(module, "MAX_TABLE_BLOCKS", max_blocks)
        page = describe(core, Query(with_block_tables=True))
        assert [seq.seq_id for seq in page.sequences] == seq_ids
        assert page.next_seq_id == (seq_ids[-1] + 1 if max_blocks < 5 else None)
    assert len(describe(core, Query()).sequences) == 3


def test_a_table_that_is_too_long_alone_makes_a_page(core, monkeypatch):
    monkeypatch.setattr(module, "MAX_TABLE_BLOCKS", 1)
    page = describe(core, Query(with_block_tables=True))
    assert [(seq.seq_id, len(seq.device_block_ids)) for seq in page.sequences] == [(2, 2)]
    assert page.next_seq_id == 3


def test_blocks_come_in_pages(core):
    whole = describe(core, Query()).tiers[0].states
    counts = describe(core, Query(with_ref_counts=True)).tiers[0].ref_counts
    device, host = describe(core, Query(first_block=4, max_blocks=3, with_ref_counts=True)).tiers
    assert device.states.tolist() == whole[4:7].tolist()
    assert device.ref_counts.tolist() == counts[4:7].tolist()
    assert device.next_block == host.next_block == 7
    device, host = describe(core, Query(first_block=7, max_blocks=3)).tiers
    assert len(device.states) == 2
    assert len(host.states) == 1
    assert device.next_block is host.next_block is None
    device, host = describe(core, Query(first_block=7, max_blocks=2)).tiers
    assert device.next_block is host.next_block is None, "it was the last"


def test_nothing_is_described_if_nothing_is_asked_for(core):
    description = describe(core, Query(max_sequences=0, max_blocks=0))
    assert (description.sequences, description.next_seq_id) == ((), 2)
    for tier in description.tiers:
        assert (len(tier.states), tier.next_block) == (0, None)


@pytest.mark.parametrize("query", [Query(max_sequences=1025), Query(max_blocks=65_537)])
def test_more_than_the_limit_is_refused(core, query):
    with pytest.raises(ValueError, match="must be in"):
        describe(core, query)


def test_the_null_block_is_out_of_use():
    core = make_core(kv_windows=(8, None))
    (device,) = describe(core, Query(with_ref_counts=True)).tiers
    free = device.num_blocks - 1
    assert device.state_to_num_blocks[BlockState.RETIRED] == 1
    assert device.state_to_num_blocks[BlockState.FREE] == free
    assert device.states.tolist() == [BlockState.RETIRED] + [BlockState.FREE] * free
    assert not device.ref_counts.any()


def test_blocks_on_the_disk_are_described():
    core, _ = make_spilled()
    sequences = describe(core, Query(with_block_tables=True)).sequences
    assert sequences[2].disk_block_ids.tolist() == [0, 1]
    assert (sequences[2].num_disk_blocks, sequences[2].num_computed_tokens) == (2, 7)
    tiers = describe(core, Query()).tiers
    assert [tier.tier for tier in tiers] == [Tier.DEVICE, Tier.HOST, Tier.DISK]
    assert tiers[2].num_blocks == 4


def test_a_sequence_that_was_preempted_without_its_kv_has_no_tokens_computed():
    core = make_core()
    submit(core, 0, [1] * 5)
    plan = schedule(core)
    core.preemption.preempt(next(iter(core.live)))
    (seq,) = describe(core, Query()).sequences
    assert (seq.status, seq.num_tokens, seq.num_computed_tokens) == (SeqStatus.WAITING, 5, 0)
    answer(core, plan)


def test_core_without_host_blocks_has_one_tier():
    (device,) = describe(make_host_core(num_host_blocks=0), Query()).tiers
    assert device.state_to_num_blocks[FREE] == 16


def test_pinned_and_held_blocks_are_distinguished():
    core = make_host_core()
    request = Request(
        *(ROUTER, SeqKey(1), "r", np.arange(9, dtype=np.int32), 1, 2, b""), cache_pin_s=60.0
    )
    core.submit(request, 0.0)
    answer(core, schedule(core), 0)
    running = describe(core, Query(with_ref_counts=True))
    assert running.tiers[0].state_to_num_blocks[BlockState.PINNED] == 0
    assert running.tiers[0].ref_counts.tolist()[:3] == [1, 1, 1], "pins do not count"
    assert running.sequences[0].num_shared_blocks == 0
    core.cancel(ROUTER, [1])
    (device, _) = describe(core, Query()).tiers
    assert [BlockState(state) for state in device.states[:3]] == [
        *(BlockState.PINNED, BlockState.PINNED),
        FREE,
    ]
