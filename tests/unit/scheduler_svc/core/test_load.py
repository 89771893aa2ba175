"""What reports of a core's load count."""

from core_driver import answer, make_core, schedule, submit

from scheduler_svc.core.pacing import PromptQueue
from scheduler_svc.core.reports.load import has_live_with, read_prompts, read_space


def test_a_salt_that_one_of_the_live_requests_begins_with_is_in_use():
    core = make_core()
    submit(core, 0, [1], salt="other")
    submit(core, 1, [1], salt="adapter/1")
    assert has_live_with(core, "adapter")
    assert not has_live_with(core, "adapter/2")


def test_blocks_of_kv_groups_are_counted_without_the_null_block():
    core = make_core(16, kv_windows=(8, None))
    submit(core, 0, range(6))
    schedule(core)
    load, space = core.load(), read_space(core)
    assert (load.num_blocks, load.num_free_blocks) == (15, 11)
    assert (space.num_slots_held, space.num_slots_written) == (8, 5)


def test_what_the_cache_has_of_a_long_prompt_may_leave_a_short_one():
    core = make_core(long_prefill_threshold=8)
    submit(core, 0, [1] * 5, max_tokens=1)
    answer(core, schedule(core), 0)
    answer(core, schedule(core))
    submit(core, 1, [1] * 12)
    core.schedule(0.0, None, 6)
    assert read_prompts(core) == PromptQueue(0, num_tokens=2, num_short_tokens=2, num_short=1)


def test_the_last_token_of_a_prompt_counts_as_a_decode():
    core = make_core()
    submit(core, 0, [1] * 5)
    core.schedule(0.0, None, 4)
    assert read_prompts(core) == PromptQueue(0, num_tokens=0, num_short_tokens=0, num_short=0)


def test_waiting_prompts_count_as_far_as_rows_are_left():
    core = make_core(max_num_seqs=2)
    submit(core, 0, [1])
    schedule(core)
    for key in (1, 2):
        submit(core, key, [key + 1] * 4)
    assert read_prompts(core) == PromptQueue(1, num_tokens=4, num_short_tokens=4, num_short=1)


def test_waiting_prompts_need_blocks_in_each_kv_group():
    core = make_core(21, kv_windows=(None, None))
    submit(core, 0, range(24), max_tokens=2)
    schedule(core)
    assert core.pool.num_available == 20 - 12
    submit(core, 1, range(30, 60), max_tokens=2)
    assert read_prompts(core).num_tokens == 4 * 4
