"""KV groups: the blocks that a sequence holds, and those that a prefix hit needs."""

import pytest
from core_driver import answer, chunks, make_core, new, schedule, submit

from contract.worker_limits import STATE_WINDOW, Chunk
from scheduler_svc.core.interface.config import PreemptionMode
from scheduler_svc.core.invariants import check
from scheduler_svc.core.sequence import SeqStatus

SIZES = {
    "num_blocks": 3000,
    "block_size": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 8192,
}


def most_blocks(core, num_tokens):
    """The most blocks that a sequence of `num_tokens` holds while it runs alone."""
    submit(core, 0, [0] * (num_tokens - 100), max_tokens=100)
    most, num_free = 0, core.pool.num_available
    while core.live.of_source(0):
        plan = schedule(core)
        most = max(most, num_free - core.pool.num_available)
        is_done = not core.running.prefilling
        answer(core, plan, *([0] if is_done else []))
    return most


@pytest.mark.parametrize(
    ("kv_windows", "share"),
    [
        ((None,), 1.0),
        ((1024,), 0.2),
        ((None, 1024), (1 + 0.2) / 2),
        ((None, 1024, 1024, 1024), (1 + 3 * 0.2) / 4),
        ((Chunk(1024),), 0.2),
    ],
)
def test_a_window_of_1k_holds_a_fifth_of_8k_tokens(kv_windows, share):
    all_blocks = 8192 // 16 * len(kv_windows)
    core = make_core(**SIZES, kv_windows=kv_windows, enable_prefix_caching=False)
    assert most_blocks(core, 8192) <= share * all_blocks


def test_a_prompt_longer_than_the_pool_runs_behind_a_window():
    core = make_core(kv_windows=(8,), num_blocks=9, max_num_batched_tokens=8, max_model_len=64)
    assert core.max_request_len == 64
    submit(core, 0, range(50), max_tokens=1)
    while core.running or core.queue:
        plan = schedule(core)
        answer(core, plan, *([0] if not core.running.prefilling else []))
    assert core.load().num_preemptions == 0


def test_the_null_block_is_no_room_for_a_request():
    core = make_core(kv_windows=(None, None), num_blocks=9)
    assert core.max_request_len == 8 // 2 * 4


def test_a_prefix_hit_needs_only_what_the_window_still_sees():
    core = make_core(kv_windows=(8,), num_blocks=17)
    submit(core, 0, range(32), max_tokens=1)
    answer(core, schedule(core), 0)
    submit(core, 1, [*range(32), 40], max_tokens=2)
    (seq,) = core.live
    found = core.lookup.find(seq)
    assert (found.num_tokens, found.places) == (32, [6, 7])
    first_blocks = [block for block in core.pool.books.cached if block not in found.ready]
    core.pool.forget(first_blocks)
    plan = schedule(core)
    ((_, num_computed, table),) = new(plan)
    assert num_computed == 32
    assert table[:6] == [0] * 6, "what lies behind the window is the null block"
    assert table[6:8] == found.ready
    assert chunks(plan) == {0: 1}


@pytest.mark.parametrize(("num_shared", "places"), [(24, [4, 5]), (16, []), (12, [0, 1, 2])])
def test_a_prefix_hit_needs_only_the_blocks_of_the_last_chunk(num_shared, places):
    core = make_core(kv_windows=(None, Chunk(16)), num_blocks=40)
    submit(core, 0, range(28), max_tokens=1)
    answer(core, schedule(core), 0)
    submit(core, 1, [*range(num_shared), 40], max_tokens=2)
    (seq,) = core.live
    found = core.lookup.find(seq)
    assert found.num_tokens == num_shared
    assert [place // 2 for place in found.places if place % 2] == places


def test_siblings_share_what_the_window_of_their_prompt_shows():
    core = make_core(kv_windows=(None, 8), num_blocks=40)
    submit(core, 0, range(18), n=2)
    ((_, _, parents),) = new(schedule(core))
    plan = schedule(core)
    ((row, num_computed, table),) = new(plan)
    assert (num_computed, chunks(plan)) == (17, {row: 1})
    assert table[:8:2] == parents[:8:2]
    assert table[5:8:2] == parents[5:8:2]
    assert table[1:5:2] == [0, 0]
    assert plan.copy_src_block_ids.tolist() == parents[8:]


def test_siblings_share_a_prompt_that_ends_with_a_block():
    core = make_core(kv_windows=(8,), num_blocks=40, max_prefill_chunk=15)
    submit(core, 0, range(16), n=2)
    ((_, _, parents),) = new(first := schedule(core))
    assert chunks(first) == {0: 15}
    assert chunks(schedule(core)) == {0: 1}
    answer(core, first)
    ((_, num_computed, table),) = new(schedule(core))
    assert (num_computed, table[:3]) == (15, [0, 0, parents[2]])


def test_with_windows_a_sequence_goes_on_when_its_swap_in_is_confirmed():
    core = make_core(
        kv_windows=(None, 8),
        num_blocks=40,
        num_host_blocks=16,
        enable_prefix_caching=False,
        preemption_mode=PreemptionMode.SWAP,
    )
    submit(core, 0, range(5))
    answer(core, schedule(core), 0)
    (seq,) = core.running
    core.preemption.preempt(seq)
    answer(core, schedule(core))
    plan = schedule(core)
    assert plan.swap_in_src_block_ids.size
    assert core.schedule(0.0) is None
    answer(core, plan)
    assert [num_computed for _, num_computed, _ in new(schedule(core))] == [5]


def test_a_decode_needs_a_block_of_each_group():
    core = make_core(kv_windows=(None, 8), num_blocks=1 + 2 * 2 + 2)
    for key in range(2):
        submit(core, key, [key] * 4)
    answer(core, schedule(core), 0, 1)
    schedule(core)
    assert [seq.seq_key for seq in core.running] == [0]
    assert core.load().num_preemptions == 1


def test_with_windows_blocks_are_published_when_their_swap_in_is_confirmed():
    core = make_core(
        kv_windows=(None, 8),
        num_blocks=40,
        num_host_blocks=16,
        preemption_mode=PreemptionMode.SWAP,
    )
    submit(core, 0, range(13))
    answer(core, schedule(core), 0)
    (seq,) = core.running
    last_blocks = seq.block_ids[4:]
    core.preemption.preempt(seq)
    core.pool.forget(last_blocks)
    while not (plan := schedule(core)).swap_in_src_block_ids.size:
        answer(core, plan)
    answer(core, plan)
    submit(core, 1, range(13))
    plan = schedule(core)
    assert [num_computed for _, num_computed, _ in new(plan)] == [13, 12]


def test_blocks_behind_a_window_without_finite_logits_cannot_be_found():
    core = make_core(kv_windows=(8,), num_blocks=40, max_num_batched_tokens=8)
    submit(core, 0, range(24))
    answer(core, schedule(core))
    answer(core, schedule(core))
    answer(core, schedule(core), failed=[0])
    assert core.load().num_cached_blocks == 0


def test_a_prompt_is_preempted_if_a_decode_takes_a_block_of_its_next_chunk():
    core = make_core(
        kv_windows=(8,), num_blocks=1 + 6, max_num_batched_tokens=8, enable_prefix_caching=False
    )
    submit(core, 0, range(2))
    submit(core, 1, range(40), max_tokens=1)  # a window and a chunk take five blocks
    num_preemptions = []
    for _ in range(4):
        answer(core, schedule(core), 0)
        num_preemptions.append(core.load().num_preemptions)
    assert num_preemptions == [0, 0, 0, 1], "position 4 is the first of a block"


def test_blocks_of_a_chunk_go_back_after_it():
    core = make_core(kv_windows=(Chunk(8),), num_blocks=17, enable_prefix_caching=False)
    submit(core, 0, range(7), max_tokens=13)
    num_held = []
    for _ in range(12):
        answer(core, schedule(core), 0)
        num_held += [len(core.groups.held(seq.block_ids)) for seq in core.running]
    assert num_held == [2, 2, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1]  # chunks begin at 8 and 16


def test_cached_tokens_of_a_prompt_are_counted_with_a_window():
    core = make_core(kv_windows=(8,), num_blocks=17)
    submit(core, 0, range(32), max_tokens=1)
    (seq,) = core.live
    assert core.lookup.num_cached_tokens(seq.request) == 0
    answer(core, schedule(core), 0)
    assert core.lookup.num_cached_tokens(seq.request) == 28, "the last token never counts"


def test_a_window_with_a_hole_is_no_hit():
    core = make_core(kv_windows=(None, 8), num_blocks=40)
    submit(core, 0, range(32), max_tokens=1)
    answer(core, schedule(core), 0)
    submit(core, 1, [*range(32), 40], max_tokens=2)
    (seq,) = core.live
    found = core.lookup.find(seq)
    assert found.num_tokens == 32
    last_of_window = found.ready[found.places.index(7 * 2 + 1)]
    core.pool.forget([last_of_window])
    assert core.lookup.find(seq).num_tokens == 28


def test_a_recurrent_sequence_is_swapped_out_with_its_last_checkpoint():
    """Its step in flight advances the state beyond the known tokens."""
    core = make_core(
        kv_windows=(None, STATE_WINDOW),
        num_blocks=40,
        num_host_blocks=20,
        bytes_per_block=100,
        preemption_mode=PreemptionMode.SWAP,
    )
    submit(core, 0, range(6))
    answer(core, schedule(core), 0)
    decode = schedule(core)
    (seq,) = core.running
    core.preemption.preempt(seq, must_swap=True)
    check(core)
    assert seq.status is SeqStatus.SWAPPED
    assert len(seq.host_block_ids) == 2, "the full block of each group"
    assert seq.num_computed_tokens == 4
    assert core.load().num_recomputed_tokens == 2
    answer(core, decode, 0)
    again = schedule(core)
    assert not again.swap_in_src_block_ids.size, "the blocks are still cached"
    assert [each[1] for each in new(again)] == [4], "it goes on behind its only full block"


def test_tokens_without_a_checkpoint_count_once_as_computed_again():
    core = make_core(
        kv_windows=(STATE_WINDOW,),
        num_blocks=40,
        num_host_blocks=20,
        bytes_per_block=100,
        preemption_mode=PreemptionMode.SWAP,
    )
    submit(core, 0, range(3))
    answer(core, schedule(core), 0)
    (seq,) = core.running
    core.preemption.preempt(seq)
    schedule(core)
    assert core.load().num_recomputed_tokens == 3


def test_checkpoints_of_a_prompt_s_last_chunk_go_back_when_it_decodes():
    core = make_core(kv_windows=(STATE_WINDOW,), num_blocks=40)
    submit(core, 0, range(30))
    answer(core, schedule(core), 0)
    (seq,) = core.running
    schedule(core)
    check(core)
    assert len(core.groups.held(seq.block_ids)) == 1
    assert core.load().num_cached_blocks == 30 // core.config.block_size


@pytest.mark.parametrize("others", [(), (None,)])
def test_what_a_decode_s_window_has_passed_is_free_at_once_and_the_rest_is_found_at_its_end(others):
    core = make_core(kv_windows=(*others, 8), num_blocks=17)
    assert core.load().num_blocks == 16, "the null block is no sequence's"
    submit(core, 0, range(2), max_tokens=20)
    (seq,) = core.live
    while core.live.of_source(0):
        assert core.load().num_cached_blocks == 0
        answer(core, schedule(core), 0)
    schedule(core)
    assert len(seq.block_hashes) == 5
    names = core.groups.names(
        seq.block_hashes, range(len(others), 5 * core.groups.num, core.groups.num)
    )
    assert [len(core.pool.find([name])) for name in names] == [0, 0, 0, 1, 1]


def test_of_a_decode_whose_kv_is_wrong_nothing_is_found():
    core = make_core(kv_windows=(None, 8))
    submit(core, 0, range(8))
    answer(core, schedule(core), 0)
    answer(core, schedule(core), failed=[0])
    schedule(core)
    assert core.load().num_cached_blocks == 0


def test_a_prefix_ends_where_all_groups_have_what_they_see():
    core = make_core(kv_windows=(8, None), num_blocks=40)
    submit(core, 0, range(33), max_tokens=1)
    (seq,) = core.live
    answer(core, schedule(core), 0)
    assert core.lookup.num_cached_tokens(seq.request) == 32
    for missing in ([9], [4]):  # of the group without a window; then of the window that ends there
        core.pool.forget(core.pool.find(core.groups.names(seq.block_hashes, missing)))
    assert core.lookup.num_cached_tokens(seq.request) == 8


def test_blocks_that_a_prompt_has_passed_are_evicted_from_the_last_on():
    core = make_core(kv_windows=(8,), num_blocks=17, max_num_batched_tokens=8)
    submit(core, 0, range(40), max_tokens=1)
    (seq,) = core.live
    for _ in range(4):
        answer(core, schedule(core))
    passed = [core.pool.find([name])[0] for name in seq.block_hashes[2:4]]
    assert core.pool.books.cached[-2:] == passed[::-1]


def test_blocks_for_the_next_chunk_are_taken_in_the_order_of_the_table():
    core = make_core(kv_windows=(8, 8), num_blocks=40, max_num_batched_tokens=8)
    submit(core, 0, range(40), max_tokens=1)
    for _ in range(2):
        answer(core, schedule(core))
    places = schedule(core).placements.reshape(-1, 3)[:, 1].tolist()
    assert places == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("limits", "num_of_window"),
    [
        ({"max_num_batched_tokens": 20}, 8),  # 8 + 20 tokens, and a block that begins before them
        ({"max_num_batched_tokens": 20, "max_prefill_chunk": 8}, 5),
        ({"max_num_batched_tokens": 8, "num_draft_tokens": 3}, 6),  # 12 tokens of three steps
        ({"max_num_batched_tokens": 64}, 16),  # no more than the sequence has
    ],
)
def test_a_sequence_holds_blocks_for_its_window_and_what_one_chunk_or_the_drafts_may_bring(
    limits, num_of_window
):
    groups = make_core(kv_windows=(None, 8), num_blocks=40, **limits).groups
    assert groups.num_needed(64) == 16 + num_of_window


@pytest.mark.parametrize("other", [None, 8])
def test_a_decode_publishes_the_state_after_each_full_block(other):
    core = make_core(kv_windows=(other, STATE_WINDOW), num_blocks=40)
    submit(core, 0, range(6), max_tokens=8)
    while core.rows.num_tokens(0) < 13:  # the decode has filled blocks 1 and 2
        answer(core, schedule(core), 0)
    schedule(core)
    (seq,) = core.live
    states = core.groups.names(seq.block_hashes, [3, 5])
    assert len(core.pool.find(states)) == 2
