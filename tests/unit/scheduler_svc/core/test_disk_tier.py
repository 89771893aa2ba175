"""Examples of the disk tier: the steps in which blocks move, their targets, waiting sequences."""

import numpy as np
import pytest
from core_driver import (
    ROUTER,
    answer,
    chunks,
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
from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.errors import BrokenInvariantError, MigrationRefusedError
from scheduler_svc.core.interface.request import FinishReason
from scheduler_svc.core.invariants import check


def make_full(num_prompts=5, **overrides):
    """A core of four device, four host and four disk blocks that has computed five prompts.

    The full blocks of prompt 0 are in disk blocks 1 and 0; of prompt 1 in host block 3 and disk
    block 2; of prompt 2 in host blocks 1 and 0; of prompt 3 in device block 3 and host block 2; of
    prompt 4 in device blocks 0 and 1.
    """
    settings = {
        "num_host_blocks": 4,
        "num_disk_blocks": 4,
        "preemption_mode": PreemptionMode.SWAP,
    }
    core = make_core(num_blocks=4, **(settings | overrides))
    for key in range(num_prompts):
        run_to_disk(core, key)
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


def test_a_failed_store_leaves_the_disk_block_free():
    core = make_full(num_prompts=3)
    submit(core, 3, [4] * 9, max_tokens=1)
    answer(core, schedule(core), 0, failed_disk_block_ids=[0])
    load = core.load()
    assert (load.num_free_disk_blocks, load.num_failed_disk_moves) == (4, 1)


def test_a_disk_whose_only_block_is_being_written_loses_what_comes_next():
    core = make_full(num_prompts=3, num_disk_blocks=1)
    for key in (3, 4):
        submit(core, key, [key + 1] * 9, max_tokens=1)
        plan = schedule(core)
        if key == 3:
            assert stores(plan) == {0: 0}
        answer(core, plan, 0)
    assert not stores(plan)
    submit(core, 5, [1], max_tokens=1)
    answer(core, schedule(core), 0, stored_disk_block_ids=[0])
    assert core.load().num_stored_blocks == 1


def test_a_host_block_that_is_evicted_before_it_is_filled_is_lost():
    core = make_core(num_blocks=4, num_host_blocks=1, num_disk_blocks=4)
    run_to_disk(core, 0)
    run_to_disk(core, 1)
    submit(core, 2, [3] * 9, max_tokens=1)
    plan = schedule(core)
    assert outs(plan) == {3: 0}, "and not 0, which went there first"
    assert stores(plan) == {0: 0}, "what an earlier plan has put there, only"


def test_blocks_on_the_disk_are_not_stored_again():
    core = make_full(num_disk_blocks=16)
    submit(core, 10, [1] * 9, max_tokens=1)
    ((seq, _),) = core.fetching._awaited.items()
    plan = schedule(core)
    assert loads(plan) == {1: 3, 0: 0}
    answer(core, plan, stored_disk_block_ids=stores(plan).values(), loaded_host_block_ids=[3, 0])
    core.cancel(ROUTER, [10])
    assert core.tier.pool.find(seq.block_hashes) == [3, 0]
    for key in range(11, 14):
        on_host = core.tier.pool.find(seq.block_hashes)
        assert not {*on_host} & stores(run_to_disk(core, key)).keys()
    assert not core.tier.pool.find(seq.block_hashes)
    assert core.tier.disk.pool.find(seq.block_hashes) == [1, 0]


def test_no_more_stores_than_the_limit_are_under_way():
    core = make_full(num_prompts=4, max_disk_moves=1)
    submit(core, 4, [5] * 9, max_tokens=1)
    plan = schedule(core)
    assert outs(plan) == {1: 1, 2: 2}
    assert stores(plan) == {1: 1}, "what host block 2 held is lost"


def test_while_the_disk_is_busy_one_step_waits_for_its_results():
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
    load = core.load()
    assert (load.num_loaded_blocks, load.num_failed_disk_moves) == (2, 0)


def test_a_disk_of_one_block_is_used():
    core = make_full(num_prompts=3, num_host_blocks=2, num_disk_blocks=1)
    submit(core, 9, [1] * 9, max_tokens=1)
    assert list(loads(schedule(core))) == [0]


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
    assert [core.lookup.num_cached_blocks(chain) for chain in chains] == [2, 2, 2, 2, 2, 0]
    assert core.lookup.num_cached_blocks(chains[1][:1]) == 1


def test_a_prompt_on_host_and_disk_has_its_host_block_held_meanwhile():
    core = make_full()
    submit(core, 10, [2] * 9, max_tokens=1)
    (seq,) = core.fetching._awaited
    assert seq.fetched_block_ids == (3, 0)
    assert core.tier.pool.ref_count(3) == 1
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
    assert len(core.fetching) == 2, "the second takes no more room"
    plan = schedule(core)
    assert loads(plan) == {1: 3, 0: 0}
    assert core.tier.pool.ref_count(0) == 3, "two sequences and the load"
    answer(core, plan, loaded_host_block_ids=[3, 0])
    assert [num_computed for _, num_computed, _ in new(run_until_new(core))] == [8, 8]
    assert core.load().num_loaded_blocks == 2


def test_a_prompt_gets_what_it_shares_with_one_that_is_cancelled_while_loading():
    core = make_full()
    for key in (10, 11):
        submit(core, key, [1] * 9, max_tokens=1)
    plan = schedule(core)
    core.cancel(ROUTER, [10])
    check(core)
    answer(core, plan, loaded_host_block_ids=[3, 0])
    assert [num_computed for _, num_computed, _ in new(run_until_new(core))] == [8]


def test_what_follows_a_block_that_no_tier_has_is_computed():
    core = make_full()
    submit(core, 10, [1] * 4 + [9] * 5, max_tokens=1)
    assert loads(schedule(core)) == {1: 3}


@pytest.mark.parametrize("num_prompts", [3, 4])
def test_a_new_prompt_leaves_half_of_the_host_alone_until_its_turn(num_prompts):
    core = make_full(num_prompts=num_prompts, num_host_blocks=2)
    submit(core, 9, [1] * 9, max_tokens=1)
    assert len(core.fetching) == 0, "it would take all of the host"
    assert len(loads(schedule(core))) == num_prompts - 2
    assert len(core.fetching) == 1


def test_at_its_turn_a_prompt_is_loaded_as_far_as_the_host_has_room():
    core = make_full(num_prompts=6, num_host_blocks=3, num_disk_blocks=12)
    for key in range(10, 13):
        submit(core, key, [key - 9] * 9, max_tokens=1)
    assert len(core.fetching) == 1
    plan = schedule(core)
    assert loads(plan) == {1: 0, 0: 1, 3: 2}, "two blocks of the first, and one of the second"
    assert [num_computed for _, num_computed, _ in new(plan)] == [0], "of the third none"
    disk_moves = {
        "stored_disk_block_ids": stores(plan).values(),
        "loaded_host_block_ids": loads(plan).values(),
    }
    answer(core, plan, 0, **disk_moves)
    answer(core, schedule(core))  # swaps the first one's blocks in
    assert loads(schedule(core)) == {2: 1}, "the rest of the second"
    assert core.tier.pool.ref_count(2) == 1


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
    assert core.tier.disk.pool.find(core.rows.owner(0).block_hashes[1:2]) == []
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
    assert core.take_expired() == ()
    assert core.schedule(20.0) is None
    check(core)
    assert [end.reason for end in core.take_expired()] == [FinishReason.DEADLINE]
    assert core.load().num_waiting == 0


def test_a_request_that_waits_for_the_disk_does_not_move():
    core = make_full()
    submit(core, 10, [1] * 9, max_tokens=1)
    with pytest.raises(MigrationRefusedError, match="some of its KV is on its worker's disk"):
        core.begin_export(ROUTER, 10)
    check(core)


def test_a_drained_core_gives_back_what_waits_for_the_disk():
    core = make_full()
    submit(core, 10, [1] * 9, max_tokens=1)
    assert [request.first_seq_key for request in core.drain()] == [10]


# Loading two blocks of 400 bytes takes 8 s at 100 bytes/s; computing their tokens 8 s at 1 token/s.
@pytest.mark.parametrize(
    ("disk_bytes_per_s", "tokens_per_s", "is_loaded"),
    [(101, 1.0, True), (99, 1.0, False), (100, 1.0, False), (0, 1.0, False), (100, 0, True)],
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


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("stored_disk_block_ids", "no store to disk block 2 is in progress"),
        ("failed_disk_block_ids", "no store to disk block 2 is in progress"),
        ("loaded_host_block_ids", "no load to host block 2 is in progress"),
        ("failed_host_block_ids", "no load to host block 2 is in progress"),
    ],
)
def test_the_end_of_a_move_that_nobody_made_is_a_bug(name, what):
    core = make_full(num_prompts=1)
    submit(core, 9, [7], max_tokens=1)
    with pytest.raises(BrokenInvariantError, match=what):
        answer(core, schedule(core), **{name: [2]})


def test_the_end_of_a_load_that_was_not_sent_is_a_bug():
    core = make_full(max_disk_moves=1)
    submit(core, 10, [1] * 9, max_tokens=1)
    plan = schedule(core)
    assert loads(plan) == {1: 3}, "and block 0 afterwards"
    with pytest.raises(BrokenInvariantError, match="no load to host block 0 is in progress"):
        answer(core, plan, loaded_host_block_ids=[0])


def test_the_end_of_a_store_that_was_not_sent_is_a_bug():
    core = make_full(num_prompts=1)
    submit(core, 10, [9], max_tokens=1)
    plan = schedule(core)
    core.tier.disk.keep(core.tier.take_free(), None)
    with pytest.raises(BrokenInvariantError, match="no store to disk block 0 is in progress"):
        answer(core, plan, 0, stored_disk_block_ids=[0])


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
