"""Requests that move between two cores with their KV; exact blocks."""

from collections import Counter

import numpy as np
import pytest

from contract.worker_limits import STATE_WINDOW
from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.errors import MigrationRefusedError
from scheduler_svc.core.interface.request import SeqKey
from scheduler_svc.core.invariants import check
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SeqStatus
from tests.unit.scheduler_svc.core.core_driver import (
    ROUTER,
    answer,
    chunks,
    new,
    run_to_disk,
    schedule,
    submit,
)

KEY = SeqKey(0)


def make_host_core(num_blocks=16, **overrides):
    settings = {
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "watermark": 0.0,
        "num_host_blocks": 8,
        "bytes_per_block": 100,
    }
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, **(settings | overrides)))


def running(core, num_prompt_tokens=5, num_outputs=1, n=1):
    """A request with a computed prompt and `num_outputs` sampled tokens; no step is in flight."""
    submit(core, KEY, range(num_prompt_tokens), n=n)
    for _ in range(num_outputs):
        answer(core, schedule(core), *range(n))
    return core


def preempt_last(core):
    """Swap out the running sequence that is the last in order."""
    core.preemption.preempt([*core.running][-1], must_swap=True)


def answer_steps(core, *steps):
    """Answer the steps that a move waits for."""
    while core.steps.last_answered < max(steps):
        answer(core, schedule(core))


def move(giving, taking):
    export = giving.begin_export(ROUTER, KEY)
    check(giving)
    room = taking.begin_import(export.moved)
    check(taking)
    answer_steps(giving, export.ready_step)
    answer_steps(taking, room.ready_step)
    taking.end_import(room.import_id, giving.end_export(export.export_id, leaves=True))
    check(giving)
    check(taking)
    return export, room


def num_held(pool):
    return pool.num_blocks - pool.num_available


def test_running_request_leaves_by_swap_and_computes_nothing_again():
    giving, taking = running(make_host_core(), num_outputs=2), make_host_core()
    export = giving.begin_export(ROUTER, KEY)
    assert export.ready_step == 3, "its swap-out goes with the next plan"
    assert export.moved.host_block_ids == [0, 1]
    assert export.moved.sequences[0].num_computed_tokens == 6
    assert export.moved.request.outputs[0].token_ids.tolist() == [7, 7]
    plan = schedule(giving)
    assert plan.swap_out_src_block_ids.tolist() == [0, 1]
    assert plan.swap_out_dst_block_ids.tolist() == [0, 1]
    assert giving.load().num_waiting == 1
    answer(giving, plan)

    room = taking.begin_import(export.moved)
    assert room.host_block_ids == (0, 1)
    assert room.ready_step == 0, "nothing moves there"
    indices = giving.end_export(export.export_id, leaves=True)
    assert indices == (0,)
    assert (giving.load().num_waiting, num_held(giving.tier.pool), num_held(giving.pool)) == (
        *(0, 0),
        0,
    )
    taking.end_import(room.import_id, indices)
    check(taking)
    assert (taking.load().num_waiting, taking.load().num_swapped) == (1, 1)
    plan = schedule(taking)
    assert plan.swap_in_src_block_ids.tolist() == [0, 1]
    answer(taking, plan)
    plan = schedule(taking)
    assert new(plan) == [(0, 6, [0, 1])]
    assert chunks(plan) == {0: 1}
    assert plan.new_sequences[0].token_ids.tolist() == [0, 1, 2, 3, 4, 7, 7]
    assert plan.new_sequences[0].num_prompt_tokens == 5
    assert plan.new_sequences[0].max_total_tokens == 13
    assert taking.load().num_recomputed_tokens == 0
    events = answer(taking, plan, 0)
    assert events.seq_keys.tolist() == [KEY]
    assert not list(giving.live)


@pytest.mark.parametrize(
    ("kv_windows", "num_blocks"), [((STATE_WINDOW,), 1), ((None, STATE_WINDOW), 3)]
)
def test_with_recurrent_layers_the_last_checkpoint_leaves(kv_windows, num_blocks):
    giving, taking = (make_host_core(32, kv_windows=kv_windows) for _ in range(2))
    running(giving, num_prompt_tokens=9, num_outputs=3)
    export, _ = move(giving, taking)
    assert len(export.moved.host_block_ids) == num_blocks
    assert giving.load().num_recomputed_tokens == 3
    answer(taking, schedule(taking))
    plan = schedule(taking)
    assert plan.new_sequences[0].num_computed_tokens == 8
    assert chunks(plan) == {0: 4}
    assert taking.load().num_recomputed_tokens == 0


def test_a_trace_shows_how_many_tokens_had_states_before_a_preemption():
    core = make_host_core(kv_windows=(STATE_WINDOW,))
    submit(core, KEY, range(9), traceparent="t")
    answer(core, schedule(core), 0)
    core.begin_export(ROUTER, KEY)
    (preempted,) = schedule(core).trace_events
    assert (preempted.num_computed_tokens, preempted.num_swapped_out_blocks) == (9, 1)


@pytest.mark.parametrize("overrides", [{}, {"enable_prefix_caching": False}])
def test_without_a_checkpoint_it_leaves_without_its_states(overrides):
    core = make_host_core(kv_windows=(STATE_WINDOW,), **overrides)
    running(core, num_prompt_tokens=3 if not overrides else 9)
    assert not core.begin_export(ROUTER, KEY).moved.host_block_ids


def test_a_checkpoint_is_no_further_than_what_a_sequence_has_computed():
    core = make_host_core(kv_windows=(STATE_WINDOW,), max_prefill_chunk=4)
    for key in KEY, SeqKey(1):
        submit(core, key, range(12))
    answer(core, schedule(core))
    plan = schedule(core)  # the second ends its prompt, because it found the first's block
    assert chunks(plan) == {0: 4, 1: 4}
    answer(core, plan, 1)
    assert core.begin_export(ROUTER, KEY).moved.sequences[0].num_computed_tokens == 8
    check(core)


def test_tokens_in_flight_are_dropped_and_drawn_again():
    giving, taking = running(make_host_core()), make_host_core()
    in_flight = schedule(giving)
    export = giving.begin_export(ROUTER, KEY)
    events = answer(giving, in_flight, 0)
    assert not len(events.token_ids)
    assert export.ready_step == 3
    room = taking.begin_import(export.moved)
    answer_steps(giving, 3)
    taking.end_import(room.import_id, giving.end_export(export.export_id, leaves=True))
    answer(taking, schedule(taking))
    assert new(schedule(taking)) == [(0, 5, [0, 1])]


def test_waiting_request_moves_without_kv():
    giving, taking = make_host_core(max_num_seqs=1), make_host_core()
    submit(giving, 9, [1] * 5)
    answer(giving, schedule(giving), 0)
    submit(giving, KEY, range(5))
    export, _ = move(giving, taking)
    assert export.moved.host_block_ids == []
    plan = schedule(taking, now=3.5)
    assert new(plan) == [(0, 0, [0, 1])]
    (admitted,) = answer(taking, plan, 0).admitted
    assert admitted.queue_s == 3.5, "counted from when it came to the other core"


def test_all_outputs_of_a_request_move_together():
    giving, taking = running(make_host_core(), n=2, num_outputs=2), make_host_core()
    export, room = move(giving, taking)
    assert [seq.output_index for seq in export.moved.sequences] == [0, 1]
    assert room.host_block_ids == (0, 1, 2, 3)
    assert taking.load().num_swapped == 2
    answer(taking, schedule(taking))
    plan = schedule(taking)
    assert [seq.output_index for seq in plan.new_sequences] == [0, 1]


def test_prompt_that_others_fork_from_must_be_computed_first():
    core = make_host_core(max_num_batched_tokens=8, max_prefill_chunk=4)
    submit(core, KEY, range(10), n=2)
    answer(core, schedule(core))
    with pytest.raises(MigrationRefusedError, match="its prompt is not computed"):
        core.begin_export(ROUTER, KEY)
    check(core)
    assert chunks(schedule(core)) == {0: 4}, "nothing has changed"


def test_prefill_that_moves_goes_on_where_it_was():
    giving, taking = make_host_core(max_prefill_chunk=4), make_host_core()
    submit(giving, KEY, range(10))
    answer(giving, schedule(giving))
    move(giving, taking)
    assert not answer(taking, schedule(taking)).admitted, "its source has heard of that"
    plan = schedule(taking)
    assert [n[1] for n in new(plan)] == [4]
    assert chunks(plan) == {0: 6}


def test_move_that_fails_lets_it_go_on_where_it_was():
    giving, taking = running(make_host_core()), make_host_core()
    export = giving.begin_export(ROUTER, KEY)
    room = taking.begin_import(export.moved)
    answer(giving, schedule(giving))
    assert giving.end_export(export.export_id, leaves=False) == (0,)
    taking.end_import(room.import_id, ())
    check(giving)
    check(taking)
    assert num_held(taking.tier.pool) == 0
    answer(giving, schedule(giving))
    assert new(schedule(giving)) == [(0, 5, [0, 1])]
    assert giving.load().num_recomputed_tokens == 0


def test_move_that_fails_lets_a_request_without_kv_wait_on():
    core = make_host_core()
    submit(core, KEY, range(5))
    export = core.begin_export(ROUTER, KEY)
    core.end_export(export.export_id, leaves=False)
    check(core)
    assert (core.load().num_waiting, core.load().num_swapped) == (1, 0)
    assert new(schedule(core)) == [(0, 0, [0, 1])]


def test_a_prompt_that_the_other_core_computes_again_is_not_charged_again():
    giving, taking = running(make_host_core(policy="fair")), make_host_core(policy="fair")
    export = giving.begin_export(ROUTER, KEY, keeps_kv=False)
    room = taking.begin_import(export.moved)
    taking.end_import(room.import_id, giving.end_export(export.export_id, leaves=True))
    charged = Counter()
    taking.policy.charge = lambda _, new, out: charged.update({"prompt": new, "output": out})
    answer(taking, schedule(taking), 0)
    assert charged == {"prompt": 0, "output": 1}


def test_several_requests_move_at_a_time():
    giving, taking = make_host_core(), make_host_core()
    for key in range(2):
        submit(giving, key, [key] * 5)
    answer(giving, schedule(giving), 0, 1)
    exports = [giving.begin_export(ROUTER, SeqKey(key)) for key in range(2)]
    rooms = [taking.begin_import(export.moved) for export in exports]
    answer_steps(giving, *(export.ready_step for export in exports))
    for export, room in zip(exports, rooms, strict=True):
        taking.end_import(room.import_id, giving.end_export(export.export_id, leaves=True))
        check(giving)
        check(taking)
    assert giving.load().num_waiting == 0
    assert [seq.token_ids.tolist() for seq in taking.live] == [[key] * 5 + [7] for key in range(2)]


def test_blocks_that_were_loaded_for_a_request_that_leaves_stay_cached():
    tiers = {"num_blocks": 4, "num_host_blocks": 4, "num_disk_blocks": 4}
    core = make_host_core(preemption_mode=PreemptionMode.SWAP, **tiers)
    for key in range(5):
        run_to_disk(core, key)
    submit(core, 10, [1] * 9, max_tokens=1)
    answer(core, schedule(core), loaded_host_block_ids=[3, 0], stored_disk_block_ids=[3, 2])
    (seq,) = core.live
    assert seq.fetched_block_ids == (3, 0)
    export = core.begin_export(ROUTER, SeqKey(10))
    check(core)
    assert num_held(core.tier.pool) == 0
    core.end_export(export.export_id, leaves=True)
    check(core)


def test_without_a_prefix_cache_the_host_blocks_of_a_move_are_free_afterwards():
    giving, taking = (make_host_core(enable_prefix_caching=False) for _ in range(2))
    move(running(giving), taking)
    for _ in range(2):
        answer(taking, schedule(taking))
    for core in (giving, taking):
        assert core.load().num_free_host_blocks == core.load().num_host_blocks


def test_blocks_of_a_request_that_is_cancelled_on_the_way_are_held_until_the_move_ends():
    giving, taking = running(make_host_core()), make_host_core()
    export = giving.begin_export(ROUTER, KEY)
    room = taking.begin_import(export.moved)
    answer(giving, schedule(giving))
    assert len(giving.cancel(ROUTER, [KEY])) == 1
    check(giving)
    assert num_held(giving.tier.pool) == 2, "a step may be reading them"
    assert num_held(taking.tier.pool) == 2, "a step may be writing them"
    indices = giving.end_export(export.export_id, leaves=True)
    assert indices == ()
    taking.end_import(room.import_id, indices)
    check(taking)
    assert num_held(giving.tier.pool) == num_held(taking.tier.pool) == 0
    assert taking.load().num_waiting == 0


def test_one_output_that_is_cancelled_on_the_way_does_not_arrive():
    giving, taking = running(make_host_core(), n=2, num_outputs=2), make_host_core()
    export = giving.begin_export(ROUTER, KEY)
    room = taking.begin_import(export.moved)
    answer_steps(giving, export.ready_step)
    giving.cancel(ROUTER, [KEY])
    indices = giving.end_export(export.export_id, leaves=True)
    assert indices == (1,)
    taking.end_import(room.import_id, indices)
    check(taking)
    assert taking.tier.pool.ref_count(0) == 0, "of output 0"
    (seq,) = taking.live
    assert (seq.output_index, seq.host_block_ids) == (1, (2, 3))


def test_lost_worker_gives_back_what_was_leaving():
    giving = running(make_host_core())
    giving.begin_export(ROUTER, KEY)
    (request,) = giving.drain()
    assert request.outputs[0].token_ids.tolist() == [7]


def test_arrived_blocks_can_be_found_by_others():
    giving, taking = running(make_host_core(), num_prompt_tokens=9), make_host_core()
    move(giving, taking)
    submit(taking, 5, [*range(9), 3])
    assert taking.num_queued_tokens == 1 + 2, "it need not compute two blocks of its prompt"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_host_blocks": 0}, "the target worker has no host tier"),
        ({"num_host_blocks": 1}, "it has 2 host blocks, but the target worker has only 1 free"),
        ({"block_size": 8}, "a block has 4 tokens in 100 bytes, but at the target worker 8 tokens"),
        ({"bytes_per_block": 50}, "at the target worker 4 tokens in 50 bytes"),
        ({"max_model_len": 8}, "together they may be 8"),
    ],
)
def test_core_that_cannot_take_a_request_refuses_it(changes, match):
    export = running(make_host_core()).begin_export(ROUTER, KEY)
    taking = make_host_core(**changes)
    with pytest.raises(MigrationRefusedError, match=match):
        taking.begin_import(export.moved)
    check(taking)
    assert num_held(taking.tier.pool) == 0


def test_core_that_cannot_give_a_request_refuses_by_name():
    with pytest.raises(MigrationRefusedError, match="not live"):
        make_host_core().begin_export(ROUTER, KEY)
    with pytest.raises(MigrationRefusedError, match="no host tier"):
        running(make_host_core(num_host_blocks=0)).begin_export(ROUTER, KEY)
    with pytest.raises(MigrationRefusedError, match="2 device blocks, but its worker has only 1"):
        running(make_host_core(num_host_blocks=1)).begin_export(ROUTER, KEY)
    core = running(make_host_core(num_host_blocks=2))
    core.begin_export(ROUTER, KEY)  # its two blocks just fit
    with pytest.raises(MigrationRefusedError, match="being moved already"):
        core.begin_export(ROUTER, KEY)


def test_a_request_does_not_move_while_one_of_its_outputs_is_on_the_disk():
    core = make_host_core(num_disk_blocks=4, preemption_mode=PreemptionMode.SWAP)
    export = running(core, n=2).begin_export(ROUTER, KEY)
    answer(core, schedule(core))
    core.end_export(export.export_id, leaves=False)
    assert core.host_room.make_for_swap(6, 6)
    assert [len(seq.disk_block_ids) for seq in core.live] == [0, 1]
    with pytest.raises(MigrationRefusedError, match="some of its KV is on its worker's disk"):
        core.begin_export(ROUTER, KEY)


def test_a_request_decodes_while_one_of_its_outputs_waits():
    core = make_host_core(max_num_seqs=1)
    submit(core, KEY, range(5), n=2)
    answer(core, schedule(core), 0)
    assert [seq.status for seq in core.live] == [SeqStatus.DECODE, SeqStatus.WAITING]
    assert core.moves.progress(ROUTER, KEY).decodes


def test_room_is_not_used_before_what_is_under_way_there_has_ended():
    """A step in flight may still write host blocks that are cached."""
    taking = make_host_core(num_blocks=4, num_host_blocks=2)
    for key, token in ((1, 1), (2, 2)):  # the second evicts the first's blocks to the host
        submit(taking, key, [token] * 12, max_tokens=1)
        plan = schedule(taking)
        if key == 1:
            answer(taking, plan, 0)
    assert plan.swap_out_dst_block_ids.tolist() == [0, 1]
    export = running(make_host_core()).begin_export(ROUTER, KEY)
    room = taking.begin_import(export.moved)
    assert set(room.host_block_ids) == {0, 1}
    assert room.ready_step == plan.step_id


class TestFindingWhatToMove:
    def test_by_name(self):
        core = running(make_host_core(), num_outputs=2)
        (live,) = core.moves.find_requests("request-0")
        assert (live.source, live.first_seq_key, live.num_seqs) == (ROUTER, KEY, 1)
        assert (live.num_host_blocks, live.max_device_blocks) == (0, 4)
        assert core.moves.find_requests("request-1") == []

    def test_first_that_waits_with_its_kv(self):
        core = make_host_core(num_blocks=4, preemption_mode=PreemptionMode.SWAP)
        for key in (0, 1):
            submit(core, key, [key] * 7)
        answer(core, schedule(core), 0, 1)
        assert core.moves.first_swapped() is None
        answer(core, schedule(core), 0, 1)
        schedule(core)  # both need a block and none is free: the second gives its own up
        live = core.moves.first_swapped()
        assert live is not None
        assert (live.first_seq_key, live.num_host_blocks) == (1, 2)
        core.begin_export(live.source, live.first_seq_key)
        assert core.moves.first_swapped() is None

    def test_the_first_in_the_order_of_the_policy(self):
        core = make_host_core(policy="priority")
        for priority in range(2):
            submit(core, priority, [priority] * 5, priority=priority)
        answer(core, schedule(core), 0, 1)
        for _ in range(2):
            preempt_last(core)
        assert core.moves.first_swapped().first_seq_key == 1

    def test_a_request_that_waits_without_kv_is_not_swapped(self):
        core = make_host_core(max_num_seqs=1)
        for key in (0, 1):
            submit(core, key, range(5))
        answer(core, schedule(core), 0)
        assert core.load().num_waiting == 1
        assert core.moves.first_swapped() is None

    def test_a_request_of_which_an_output_runs_does_not_wait(self):
        core = running(make_host_core(), n=2)
        preempt_last(core)
        assert core.load().num_swapped == 1
        assert core.moves.first_swapped() is None


def test_number_of_cached_tokens_is_kept():
    giving, taking = make_host_core(), make_host_core()
    submit(giving, 1, range(9), max_tokens=1)
    answer(giving, schedule(giving), 0)
    submit(giving, KEY, range(9))
    answer(giving, schedule(giving), 0)
    move(giving, taking)
    (seq,) = taking.live
    assert seq.num_cached_tokens == 8
    assert seq.status is SeqStatus.SWAPPED
    assert np.array_equal(seq.token_ids, [*range(9), 7])
