"""Prefixes that services share through the far tier."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from fake_sessions import CONFIG, FakeRoster, FakeSession

from contract.errors import UnavailableError
from contract.hashing import extend_chain, root_hash
from scheduler_svc.core.interface.events import Admitted
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.invariants import check
from scheduler_svc.workers.kv import far_tier
from scheduler_svc.workers.kv.far_tier import FarTier

PROMPT = [0, 1, 0, 0, 1, 1, 0, 0, 1]
REQUEST = Request(SourceId(0), SeqKey(0), "r0", np.array(PROMPT, np.int32), 1, 1, b"")
"""The request that `submit(0, PROMPT)` makes."""
ADMITTED = Admitted(SourceId(0), SeqKey(0), 0, 0.0)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(far_tier, "LEAST_TOKENS", 2)


@pytest.fixture
def sessions():
    """Two services' workers with one store; `a` has the prompt's four full blocks."""
    a, b = FakeSession(), FakeSession()
    FakeRoster(a=a, b=b)
    b.far = a.far
    a.submit(0, PROMPT, max_tokens=1)
    return a, b


@pytest.fixture
def hashes():
    found = []
    extend_chain(found, root_hash(""), np.array(PROMPT[:-1], np.int32), CONFIG.block_size)
    return found


async def store(far, session):
    far.store_later(REQUEST)
    far.on_admitted(session, ADMITTED)
    await asyncio.wait_for(asyncio.gather(*far._tasks._tasks), 30)


async def fetch(far, found):
    """Fetch; return after the request may be placed."""
    done = asyncio.Event()
    far.start(found, done.set)
    await asyncio.wait_for(done.wait(), 30)


def num_held(session):
    return CONFIG.num_host_blocks - session.core.tier.pool.num_available


async def test_another_service_computes_from_what_this_one_has_stored(sessions, hashes):
    a, b = sessions
    await store(FarTier(), a)  # waits until the prompt is computed
    assert list(a.far) == hashes
    far = FarTier()
    await fetch(far, far.find(hashes, b))
    assert b.num_cached_blocks(hashes) == 4
    assert num_held(a) == num_held(b) == 0
    b.submit(5, PROMPT, max_tokens=1)
    while b.oracle.live:
        b.step()
    assert b.core.prefix_cache_hits == 8
    assert far.find(hashes, b) is None, "it is there"


async def test_blocks_are_stored_once(sessions):
    a, _ = sessions
    far = FarTier()
    await store(far, a)
    a.far.clear()
    await store(far, a)
    assert not a.far


async def test_what_the_store_lacks_ends_a_fetch_and_is_stored_again(sessions, hashes):
    a, b = sessions
    far = FarTier()
    await store(far, a)
    del a.far[hashes[2]]
    await fetch(far, far.find(hashes, b))
    assert b.num_cached_blocks(hashes) == 2
    assert num_held(b) == 0
    await store(far, a)
    assert set(a.far) == set(hashes)
    check(b.core)


def test_only_what_pays_is_looked_for(sessions, hashes):
    _, b = sessions
    far = FarTier()
    assert far.find([], b) is None
    b.info.prefill_tokens_per_s = 1e12
    assert far.find(hashes, b) is None, "computing is faster"
    b.info.prefill_tokens_per_s = 0.0
    assert far.find(hashes, b) is None, "its rate is unknown"
    b.info.prefill_tokens_per_s = 1.0
    b.info.has_far_kv = False
    assert far.find(hashes, b) is None


async def test_a_request_does_not_wait_longer_than_computing_takes(sessions, hashes):
    a, b = sessions
    far = FarTier()
    await store(far, a)
    b.info.prefill_tokens_per_s = 100.0
    b.may_pull.clear()
    await fetch(far, far.find(hashes, b))
    assert b.num_cached_blocks(hashes) == 0
    b.may_pull.set()
    await asyncio.gather(*far._tasks._tasks)
    assert b.num_cached_blocks(hashes) == 4, "it helps the next one"


async def test_failures_leave_nothing_held(sessions, hashes):
    a, b = sessions
    a.far_error = b.far_error = UnavailableError("out of order")
    far = FarTier()
    await store(far, a)
    await fetch(far, far.find(hashes, b))
    assert b.num_cached_blocks(hashes) == 0
    assert num_held(a) == num_held(b) == 0
    assert far._num_storing == 0
    check(a.core)
    check(b.core)


async def test_a_worker_that_is_lost_ends_its_fetch(sessions, hashes):
    _, b = sessions
    b.may_pull.clear()
    far = FarTier()
    done = asyncio.Event()
    far.start(far.find(hashes, b), done.set)
    await asyncio.wait_for(b.pulling.wait(), 30)
    b.is_lost = True
    b.may_pull.set()
    await asyncio.wait_for(done.wait(), 30)


async def test_a_prompt_that_is_never_computed_is_not_waited_for_for_ever(sessions, monkeypatch):
    monkeypatch.setattr(far_tier, "_COMPUTED_S", 0.0)
    a, _ = sessions
    a.is_read = True  # it does not step
    far = FarTier()
    await store(far, a)
    assert far._num_storing == 0
    assert not a.far


async def test_cancelled_prompt_is_not_waited_for(sessions):
    a, _ = sessions
    a.is_read = True  # it does not step
    far = FarTier()
    far.store_later(REQUEST)
    far.on_admitted(a, ADMITTED)
    await asyncio.sleep(0)
    assert far._num_storing == 1
    a.core.cancel(SourceId(0), [0])
    await asyncio.wait_for(asyncio.gather(*far._tasks._tasks), 30)
    assert far._num_storing == 0


@pytest.mark.parametrize(("num_refused", "num_stored"), [(3, 4), (1000, 0)])
async def test_core_that_lends_nothing_now_is_asked_again(sessions, num_refused, num_stored):
    a, _ = sessions
    lend, asked = a.core.lend, []

    def lend_late(wanted):
        asked.append(wanted)
        return lend(wanted if len(asked) > num_refused else ())

    a.core.lend = lend_late
    far = FarTier()
    await store(far, a)
    assert len(a.far) == num_stored
    assert len(asked) <= far_tier._MAX_LENDING_TRIES
    assert (far._num_storing, num_held(a)) == (0, 0)


async def test_fetch_holds_one_block_until_the_store_has_shown_that_it_has_the_prompt(
    sessions, hashes
):
    _, b = sessions
    b.may_pull.clear()
    far = FarTier()
    far.start(far.find(hashes, b), lambda: None)
    await asyncio.wait_for(b.pulling.wait(), 30)
    assert num_held(b) == 1
    b.may_pull.set()
    await asyncio.gather(*far._tasks._tasks)
    assert num_held(b) == 0


async def test_prefix_comes_in_pieces_and_for_a_bounded_time(sessions, hashes, monkeypatch):
    monkeypatch.setattr(far_tier, "_FETCH_BLOCKS", 2)
    a, b = sessions
    far = FarTier()
    await store(far, a)
    fetch_kv, asked = b.fetch_kv, []

    async def watched(labels, host_block_ids):
        asked.append((len(labels), num_held(b)))
        return await fetch_kv(labels, host_block_ids)

    b.fetch_kv = watched
    found = far.find(hashes, b)
    with monkeypatch.context() as patch:
        patch.setattr(far_tier, "_FETCH_S", 0.0)
        await fetch(far, found)
    assert not asked
    await fetch(far, found)
    assert asked == [(1, 1), (2, 2), (1, 1)]
    assert b.num_cached_blocks(hashes) == 4
    check(b.core)


async def test_number_of_fetches_is_bounded_for_each_worker(sessions, hashes, monkeypatch):
    monkeypatch.setattr(far_tier, "_MAX_FETCHES", 1)
    a, b = sessions
    a.core, others = FakeSession().core, hashes[::-1]
    b.may_pull.clear()
    far = FarTier()
    far.start(far.find(hashes, b), lambda: None)
    assert far.find(others, b) is None
    assert far.find(others, a) is not None, "another worker"
    assert far.find(hashes, b) is not None, "waits for the same fetch"
    b.may_pull.set()
    await asyncio.gather(*far._tasks._tasks)
    assert far.find(others, b) is not None


async def test_queued_prompts_take_no_place_until_they_are_admitted(sessions, hashes, monkeypatch):
    monkeypatch.setattr(far_tier, "_MAX_STORING", 1)
    a, _ = sessions
    far = FarTier()
    for key in range(1, 4):
        far.store_later(replace(REQUEST, first_seq_key=SeqKey(key)))
    assert far._num_storing == 0
    await store(far, a)
    assert list(a.far) == hashes
    far.on_admitted(a, ADMITTED)
    assert not far._tasks._tasks, "it is stored once"


def test_tokens_of_queued_prompts_are_bounded(monkeypatch):
    monkeypatch.setattr(far_tier, "_MAX_QUEUED_TOKENS", 2 * len(PROMPT))
    far = FarTier()
    for key in (0, 1, 2, 2):
        far.store_later(replace(REQUEST, first_seq_key=SeqKey(key)))
    assert [key for _, key in far._queued] == [1, 2]
    assert far._num_queued_tokens == 2 * len(PROMPT)
