"""Blocks that one core copies from another, before the requests that need them move."""

from scheduler_svc.core.interface.request import BeamParams, SeqKey
from scheduler_svc.core.invariants import check
from scheduler_svc.core.sequence import SeqStatus
from tests.unit.scheduler_svc.core.core_driver import ROUTER, answer, new, schedule, submit
from tests.unit.scheduler_svc.core.test_moves import make_host_core, num_held, preempt_last, running

KEY = SeqKey(0)


def hashes_of(core, key=KEY):
    return core.moves.progress(ROUTER, key).hashes


def copied(giving, taking):
    """Copy all full blocks of the request that runs."""
    loan = giving.lend(taking.copies.missing(hashes_of(giving)))
    room = taking.expect(loan.hashes)
    check(giving)
    check(taking)
    while giving.steps.last_answered < loan.ready_step:
        answer(giving, schedule(giving), 0)
    giving.end_loan(loan.loan_id)
    return loan, room


def test_blocks_are_copied_while_the_prompt_is_computed():
    giving, taking = make_host_core(max_prefill_chunk=4), make_host_core()
    submit(giving, KEY, range(10))
    answer(giving, schedule(giving))
    assert len(hashes_of(giving)) == 1
    loan, room = copied(giving, taking)
    assert (loan.host_block_ids, loan.ready_step) == ((0,), 2)
    assert (room.host_block_ids, room.ready_step) == ((0,), 0)
    assert room.hashes == loan.hashes
    assert len(hashes_of(giving)) == 2
    again = taking.expect(hashes_of(giving)[1:])
    assert giving.lend(again.hashes).host_block_ids == (1,)


def test_a_request_goes_on_with_copied_blocks_and_computes_only_its_last_one():
    giving, taking = running(make_host_core(), num_prompt_tokens=10, num_outputs=2), None
    taking = make_host_core()
    loan, room = copied(giving, taking)
    taking.receive(room.room_id, len(loan.hashes))
    export = giving.begin_export(ROUTER, KEY, keeps_kv=False)
    assert export.moved.host_block_ids == []
    assert giving.load().num_preemptions == 0, "it leaves"
    entry = taking.begin_import(export.moved)
    taking.end_import(entry.import_id, giving.end_export(export.export_id, leaves=True))
    check(giving)
    check(taking)
    assert taking.num_queued_tokens == len(export.moved.request.outputs[0].token_ids) + 2
    answer(taking, schedule(taking))
    plan = schedule(taking)
    assert [each[1] for each in new(plan)] == [8], "two blocks came with it"


def test_blocks_cannot_be_found_before_they_have_arrived():
    giving, taking = running(make_host_core(), num_prompt_tokens=9), make_host_core()
    _, room = copied(giving, taking)
    assert taking.lookup.num_cached_blocks(room.hashes) == 0
    taking.receive(room.room_id, 1)
    check(taking)
    assert taking.lookup.num_cached_blocks(room.hashes) == 1
    assert num_held(taking.tier.pool) == 0


def test_blocks_that_are_there_are_not_copied():
    giving, taking = running(make_host_core(), num_prompt_tokens=9), make_host_core()
    submit(taking, 3, range(9), max_tokens=1)
    answer(taking, schedule(taking), 0)
    assert taking.copies.missing(hashes_of(giving)) == []


def test_half_of_the_host_is_left_to_others():
    giving, taking = running(make_host_core(), num_prompt_tokens=17), make_host_core()
    hashes = hashes_of(giving)
    first = taking.expect(hashes[:2])
    room = taking.expect(hashes[2:])
    assert (len(first.hashes), len(room.hashes)) == (2, 2)
    assert taking.copies.num_expectable == 2
    assert len(taking.expect([b"x" * 32] * 3).hashes) == 2


def test_nothing_goes_to_the_host_while_swap_ins_wait():
    """No step does both, and copies must not delay sequences."""
    core = running(make_host_core(max_swap_blocks=1), num_prompt_tokens=9)
    hashes = hashes_of(core)
    export = core.begin_export(ROUTER, KEY)
    answer(core, schedule(core))
    core.end_export(export.export_id, leaves=False)
    core.pool.forget(core.pool.find(hashes))
    submit(core, 5, [9] * 9)
    plan = schedule(core)
    assert plan.swap_in_src_block_ids.size == 1, "two more wait"
    assert len(hashes_of(core, SeqKey(5))) == 2
    assert not core.lend(hashes_of(core, SeqKey(5))).hashes
    assert len(core.lend(hashes[:2]).hashes) == 2, "these are on the host"


def test_blocks_can_be_evicted_again_when_each_of_their_copies_has_ended():
    core = running(make_host_core(), num_prompt_tokens=9)
    loans = [core.lend(hashes_of(core)) for _ in range(2)]
    rooms = [core.expect([name * 32]) for name in (b"x", b"y")]
    answer(core, schedule(core), 0)
    assert num_held(core.tier.pool) == 2 + 2
    for loan, room in zip(loans, rooms, strict=True):
        core.end_loan(loan.loan_id)
        core.receive(room.room_id, 0)
        check(core)
    assert num_held(core.tier.pool) == 0


def test_no_more_blocks_go_to_the_host_than_a_step_swaps():
    core = running(make_host_core(max_swap_blocks=3), num_prompt_tokens=17)
    assert core.lend(hashes_of(core)).host_block_ids == (0, 1, 2)


def test_lost_blocks_end_a_loan_early():
    core = running(make_host_core(), num_prompt_tokens=9)
    hashes = hashes_of(core)
    loan = core.lend([hashes[0], b"x" * 32, hashes[1]])
    assert loan.hashes == (hashes[0],)


class TestProgress:
    def test_a_request_may_leave_when_it_has_gained_a_token(self):
        core = make_host_core(max_prefill_chunk=4)
        submit(core, KEY, range(6))
        answer(core, schedule(core))
        assert not core.moves.progress(ROUTER, KEY).decodes, "its prompt is not computed"
        plan = schedule(core)
        assert not core.moves.progress(ROUTER, KEY).decodes, "its first token is on its way"
        answer(core, plan, 0)
        assert core.moves.progress(ROUTER, KEY).decodes

    def test_one_whose_last_token_is_on_its_way_stays(self):
        core = make_host_core()
        submit(core, KEY, range(6), max_tokens=2)
        answer(core, schedule(core), 0)
        plan = schedule(core)
        assert not core.moves.progress(ROUTER, KEY).decodes
        answer(core, plan, 0)
        assert core.moves.progress(ROUTER, KEY) is None

    def test_one_that_is_preempted_stays_until_it_runs_again(self):
        core = make_host_core(max_prefill_chunk=4)
        submit(core, KEY, range(10))
        answer(core, schedule(core))
        export = core.begin_export(ROUTER, KEY)
        assert core.moves.progress(ROUTER, KEY) is None, "it is leaving"
        answer(core, schedule(core))
        core.end_export(export.export_id, leaves=False)
        progress = core.moves.progress(ROUTER, KEY)
        assert (progress.can_copy, progress.decodes, progress.hashes) == (False, False, ())

    def test_searches_single_tokens_and_vectors_are_not_followed(self):
        core = make_host_core(num_blocks=32)
        submit(core, KEY, range(6), max_tokens=1)
        submit(core, 1, range(6), beam=BeamParams(2, ()))
        submit(core, 2, range(6), pools=True)
        submit(core, 3, range(6), max_tokens=2)
        schedule(core)
        assert core.load().num_running == 4
        assert core.moves.find_running() == [(ROUTER, 3)]

    def test_one_whose_blocks_do_not_fit_on_the_host_stays(self):
        progress = running(make_host_core(num_host_blocks=1)).moves.progress(ROUTER, KEY)
        assert (progress.can_copy, progress.decodes) == (True, False)

    def test_with_an_output_on_the_host_nothing_is_copied(self):
        core = running(make_host_core(), n=2)
        preempt_last(core)
        assert [seq.status for seq in core.live] == [SeqStatus.DECODE, SeqStatus.SWAPPED]
        assert not core.moves.progress(ROUTER, KEY).can_copy

    def test_without_hashes_nothing_can_be_copied(self):
        core = running(make_host_core(enable_prefix_caching=False))
        progress = core.moves.progress(ROUTER, KEY)
        assert (progress.can_copy, progress.decodes) == (False, True)
