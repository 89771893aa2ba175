"""Requests move from prefill workers to decode workers; without a decode worker they stay."""

import asyncio
import contextlib
from dataclasses import replace
from itertools import islice

import pytest
from fake_sessions import CONFIG, FakeRoster, FakeSession, finish, prompts_with_long_outputs
from prometheus_client import CollectorRegistry

from contract.errors import UnavailableError
from contract.info import Role
from contract.worker_limits import STATE_WINDOW
from scheduler_svc.core.interface.request import SourceId
from scheduler_svc.observers.metrics import SchedulerMetrics
from scheduler_svc.operations.migration import Migrator
from scheduler_svc.operations.prefill_handoff import Handoff

PROMPT, OTHER = islice(prompts_with_long_outputs(), 2)
MAX_TOKENS = 18


@pytest.fixture
def p():
    return FakeSession(role=Role.PREFILL)


@pytest.fixture
def d():
    return FakeSession(role=Role.DECODE)


@contextlib.asynccontextmanager
async def handing_off(**sessions):
    """Run a hand-off over sessions, whose `oracle` is shared from here on."""
    roster = FakeRoster(**sessions)
    handoff = Handoff(roster, Migrator(roster, SchedulerMetrics(CollectorRegistry()).migrations))
    task = asyncio.create_task(handoff.run())
    try:
        yield handoff
    finally:
        task.cancel()
        handoff.stop()
        await asyncio.gather(task, *handoff._tasks._tasks, return_exceptions=True)


async def until(condition):
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


async def test_a_request_moves_after_its_first_token(p, d):
    async with handing_off(p=p, d=d):
        p.submit(0, PROMPT, MAX_TOKENS)
        await until(lambda: list(d.core.live))
        (seq,) = d.core.live
        assert len(seq.token_ids) > len(PROMPT), "its first token does not wait for the move"
        assert not list(p.core.live)
    finish(p, d)
    assert d.load().num_recomputed_tokens <= 3 * CONFIG.block_size


async def test_all_outputs_move_together_after_their_prompt(p, d):
    async with handing_off(p=p, d=d):
        p.submit(0, PROMPT[:6], n=2)
        await until(lambda: list(d.core.live))
        assert not list(p.core.live)
    finish(p, d)


async def test_a_request_that_ends_with_its_first_token_does_not_move(p, d):
    async with handing_off(p=p, d=d):
        p.submit(0, PROMPT, max_tokens=1)
        await until(lambda: not p.oracle.live)
    assert d.load().num_steps == 0
    finish(p, d)


async def test_without_a_decode_worker_it_decodes_where_it_is(p):
    async with handing_off(p=p):
        p.submit(0, PROMPT, MAX_TOKENS)
        await until(lambda: not p.oracle.live)
        assert p.paces_prompts
    finish(p)


async def test_requests_with_recurrent_states_stay_where_they_are():
    """Only checkpoints move, and the other worker would compute up to a block again."""
    config = replace(CONFIG, kv_windows=(None, STATE_WINDOW), num_blocks=2 * CONFIG.num_blocks + 1)
    p, d = FakeSession(config, role=Role.PREFILL), FakeSession(config, role=Role.DECODE)
    async with handing_off(p=p, d=d):
        p.submit(0, PROMPT, MAX_TOKENS)
        await asyncio.sleep(0)
        while p.oracle.live:
            p.step()
            d.step()
            await asyncio.sleep(0)
        assert p.paces_prompts, "it decodes, too"
    assert d.load().num_steps == 0


async def test_prompts_need_not_be_paced_where_decodes_move_away(p, d):
    async with handing_off(p=p, d=d):
        await until(lambda: not p.paces_prompts)
    assert d.paces_prompts


async def test_it_decodes_where_it_is_until_the_other_has_room(p, d):
    async with handing_off(p=p, d=d):
        d.submit(9, OTHER, MAX_TOKENS)
        while d.core.pool.num_available > 4:
            d.step()
        p.submit(0, PROMPT, MAX_TOKENS)
        await until(lambda: p.core.running.num_decoding)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (len(list(p.core.live)), len(list(d.core.live))) == (1, 1)
        p.oracle.cancel((0, 9), d.core.cancel(SourceId(0), [9]))
        d.step()
        await until(lambda: list(d.core.live))
    finish(p, d)


async def test_two_workers_rest_after_a_failure_between_them(p, d):
    d.pull_error = UnavailableError("cannot read")
    async with handing_off(p=p, d=d) as handoff:
        p.submit(0, PROMPT, MAX_TOKENS)
        await until(lambda: handoff._paused_until)
        d.pull_error = None
        await until(lambda: not p.oracle.live)
        assert not list(d.core.live), "it went on where it was"
    finish(p, d)


async def test_a_worker_that_came_back_does_not_rest(p, d):
    d.pull_error = UnavailableError("cannot read")
    came_back = FakeSession(role=Role.DECODE)
    async with handing_off(p=p, d=d) as handoff:
        came_back.oracle, came_back.others = p.oracle, p.others
        p.submit(0, PROMPT, MAX_TOKENS)
        await until(lambda: handoff._paused_until)
        handoff._roster.engine("d").session = came_back
        await until(lambda: list(came_back.core.live))
    finish(p, came_back)


@pytest.mark.parametrize("lost", ["p", "d"])
async def test_nothing_is_lost_with_either_worker_during_the_move(p, d, lost):
    sessions = {"p": p, "d": d}
    d.may_pull.clear()
    async with handing_off(**sessions) as handoff:
        p.submit(0, PROMPT, MAX_TOKENS)
        await asyncio.wait_for(d.pulling.wait(), 10)
        sessions[lost].is_lost = True
        if lost == "p":
            (request,) = p.core.drain()
            d.core.submit(request, 0.0)  # like the fleet
        d.may_pull.set()
        await asyncio.gather(*handoff._tasks._tasks, return_exceptions=True)
    finish(d if lost == "p" else p)


async def test_cancel_during_the_move_ends_it_everywhere(p, d):
    d.may_pull.clear()
    async with handing_off(p=p, d=d) as handoff:
        p.submit(0, PROMPT, MAX_TOKENS)
        await asyncio.wait_for(d.pulling.wait(), 10)
        p.oracle.cancel((0, 0), p.core.cancel(SourceId(0), [0]))
        d.may_pull.set()
        await asyncio.gather(*handoff._tasks._tasks)
    finish(p, d)


async def test_worker_without_host_memory_takes_nothing(p):
    d = FakeSession(replace(CONFIG, num_host_blocks=0), role=Role.DECODE)
    async with handing_off(p=p, d=d):
        p.submit(0, PROMPT, MAX_TOKENS)
        await until(lambda: not p.oracle.live)
    finish(p)
