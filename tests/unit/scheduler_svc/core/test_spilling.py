"""Examples of swapped sequences that spill to the disk and resume."""

import numpy as np
import pytest
from core_driver import (
    ROUTER,
    answer,
    ins,
    loads,
    make_core,
    new,
    outs,
    run_to_disk,
    schedule,
    stores,
    submit,
)

from contract.hashing import extend_chain, root_hash
from scheduler_svc.core.interface.config import PreemptionMode
from scheduler_svc.core.interface.errors import MigrationRefusedError
from scheduler_svc.core.invariants import check
from scheduler_svc.core.sequence import SeqStatus
from scheduler_svc.core.space.blocks import DeviceBlockId
from scheduler_svc.core.tiers.fetching import FetchStatus


def make_spilled(num_prompt=5, **overrides):
    """A core in which sequence 2, with seven tokens in two blocks, has just spilled both for 1.

    Its prompt has `num_prompt` tokens. Returns the core and the plan; only sequence 0 runs.
    """
    settings = {
        "num_host_blocks": 3,
        "num_disk_blocks": 4,
        "preemption_mode": PreemptionMode.SWAP,
        "enable_prefix_caching": False,
    }
    core = make_core(num_blocks=6, **(settings | overrides))
    submit(core, 0, [1] * 6, max_tokens=14)
    submit(core, 1, [2] * 5, max_tokens=11)
    submit(core, 2, [3] * num_prompt, max_tokens=8)
    plan = schedule(core)
    assert [blocks for _, _, blocks in new(plan)] == [[0, 1], [2, 3], [4, 5]]
    for rows in ((0, 1, 2), (0, 1)):
        num_preemptions = core.load().num_preemptions
        while core.load().num_preemptions == num_preemptions:
            answer(core, plan, *rows)
            plan = schedule(core)
        if rows[2:]:
            assert outs(plan) == {4: 0, 5: 1}
    return core, plan


def test_a_swapped_sequence_spills_to_make_room_for_another():
    core, plan = make_spilled()
    assert outs(plan) == {2: 0, 3: 1, 5: 2}
    assert stores(plan) == {0: 0, 1: 1}, "the partly filled block included"
    load = core.load()
    assert (load.num_swapped, load.num_spilled_blocks, load.num_free_disk_blocks) == (2, 2, 2)


def test_no_more_blocks_spill_than_there_is_need_for():
    core, plan = make_spilled(num_host_blocks=4)
    assert outs(plan) == {2: 1, 3: 2, 5: 3}
    assert stores(plan) == {1: 0}, "the last"
    assert core.load().num_spilled_blocks == 1


def test_others_find_the_full_blocks_of_a_spilled_sequence():
    core, plan = make_spilled(enable_prefix_caching=True)
    answer(core, plan, 0, stored_disk_block_ids=stores(plan).values())
    chain = []
    extend_chain(chain, root_hash(""), np.array([3] * 5 + [7] * 3, np.int32), 4)
    assert core.tier.disk.pool.find(chain) == [0], "of the eighth token there is no KV"


def test_a_spilled_sequence_does_not_move():
    core, _ = make_spilled()
    with pytest.raises(MigrationRefusedError, match="some of its KV is on its worker's disk"):
        core.begin_export(ROUTER, 2)
    check(core)


def fetch_spilled(core, plan, **ends):
    """Let sequence 2 resume; return the plan after the one that loads its blocks to the host."""
    answer(core, plan, 0, stored_disk_block_ids=[0, 1])
    core.cancel(ROUTER, [0, 1])
    plan = schedule(core)
    assert loads(plan) == {0: 0, 1: 1}
    assert core.load().num_swapped == 1
    answer(core, plan, **ends)
    return schedule(core)


def test_a_spilled_sequence_comes_back_through_the_host_and_computes_nothing_again():
    core, plan = make_spilled()
    plan = fetch_spilled(core, plan, loaded_host_block_ids=[1, 0])
    assert core.load().num_cached_disk_blocks + core.load().num_free_disk_blocks == 4
    assert list(ins(plan)) == [0, 1]
    following = schedule(core)
    ((_, num_computed, blocks),) = new(following)
    assert (num_computed, blocks[:2]) == (7, [*ins(plan).values()])
    load = core.load()
    assert (load.num_swapped, load.num_recomputed_tokens) == (0, 0)


def test_a_spilled_sequence_waits_for_its_stores_before_it_is_loaded():
    core, plan = make_spilled()
    answer(core, plan, 0, stored_disk_block_ids=[0])
    core.cancel(ROUTER, [0, 1])
    plan = schedule(core)
    assert not loads(plan)
    answer(core, plan, stored_disk_block_ids=[1])
    assert list(loads(schedule(core))) == [0, 1]


def test_a_spilled_sequence_does_not_wait_for_the_store_of_a_block_that_the_host_has():
    core, plan = make_spilled(enable_prefix_caching=True)
    answer(core, plan, 0, stored_disk_block_ids=[1])
    core.cancel(ROUTER, [0, 1])
    (seq,) = core.live
    cache_on_host(core, seq.block_hashes[:1])
    assert list(loads(schedule(core))) == [1]


def cache_on_host(core, hashes):
    """Cache contents on the host, as for a request that comes from another core; return blocks."""
    blocks = [core.tier.take_free() for _ in hashes]
    core.tier.pool.publish(blocks, hashes)
    core.tier.pool.drop(blocks)
    return blocks


@pytest.mark.parametrize("num_kept", [0, 1])
def test_a_spilled_sequence_whose_blocks_are_all_on_the_host_again_is_not_loaded(num_kept):
    core, plan = make_spilled(6, num_host_blocks=3 + num_kept, enable_prefix_caching=True)
    answer(core, plan, 0, stored_disk_block_ids=stores(plan).values())
    core.cancel(ROUTER, [0, 1])
    (seq,) = core.live
    assert (len(seq.host_block_ids), len(seq.block_hashes)) == (num_kept, 2)
    assert core.tier.disk.pool.find(seq.block_hashes[num_kept:]) == [*range(2 - num_kept)]
    kept = list(seq.host_block_ids)
    cached = cache_on_host(core, seq.block_hashes[num_kept:])
    plan = schedule(core)
    assert not loads(plan)
    if outs(plan):  # to make room on the device
        answer(core, plan)
        plan = schedule(core)
    assert list(ins(plan)) == kept + cached


def two_swapped(core):
    """The swapped sequences 1 and 2 of `make_spilled`; 2 has spilled."""
    return sorted((seq for seq in core.live if seq.row is None), key=lambda seq: seq.seq_key)


def test_a_spilled_sequence_that_the_device_has_no_room_for_takes_no_host_blocks_of_others():
    core, plan = make_spilled(enable_prefix_caching=True)
    answer(core, plan, 0, stored_disk_block_ids=[0, 1])
    first, second = two_swapped(core)
    assert core.fetching.at_turn(second, has_room=False) is FetchStatus.LATER
    assert len(first.host_block_ids) == 3
    assert core.fetching.at_turn(second, has_room=True) is FetchStatus.FETCHING
    check(core)
    assert len(first.host_block_ids) == 1
    assert core.load().num_spilled_blocks == 4


def test_a_spilled_sequence_is_loaded_if_the_host_has_just_enough_room():
    core, plan = make_spilled(enable_prefix_caching=True)
    answer(core, plan, 0, stored_disk_block_ids=[0, 1])
    _, seq = two_swapped(core)
    core.cancel(ROUTER, [1])
    cache_on_host(core, seq.block_hashes[:1])
    others = [core.tier.take_free(), core.tier.take_free()]
    for _ in range(2):  # it holds nothing while it waits
        assert core.fetching.at_turn(seq, has_room=False) is FetchStatus.LATER
        assert core.tier.pool.num_available == 1
    core.tier.pool.drop(others[:1])
    assert core.fetching.at_turn(seq, has_room=False) is FetchStatus.FETCHING


def test_a_spilled_sequence_waits_while_swap_ins_hold_the_host_blocks():
    core, plan = make_spilled()
    answer(core, plan, 0, stored_disk_block_ids=[0, 1])
    core.cancel(ROUTER, [0])
    plan = schedule(core)
    assert list(ins(plan)) == [0, 1, 2]
    assert not loads(plan)
    answer(core, plan)
    assert list(loads(schedule(core))) == [0, 1]


def test_a_step_without_tokens_left_loads_nothing():
    core, plan = make_spilled(max_num_batched_tokens=16, long_prefill_threshold=0)
    answer(core, plan, 0, stored_disk_block_ids=[0, 1])
    core.cancel(ROUTER, [0, 1])
    submit(core, 0, [4] * 17, max_tokens=1)  # before sequence 2 in order
    plan = schedule(core)
    assert plan.num_scheduled_tokens == 16
    assert not loads(plan)
    answer(core, plan)
    assert list(loads(schedule(core))) == [0, 1]


def test_a_sequence_whose_spilling_fails_is_recomputed():
    core, plan = make_spilled()
    answer(core, plan, 0, stored_disk_block_ids=[1], failed_disk_block_ids=[0])
    assert core.load().num_swapped == 1, "only the other"
    assert core.load().num_free_disk_blocks == 4
    core.cancel(ROUTER, [0, 1])
    assert new(schedule(core))[0][1] == 0
    assert core.load().num_recomputed_tokens == 7


def test_a_spilled_sequence_that_cannot_be_loaded_is_recomputed():
    core, plan = make_spilled()
    plan = fetch_spilled(core, plan, failed_host_block_ids=[1])
    assert new(plan)[0][1] == 0, "without waiting for the other load"
    load = core.load()
    assert (load.num_swapped, load.num_recomputed_tokens) == (0, 7)
    answer(core, plan, 0, loaded_host_block_ids=[0])
    load = core.load()
    assert (load.num_free_host_blocks, load.num_free_disk_blocks) == (3, 4)


def test_a_spilled_sequence_that_is_cancelled_leaves_nothing():
    core, plan = make_spilled()
    core.cancel(ROUTER, [2])
    check(core)
    answer(core, plan, 0, stored_disk_block_ids=[0, 1])
    assert core.load().num_free_disk_blocks == 4


def preempt_beside(*prompts):
    """Preempt a sequence of three blocks; waiting `prompts` have some of the host's four blocks."""
    core = make_core(
        num_blocks=6, num_host_blocks=4, num_disk_blocks=8, preemption_mode=PreemptionMode.SWAP
    )
    for key in range(6):
        run_to_disk(core, key)
    submit(core, 20, [7] * 7, max_tokens=9)
    submit(core, 21, [8] * 8, max_tokens=8)
    plan = schedule(core)
    for key, prompt in enumerate(prompts, 30):
        submit(core, key, prompt, max_tokens=2)
    while core.load().num_preemptions == 0:
        stored, loaded = stores(plan).values(), loads(plan).values()
        answer(core, plan, 0, 1, stored_disk_block_ids=stored, loaded_host_block_ids=loaded)
        plan = schedule(core)
    assert core.load().num_loaded_blocks == sum(len(prompt) // 4 for prompt in prompts)
    return core, plan


def test_fetched_blocks_of_a_waiting_prompt_are_released_for_a_swap_out():
    core, plan = preempt_beside([1] * 9)  # two blocks
    assert len(outs(plan)) == 3
    assert core.load().num_swapped == 1


def test_fetched_blocks_stay_if_the_host_has_just_enough_room():
    core, plan = preempt_beside([1] * 5)  # one block
    assert len(outs(plan)) == 3
    (waiting,) = [seq for seq in core.live if seq.status is SeqStatus.WAITING]
    assert len(waiting.fetched_block_ids) == 1


def test_no_more_blocks_are_released_than_needed():
    core, plan = preempt_beside([1] * 5, [2] * 5)  # a block each
    assert len(outs(plan)) == 3
    assert core.load().num_cached_host_blocks == 0, "the first's is still held"


def test_fetched_blocks_of_a_waiting_prompt_are_released_for_a_resuming_sequence():
    core, _ = preempt_beside([1] * 5, [2] * 5)
    (swapped,) = [seq for seq in core.live if seq.status is SeqStatus.SWAPPED]
    assert core.tier.pool.num_available == 0
    assert core.host_room.make_for_fetch(swapped, 1)
    assert core.tier.pool.num_available == 1
    assert core.host_room.make_for_fetch(swapped, 1)
    assert core.tier.pool.num_available == 1, "it was enough"
    check(core)


def test_a_sequence_that_just_fits_the_host_is_swapped_out():
    core = make_core(
        num_blocks=3, num_host_blocks=1, num_disk_blocks=1, preemption_mode=PreemptionMode.SWAP
    )
    submit(core, 0, [1] * 6, max_tokens=5)
    submit(core, 1, [2] * 2, max_tokens=5)
    plan = schedule(core)
    while core.load().num_preemptions == 0:
        answer(core, plan, 0, 1)
        plan = schedule(core)
    assert len(outs(plan)) == 1
    assert core.load().num_swapped == 1


def test_without_room_on_the_disk_the_other_is_recomputed():
    core, plan = make_spilled(num_disk_blocks=1)
    assert not outs(plan)
    assert not stores(plan)
    assert core.load().num_swapped == 1


# Swaps cost almost nothing. To spill two blocks of 400 bytes and load them takes 16 s at 100
# bytes/s; to recompute the eleven tokens of sequence 1 takes 16 s, too.
@pytest.mark.parametrize(
    ("num_host_blocks", "disk_bytes_per_s", "spills"),
    [(3, 101, True), (3, 99, False), (3, 0, False), (4, 51, True), (4, 49, False)],
    ids=["two in time", "two too slowly", "unknown", "one of two in time", "one too slowly"],
)
def test_by_cost_the_way_of_what_spills_counts(num_host_blocks, disk_bytes_per_s, spills):
    _, plan = make_spilled(
        num_host_blocks=num_host_blocks,
        preemption_mode=PreemptionMode.COST,
        bytes_per_block=400,
        swap_bytes_per_s=1e9,
        disk_bytes_per_s=disk_bytes_per_s,
        prefill_tokens_per_s=11 / 16,
    )
    assert bool(outs(plan)) == bool(stores(plan)) == spills


def test_without_room_the_first_in_order_takes_that_of_later_ones(monkeypatch):
    core, plan = make_spilled(num_disk_blocks=2)
    answer(core, plan, 0, stored_disk_block_ids=[0, 1])
    swapped = {seq.seq_key: seq for seq in core.live if seq.status is SeqStatus.SWAPPED}
    assert swapped.keys() == {1, 2}, "2 has spilled, and filled the disk"
    with monkeypatch.context() as patch:
        patch.setattr(core.queue, "sort_key", lambda seq: -seq.seq_key)
        assert core.host_room.make_for_fetch(swapped[2], 2)
    assert swapped[1].status is SeqStatus.WAITING
    assert core.tier.pool.num_available >= 2
    check(core)


def test_a_sequence_not_wholly_on_the_host_does_not_spill():
    core, plan = make_spilled()
    answer(core, plan, 0, stored_disk_block_ids=[0, 1])
    (swapped,) = [seq for seq in core.live if seq.seq_key == 1]
    room, tier = core.host_room, core.tier
    assert len(room._find_spills(1)) == 1
    tier._swap_outs[swapped.host_block_ids[-1]] = DeviceBlockId(5)
    assert room._find_spills(1) is None
