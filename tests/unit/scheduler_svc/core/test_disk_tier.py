"""The disk tier by example: which block moves where, in which step, and who waits for it."""

import numpy as np
import pytest
from core_driver import ROUTER, answer, chunks, make_core, new, schedule, submit

from scheduler_svc.core.block_hash import extend_chain, root_hash
from scheduler_svc.core.block_pool import DeviceBlockId
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.errors import BrokenInvariantError
from scheduler_svc.core.host_room import HostRoom
from scheduler_svc.core.host_tier import HostTier
from scheduler_svc.core.invariants import check
from scheduler_svc.core.plan import StepId, StepOutcome, StepPlan
from scheduler_svc.core.plan_draft import PlanDraft
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.sequence import SeqStatus


def stores(plan: StepPlan) -> dict[int, int]:
    """Host block to disk block."""
    sources, targets = plan.disk_store_src_block_ids, plan.disk_store_dst_block_ids
    return dict(zip(sources.tolist(), targets.tolist(), strict=True))


def loads(plan: StepPlan) -> dict[int, int]:
    """Disk block to host block."""
    sources, targets = plan.disk_load_src_block_ids, plan.disk_load_dst_block_ids
    return dict(zip(sources.tolist(), targets.tolist(), strict=True))


def outs(plan: StepPlan) -> dict[int, int]:
    """Device block to host block."""
    sources, targets = plan.swap_out_src_block_ids, plan.swap_out_dst_block_ids
    return dict(zip(sources.tolist(), targets.tolist(), strict=True))


def ins(plan: StepPlan) -> dict[int, int]:
    """Host block to device block."""
    sources, targets = plan.swap_in_src_block_ids, plan.swap_in_dst_block_ids
    return dict(zip(sources.tolist(), targets.tolist(), strict=True))


def run_alone(core, key):
    """Take [key + 1] * 9 to its end; its two full blocks are cached. Return the first plan."""
    submit(core, key, [key + 1] * 9, max_tokens=1)
    first = schedule(core)
    answer(core, first, 0)
    second = schedule(core)
    answer(core, second, stored_disk_block_ids=stores(first).values())
    return first


def make_full(num_prompts=5, **overrides):
    """A core of four device, four host and four disk blocks that has done five prompts.

    Of prompt 0 the full blocks are disk blocks 1 and 0; of prompt 1 host block 3 and disk block 2;
    of prompt 2 host blocks 1 and 0; of prompt 3 device block 3 and host block 2; of prompt 4 device
    blocks 0 and 1.
    """
    settings = {
        "num_host_blocks": 4,
        "num_disk_blocks": 4,
        "preemption_mode": PreemptionMode.SWAP,
    }
    core = make_core(num_blocks=4, **(settings | overrides))
    for key in range(num_prompts):
        run_alone(core, key)
    return core


def run_until_new(core):
    """Answer steps until one announces a sequence; return it."""
    plan = schedule(core)
    while not plan.new_sequences:
        answer(core, plan)
        plan = schedule(core)
    return plan


# --- demotion -----------------------------------------------------------------------------------


def test_an_evicted_host_block_is_stored_in_the_plan_that_reuses_it():
    core = make_full(num_prompts=3)
    submit(core, 3, [4] * 9, max_tokens=1)
    plan = schedule(core)
    assert outs(plan) == {2: 3, 0: 0}
    assert stores(plan) == {0: 0}, "what host block 0 held until now"
    load = core.load()
    assert (load.num_free_disk_blocks, load.num_cached_disk_blocks) == (3, 0), "not to be found yet"
    answer(core, plan, 0, stored_disk_block_ids=[0])
    load = core.load()
    assert (load.num_cached_disk_blocks, load.num_stored_blocks) == (1, 1)


def test_a_failed_store_leaves_the_disk_block_blank():
    core = make_full(num_prompts=3)
    submit(core, 3, [4] * 9, max_tokens=1)
    answer(core, schedule(core), 0, failed_disk_block_ids=[0])
    load = core.load()
    assert (load.num_free_disk_blocks, load.num_failed_disk_moves) == (4, 1)


def test_a_host_block_that_is_evicted_before_it_is_filled_is_lost():
    core = make_core(num_blocks=4, num_host_blocks=1, num_disk_blocks=4)
    run_alone(core, 0)
    run_alone(core, 1)
    submit(core, 2, [3] * 9, max_tokens=1)
    plan = schedule(core)
    assert outs(plan) == {3: 0}, "and not 0, which went there first"
    assert stores(plan) == {0: 0}, "what an earlier plan has put there, only"


def test_what_the_disk_has_is_not_stored_again():
    core = make_full(num_disk_blocks=16)
    submit(core, 10, [1] * 9, max_tokens=1)
    ((seq, _),) = core._fetching._awaited.items()
    plan = schedule(core)
    assert loads(plan) == {1: 3, 0: 0}
    answer(core, plan, stored_disk_block_ids=stores(plan).values(), loaded_host_block_ids=[3, 0])
    core.cancel(ROUTER, [10])
    assert core._tier.pool.find(seq.block_hashes) == [3, 0]
    for key in range(11, 14):
        on_host = core._tier.pool.find(seq.block_hashes)
        assert not {*on_host} & stores(run_alone(core, key)).keys()
    assert not core._tier.pool.find(seq.block_hashes)
    assert core._tier.disk.pool.find(seq.block_hashes) == [1, 0]


def test_no_more_stores_than_the_limit_are_under_way():
    core = make_full(num_prompts=4, max_disk_moves=1)
    submit(core, 4, [5] * 9, max_tokens=1)
    plan = schedule(core)
    assert outs(plan) == {1: 1, 2: 2}
    assert stores(plan) == {1: 1}, "what host block 2 held is lost"


def test_while_the_disk_is_busy_one_step_is_there_to_hear_of_it():
    core = make_full(num_prompts=3)
    submit(core, 3, [4] * 9, max_tokens=1)
    answer(core, schedule(core), 0)
    answer(core, schedule(core))
    plan = schedule(core)
    assert plan.num_scheduled_tokens == 0
    assert core.schedule(0.0) is None, "one is enough"
    answer(core, plan, stored_disk_block_ids=[0])
    assert core.schedule(0.0) is None, "nothing is under way"


# --- promotion ----------------------------------------------------------------------------------


def test_a_prompt_on_the_disk_is_loaded_at_once_and_then_swapped_in():
    core = make_full()
    submit(core, 10, [1] * 9, max_tokens=1)
    load = core.load()
    assert (load.num_waiting, load.num_running) == (1, 0)
    plan = schedule(core)
    assert loads(plan) == {1: 3, 0: 0}
    assert stores(plan) == {3: 3, 0: 2}, "what these host blocks held"
    answer(core, plan, loaded_host_block_ids=[3])
    plan = schedule(core)
    assert not ins(plan), "one is missing"
    answer(core, plan, loaded_host_block_ids=[0])
    plan = schedule(core)
    assert outs(plan), "to make room on the device"
    answer(core, plan)
    plan = schedule(core)
    assert list(ins(plan)) == [3, 0]
    answer(core, plan)
    plan = schedule(core)
    assert [num_computed for _, num_computed, _ in new(plan)] == [8]
    assert core.load().num_loaded_blocks == 2


def test_of_a_prompt_that_ends_with_a_block_the_last_is_not_loaded():
    core = make_full()
    submit(core, 10, [1] * 8, max_tokens=1)  # one token must be computed
    assert loads(schedule(core)) == {1: 3}


def test_placement_counts_what_any_tier_has_of_a_prompt():
    core = make_full()
    chains = []
    for key in range(6):
        chain = []
        tokens = np.full(8, key + 1, np.int32)
        extend_chain(chain, root_hash(""), tokens, core.config.block_size)
        chains.append(chain)
    assert [core._lookup.num_cached_blocks(chain) for chain in chains] == [2, 2, 2, 2, 2, 0]
    assert core._lookup.num_cached_blocks(chains[1][:1]) == 1


def test_a_prompt_on_host_and_disk_has_its_host_block_held_meanwhile():
    core = make_full()
    submit(core, 10, [2] * 9, max_tokens=1)
    (seq,) = core._fetching._awaited
    assert seq.fetched_block_ids == (3, 0)
    assert core._tier.pool.ref_count(3) == 1
    assert loads(schedule(core)) == {2: 0}


def test_others_run_while_a_prompt_is_loaded():
    core = make_full()
    submit(core, 10, [1] * 9, max_tokens=1)
    submit(core, 11, [7] * 4, max_tokens=1)
    plan = schedule(core)
    assert chunks(plan) == {0: 4}
    assert loads(plan) == {1: 3, 0: 0}


def test_equal_prompts_share_their_loads():
    core = make_full()
    for key in (10, 11):
        submit(core, key, [1] * 9, max_tokens=1)
    plan = schedule(core)
    assert loads(plan) == {1: 3, 0: 0}
    assert core._tier.pool.ref_count(0) == 3, "two sequences and the load"
    answer(core, plan, loaded_host_block_ids=[3, 0])
    assert [num_computed for _, num_computed, _ in new(run_until_new(core))] == [8, 8]
    assert core.load().num_loaded_blocks == 2


def test_a_new_prompt_leaves_half_of_the_host_alone_until_its_turn():
    core = make_full(num_prompts=3, num_host_blocks=2)
    submit(core, 9, [1] * 9, max_tokens=1)
    assert not core._fetching._awaited, "it would take all of the host"
    assert loads(schedule(core)) == {0: 0}
    assert len(core._fetching) == 1


def test_loads_go_out_a_few_at_a_time():
    core = make_full(max_disk_moves=1)
    submit(core, 10, [1] * 9, max_tokens=1)
    plan = schedule(core)
    ((_, first),) = loads(plan).items()
    answer(core, plan, loaded_host_block_ids=[first])
    assert len(loads(schedule(core))) == 1


def test_what_fails_to_be_loaded_is_forgotten_and_computed():
    core = make_full()
    submit(core, 10, [1] * 9, max_tokens=1)
    plan = schedule(core)
    answer(core, plan, loaded_host_block_ids=[3], failed_host_block_ids=[0])
    plan = run_until_new(core)
    assert [num_computed for _, num_computed, _ in new(plan)] == [4], "what precedes it"
    assert core._tier.disk.pool.find(core._rows.owner(0).block_hashes[1:2]) == []
    assert core.load().num_failed_disk_moves == 1


def test_a_sequence_cancelled_while_it_is_loaded_leaves_the_blocks_to_the_cache():
    core = make_full()
    submit(core, 10, [1] * 9, max_tokens=1)
    plan = schedule(core)
    core.cancel(ROUTER, [10])
    check(core)
    answer(core, plan, loaded_host_block_ids=[3, 0], stored_disk_block_ids=[3, 2])
    assert core.schedule(0.0) is None
    load = core.load()
    assert (load.num_cached_host_blocks, load.num_cached_disk_blocks) == (4, 4)
    assert load.num_waiting == 0


def test_a_deadline_passes_while_a_prompt_is_loaded():
    core = make_full()
    submit(core, 10, [1] * 9, max_tokens=1, deadline=20.0)
    schedule(core, now=19.0)
    assert core.schedule(20.0) is None
    check(core)
    assert [end.reason for end in core.take_expired()] == [FinishReason.DEADLINE]
    assert core.load().num_waiting == 0


def test_a_drained_core_gives_back_what_waits_for_the_disk():
    core = make_full()
    submit(core, 10, [1] * 9, max_tokens=1)
    assert [request.first_seq_key for request in core.drain()] == [10]


# Two blocks of 400 bytes, 8 s at 100 bytes/s; the tokens they spare: 8 s at 1 token/s.
@pytest.mark.parametrize(
    ("disk_bytes_per_s", "tokens_per_s", "is_loaded"),
    [(101, 1.0, True), (99, 1.0, False), (100, 1.01, False), (0, 1.0, False), (100, 0, True)],
)
def test_by_cost_only_what_is_loaded_faster_than_computed_is(
    disk_bytes_per_s, tokens_per_s, is_loaded
):
    core = make_full(
        preemption_mode=PreemptionMode.COST,
        bytes_per_block=400,
        disk_bytes_per_s=disk_bytes_per_s,
        prefill_tokens_per_s=tokens_per_s,
    )
    submit(core, 10, [1] * 9, max_tokens=1)
    assert bool(loads(schedule(core))) == is_loaded


# --- spilling -----------------------------------------------------------------------------------


def make_spilled(**overrides):
    """A core in which 2, with seven computed tokens in two blocks, has just spilled both for 1.

    Return it and the plan; 0 runs alone.
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
    submit(core, 2, [3] * 5, max_tokens=8)
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


def fetch_spilled(core, plan, **ends):
    """Let 2 have its turn; return the plan after the one that loads its blocks to the host."""
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
    """Have a sequence of three blocks preempted while `prompts` are on a host of four and wait."""
    core = make_core(
        num_blocks=6, num_host_blocks=4, num_disk_blocks=8, preemption_mode=PreemptionMode.SWAP
    )
    for key in range(6):
        run_alone(core, key)
    submit(core, 20, [7] * 7, max_tokens=9)
    submit(core, 21, [8] * 8, max_tokens=8)
    plan = schedule(core)
    for key, prompt in enumerate(prompts, 30):
        submit(core, key, prompt, max_tokens=2)
    while core.load().num_preemptions == 0:
        stored, loaded = stores(plan).values(), loads(plan).values()
        answer(core, plan, 0, 1, stored_disk_block_ids=stored, loaded_host_block_ids=loaded)
        plan = schedule(core)
    assert core.load().num_loaded_blocks == 2
    return core, plan


def test_what_was_fetched_for_one_that_waits_is_let_go_for_one_that_is_swapped_out():
    core, plan = preempt_beside([1] * 9)  # two blocks
    assert len(outs(plan)) == 3
    assert core.load().num_swapped == 1


def test_no_more_is_let_go_than_there_is_need_for():
    core, plan = preempt_beside([1] * 5, [2] * 5)  # a block each
    assert len(outs(plan)) == 3
    assert core.load().num_cached_host_blocks == 0, "the first's is still held"


def test_what_was_fetched_for_one_that_waits_is_let_go_for_one_that_comes_back():
    core, _ = preempt_beside([1] * 5, [2] * 5)
    (swapped,) = [seq for seq in core._live if seq.status is SeqStatus.SWAPPED]
    assert core._tier.pool.num_free == 0
    assert core._host_room.make_for_fetch(swapped, 1)
    assert core._tier.pool.num_free == 1
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


# To swap is almost free. Two blocks of 400 bytes spill and come back: 16 s at 100 bytes/s. To
# compute the eleven tokens of 1 again takes 16 s, too.
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


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("stored_disk_block_ids", "no store to disk block 2 is under way"),
        ("failed_disk_block_ids", "no store to disk block 2 is under way"),
        ("loaded_host_block_ids", "no load to host block 2 is under way"),
        ("failed_host_block_ids", "no load to host block 2 is under way"),
    ],
)
def test_the_end_of_a_move_that_nobody_made_is_a_bug(name, what):
    core = make_full(num_prompts=1)
    submit(core, 9, [7], max_tokens=1)
    with pytest.raises(BrokenInvariantError, match=what):
        answer(core, schedule(core), **{name: [2]})


def test_a_disk_without_a_host_is_refused():
    with pytest.raises(ValueError, match="num_disk_blocks is 1; without host blocks it must be 0"):
        SchedulerConfig(
            num_blocks=1,
            block_size=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=1,
            num_disk_blocks=1,
        )


# --- moves, without a scheduler -------------------------------------------------------------------


def make_tier(**overrides):
    settings = {"block_size": 4, "num_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    settings |= {"max_model_len": 32, "num_host_blocks": 6, "num_disk_blocks": 4}
    return HostTier(SchedulerConfig(**(settings | overrides)))


def send(tier, step=1):
    draft = PlanDraft(StepId(step), 0.0, 0, 64)
    tier.send(draft)
    return draft


def test_without_room_anywhere_the_first_in_order_has_that_of_those_behind_it():
    core, plan = make_spilled(num_disk_blocks=2)
    answer(core, plan, 0, stored_disk_block_ids=[0, 1])
    swapped = {seq.seq_key: seq for seq in core._live if seq.status is SeqStatus.SWAPPED}
    assert swapped.keys() == {1, 2}, "2 has spilled, and filled the disk"
    room = HostRoom(core.config, core._tier, core._waiting, core._live, lambda seq: -seq.seq_key)
    assert room.make_for_fetch(swapped[2], 2)
    assert swapped[1].status is SeqStatus.WAITING
    assert core._tier.pool.num_free >= 2
    check(core)


def test_who_is_not_wholly_on_the_host_yet_does_not_spill():
    core, plan = make_spilled()
    answer(core, plan, 0, stored_disk_block_ids=[0, 1])
    (swapped,) = [seq for seq in core._live if seq.seq_key == 1]
    room, tier = core._host_room, core._tier
    assert len(room._find_spills(1)) == 1
    tier._swap_outs[swapped.host_block_ids[-1]] = DeviceBlockId(5)
    assert room._find_spills(1) is None


def outcome(**disk):
    none = np.empty(0, np.int32)
    ends = {name: np.array(blocks, np.int32) for name, blocks in disk.items()}
    return StepOutcome(StepId(1), none, none, none, none, **ends)


def test_a_store_alone_asks_for_a_step_and_so_does_a_load():
    tier = make_tier()
    assert not tier.has_moves
    (host,) = tier.pool.allocate(1)
    disk = tier.disk.keep(host, None)
    assert tier.has_moves
    assert not tier.disk.is_loading
    assert send(tier).disk_store_dst == [disk]
    assert not tier.has_moves, "it is under way"
    assert tier.disk.is_busy
    tier.disk.answer(outcome(stored_disk_block_ids=[disk]))
    assert not tier.disk.is_busy
    tier.disk.load(disk, host, None)
    assert tier.has_moves
    assert tier.disk.is_loading


def test_the_end_of_a_move_that_has_not_gone_out_is_a_bug():
    tier = make_tier()
    (host,) = tier.pool.allocate(1)
    disk = tier.disk.keep(host, None)
    with pytest.raises(BrokenInvariantError, match=f"no store to disk block {disk} is under way"):
        tier.disk.answer(outcome(stored_disk_block_ids=[disk]))
    send(tier)
    tier.disk.answer(outcome(stored_disk_block_ids=[disk]))
    tier.disk.load(disk, host, None)
    with pytest.raises(BrokenInvariantError, match=f"no load to host block {host} is under way"):
        tier.disk.answer(outcome(loaded_host_block_ids=[host]))


def test_blocks_are_moving_from_when_it_is_asked_for_until_the_step_is_answered():
    tier = make_tier()
    assert not tier.is_moving
    (host,) = tier.swap_out([DeviceBlockId(0)], [])
    assert tier.is_moving
    send(tier)
    assert not tier.is_moving, "a swap-out has read before its step computes"
    tier.swap_in([host], [DeviceBlockId(1)])
    assert tier.is_moving
    send(tier, 2)
    assert tier.is_moving
    tier.answer(StepId(2), np.empty(0, np.int32))
    assert not tier.is_moving


def test_more_loads_than_the_limit_ask_for_no_step_until_one_has_ended():
    tier = make_tier(max_disk_moves=1)
    sources, targets = tier.disk.pool.allocate(2), tier.pool.allocate(2)
    for source, target in zip(sources, targets, strict=True):
        tier.disk.load(source, target, None)
    assert send(tier).disk_load_src == sources[:1]
    assert not tier.has_moves
    tier.disk.answer(outcome(loaded_host_block_ids=targets[:1]))
    assert tier.has_moves
    assert send(tier).disk_load_src == sources[1:]


def test_nothing_is_demoted_while_swap_ins_wait_and_then_as_many_as_the_limit():
    tier = make_tier(max_swap_blocks=2)
    hashes = [bytes([i]) * 32 for i in range(4)]
    tier.swap_in(tier.pool.allocate(1), [DeviceBlockId(7)])
    tier.begin_step()
    tier.demote(DeviceBlockId(0), hashes[0])
    assert tier.find(hashes[:1]) == ([], [])
    assert send(tier).swap_in_dst == [7]
    tier.begin_step()
    for block, block_hash in enumerate(hashes):
        tier.demote(DeviceBlockId(block), block_hash)
    assert [len(tier.find([h])[1]) for h in hashes] == [1, 1, 0, 0]
    assert tier.num_demoted == 2
    assert send(tier, 2).swap_out_src == [0, 1]
