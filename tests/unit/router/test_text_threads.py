"""Threads for text: tenants with API keys take turns, and pending work is bounded."""

import asyncio
import gc
import hashlib
import threading
import weakref

import pytest

from contract.errors import TooBusyError
from router.access.api_keys import ApiKeys, Caller, KeysFile
from router.text.fair_threads import TextThreads

KEYS = ApiKeys(
    file=KeysFile(
        {hashlib.sha256(name.encode()).digest(): Caller(name) for name in ("alice", "bob")}, {}
    )
)


@pytest.fixture
def threads():
    threads = TextThreads("text", num_threads=1, max_pending=6)
    yield threads
    threads.close()


async def run_as(tenant, threads, work):
    KEYS.enter(f"Bearer {tenant}")
    return await threads.run(work)


async def test_tenants_take_turns(threads):
    go_on, done = threading.Event(), []
    calls = [asyncio.create_task(run_as("alice", threads, go_on.wait))]
    for tenant, name in (("alice", "a1"), ("alice", "a2"), ("alice", "a3"), ("bob", "b1")):
        calls.append(
            asyncio.create_task(run_as(tenant, threads, lambda name=name: done.append(name)))
        )
    await asyncio.sleep(0)
    assert threads.num_pending == len(calls)
    go_on.set()
    await asyncio.gather(*calls)
    assert done == ["a1", "b1", "a2", "a3"]


async def test_what_is_cancelled_before_it_runs_never_does(threads):
    go_on, done = threading.Event(), []
    first = asyncio.create_task(threads.run(go_on.wait))
    second = asyncio.create_task(threads.run(lambda: done.append("second")))
    third = asyncio.create_task(threads.run(lambda: done.append("third")))
    await asyncio.sleep(0)
    assert threads.num_pending == 3
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    go_on.set()
    await asyncio.gather(first, third)
    assert done == ["third"]
    assert threads.num_pending == 0


async def test_an_error_is_the_callers_and_too_much_is_refused(threads):
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    go_on = threading.Event()
    calls = [asyncio.create_task(threads.run(go_on.wait)) for _ in range(6)]
    await asyncio.sleep(0)
    assert threads.num_pending == 6
    with pytest.raises(TooBusyError, match="6 text calls are pending, which is the limit"):
        await threads.run(lambda: None)
    go_on.set()
    await asyncio.gather(*calls)


async def test_the_tenant_with_the_most_waiting_tasks_makes_room(threads):
    go_on, done = threading.Event(), []

    def start(tenant, name):
        work = go_on.wait if name == "first" else lambda: done.append(name)
        return asyncio.create_task(run_as(tenant, threads, work))

    names = ["first", "a1", "a2", "a3", "a4", "a5"]
    calls = [start("alice", name) for name in names]
    await asyncio.sleep(0)
    calls[-1].cancel()
    await asyncio.sleep(0)
    calls.append(start("alice", "a6"))  # in the cancelled task's place
    calls += [start("bob", "b1"), start("bob", "b2"), start("bob", "b3")]
    await asyncio.sleep(0)
    assert threads.num_pending == 6
    go_on.set()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert done == ["a1", "b1", "a2", "b2", "a3"]
    assert [str(error) for error in ended if isinstance(error, TooBusyError)] == [
        "6 text calls are pending, which is the limit"
    ] * 3
    assert threads.num_pending == 0


class Large:
    def refuse(self):
        raise ValueError("too large")


async def test_what_refused_work_holds_is_free_at_once(threads):
    large = Large()
    is_alive = weakref.ref(large)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="too large") as caught:
            await threads.run(large.refuse)
        del large, caught
        await threads.run(int)  # the thread holds no reference to the work before
        assert is_alive() is None
    finally:
        gc.enable()
