"""Prefixes that are copied from another worker where that is faster than computing them."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_sessions import CONFIG, FakeRoster, FakeSession

from contract.errors import UnavailableError
from contract.hashing import extend_chain, root_hash
from scheduler_svc.core.invariants import check
from scheduler_svc.workers.kv import prefix_pulls
from scheduler_svc.workers.kv.copy import KvCopy
from scheduler_svc.workers.kv.prefix_pulls import CopyTimes, PrefixPulls

PROMPT = [0, 1, 0, 0, 1, 1, 0, 0, 1]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(prefix_pulls, "LEAST_TOKENS", 2)


@pytest.fixture
def sessions():
    """`a` has the prompt's four full blocks."""
    found = {"a": FakeSession(), "b": FakeSession()}
    FakeRoster(**found)
    found["a"].submit(0, PROMPT, max_tokens=1)
    while found["a"].oracle.live:
        found["a"].step()
    return found


@pytest.fixture
def hashes():
    found = []
    extend_chain(found, root_hash(""), np.array(PROMPT[:-1], np.int32), CONFIG.block_size)
    return found


async def run(pulls, pull):
    """Pull; return after the request may be placed."""
    done = asyncio.Event()
    pulls.start(pull, done.set)
    await asyncio.wait_for(done.wait(), 10)


def num_held(session):
    return CONFIG.num_host_blocks - session.core.tier.pool.num_available


async def test_a_prefix_comes_from_the_worker_that_has_it(sessions, hashes):
    a, b = sessions.values()
    pulls = PrefixPulls()
    pull = pulls.find(hashes, b, sessions)
    assert (pull.source_target, list(pull.hashes)) == ("a", hashes)
    await run(pulls, pull)
    assert b.num_cached_blocks(hashes) == 4
    assert num_held(a) == num_held(b) == 0
    b.submit(5, PROMPT, max_tokens=1)
    while b.oracle.live:
        b.step()
    assert b.core.prefix_cache_hits == 8
    assert pulls.find(hashes, b, sessions) is None, "it is there"


async def test_requests_with_the_same_prefix_wait_for_one_copy(sessions, hashes):
    b = sessions["b"]
    b.may_pull.clear()
    pulls = PrefixPulls()
    placed = [asyncio.Event(), asyncio.Event()]
    for each in placed:
        pulls.start(pulls.find(hashes, b, sessions), each.set)
    await asyncio.wait_for(b.pulling.wait(), 10)
    assert num_held(b) == 4, "its blocks are reserved once"
    b.may_pull.set()
    for each in placed:
        await asyncio.wait_for(each.wait(), 10)
    assert b.num_cached_blocks(hashes) == 4
    assert not pulls._copies


async def test_a_copy_in_several_rounds_reserves_only_what_each_brings(hashes):
    a, b = FakeSession(replace(CONFIG, max_swap_blocks=1)), FakeSession()
    FakeRoster(a=a, b=b)
    a.submit(0, PROMPT, max_tokens=1)
    while a.oracle.live:
        a.step()
    copy, reserved = KvCopy("a", a, b), []
    while await copy.extend(hashes):
        reserved.append((num_held(b), copy.num_reserved))
    assert reserved == [(1, 1), (2, 2), (3, 3), (4, 4)]
    copy.give_up()
    assert num_held(b) == 0


def test_only_what_pays_is_pulled(sessions, hashes):
    a, b = sessions.values()
    pulls = PrefixPulls()
    assert pulls.find(hashes, a, sessions) is None, "no other one has more"
    assert pulls.find([], b, sessions) is None
    b.info.prefill_tokens_per_s = 1e12
    assert pulls.find(hashes, b, sessions) is None, "computing is faster"
    b.info.prefill_tokens_per_s = 0.0
    assert pulls.find(hashes, b, sessions) is None, "its rate is unknown"
    b.info.prefill_tokens_per_s = 1.0
    a.info.dtype = "bfloat16"
    assert pulls.find(hashes, b, sessions) is None, "another format"


async def test_a_request_does_not_wait_longer_than_computing_takes(sessions, hashes):
    a, b = sessions.values()
    b.info.prefill_tokens_per_s = 100.0
    b.may_pull.clear()
    pulls = PrefixPulls()
    await run(pulls, pulls.find(hashes, b, sessions))
    assert b.num_cached_blocks(hashes) == 0
    b.may_pull.set()
    await asyncio.gather(*pulls._tasks._tasks)
    assert b.num_cached_blocks(hashes) == 4, "it helps the next one"
    check(a.core)
    check(b.core)


async def test_a_copy_that_fails_leaves_nothing_and_makes_the_next_less_likely(sessions, hashes):
    a, b = sessions.values()
    b.pull_error = UnavailableError("cannot read")
    pulls = PrefixPulls()
    pull, expected_s = pulls.find(hashes, b, sessions), pulls._times.seconds(1)
    await run(pulls, pull)
    assert b.num_cached_blocks(hashes) == 0
    assert num_held(a) == num_held(b) == 0
    assert pulls._times.seconds(1) == pytest.approx(prefix_pulls._MAX_JUMP * expected_s)


async def test_a_prefix_that_the_source_cannot_lend_says_nothing_about_the_link(sessions, hashes):
    a, b = sessions.values()
    pulls = PrefixPulls()
    pull = pulls.find(hashes, b, sessions)
    a.core.pool.forget(a.core.pool.find(hashes))
    await run(pulls, pull)
    assert b.num_cached_blocks(hashes) == 0
    assert pulls._times.seconds(1) == CopyTimes().seconds(1)


def test_small_copies_teach_the_fixed_time_and_large_ones_the_rate():
    times = CopyTimes()
    for _ in range(30):
        times.measure(800_000, 0.2 + 800_000 / 1e8)
        times.measure(400_000_000, 0.2 + 400_000_000 / 1e8)
    assert times.seconds(0) == pytest.approx(0.2, rel=0.1)
    assert times.seconds(1e8) - times.seconds(0) == pytest.approx(1, rel=0.1)


def test_a_small_prefix_is_not_copied_again_where_copies_take_longer_than_computing_it():
    """As measured: 0.8 MB took 0.2 s, although 1 GB/s would have taken 1 ms."""
    times = CopyTimes()
    times.measure(800_000, 0.2)
    assert times.seconds(800_000) > 0.05
    for _ in range(7):
        times.measure(800_000, 0.2)
    assert times.seconds(800_000) == pytest.approx(0.2, rel=0.1)
    assert times.seconds(0) == pytest.approx(0.2, rel=0.1), "the link is not slow"
    assert times.seconds(100_000_000) < 1


def test_one_stalled_copy_does_not_end_all_copies():
    times = CopyTimes()
    for _ in range(4):
        times.measure(1000, 0.05)
    times.measure(1000, 60.0)
    assert times.seconds(1000) < 0.15
    times.measure(1000, 0.0)
    assert times.seconds(1000) > 0.05


def test_old_measurements_are_forgotten(monkeypatch):
    times, new = CopyTimes(), CopyTimes()
    times.measure(1000, 0.2)
    assert times.seconds(1000) > new.seconds(1000)
    monkeypatch.setattr(prefix_pulls, "_FORGET_S", -1.0)
    assert times.seconds(1000) == new.seconds(1000)


async def test_a_copy_that_took_long_is_counted_with_its_time(sessions, hashes, monkeypatch):
    b = sessions["b"]
    clock = iter([0.0, 0.2])
    monkeypatch.setattr(prefix_pulls.CopyTimes, "measure", lambda _, *seen: measured.append(seen))
    measured = []
    pulls = PrefixPulls()
    pull = pulls.find(hashes, b, sessions)
    monkeypatch.setattr(prefix_pulls, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    await run(pulls, pull)
    assert measured == [(8.0, 0.2)]


async def test_a_worker_that_is_lost_leaves_the_request_to_the_others(sessions, hashes):
    a, b = sessions.values()
    b.may_pull.clear()
    pulls = PrefixPulls()
    pull = pulls.find(hashes, b, sessions)
    done = asyncio.Event()
    pulls.start(pull, done.set)
    await asyncio.wait_for(b.pulling.wait(), 10)
    a.is_lost = True
    b.may_pull.set()
    await asyncio.wait_for(done.wait(), 10)
    assert num_held(b) == 0
