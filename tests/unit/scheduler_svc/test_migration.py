"""Moves between two sessions, whose workers succeed or fail as a test says."""

import asyncio
from itertools import islice

import pytest
from fake_sessions import FakeRoster, FakeSession, finish, prompts_with_long_outputs
from prometheus_client import CollectorRegistry

from contract.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.request import SourceId
from scheduler_svc.observers.metrics import SchedulerMetrics
from scheduler_svc.operations.migration import Migrator


@pytest.fixture
def a():
    session = FakeSession()
    session.submit(0, [0, 1, 0, 0, 1])
    return session


@pytest.fixture
def b():
    return FakeSession()


@pytest.fixture
def roster(a, b):
    live = a.oracle.live
    roster = FakeRoster(a=a, b=b)
    roster.oracle.live = live
    a.step()
    return roster


@pytest.fixture
def migrations():
    return SchedulerMetrics(CollectorRegistry()).migrations


@pytest.fixture
def migrator(roster, migrations):
    return Migrator(roster, migrations)


async def test_request_moves_and_its_output_stays_the_same(migrator, a, b, migrations):
    (request,) = a.core.drain()
    a.crashes.set(request, 2)
    moved = await migrator.migrate("r0", "b")
    assert (moved.from_worker, moved.num_seqs, moved.num_blocks) == ("a", 1, 3)
    assert not list(a.core.live)
    assert len(list(b.core.live)) == 1
    assert b.crashes.take(request) == 2
    assert migrations.labels("a", "b", "arrived")._value.get() == 1
    finish(a, b)
    assert b.core.load().num_recomputed_tokens == 0


async def test_pull_that_fails_leaves_it_where_it_was(migrator, a, b, migrations):
    b.pull_error = UnavailableError("cannot read")
    with pytest.raises(UnavailableError, match="cannot read"):
        await migrator.migrate("r0", "b")
    assert len(list(a.core.live)) == 1
    assert not list(b.core.live)
    assert migrations.labels("a", "b", "failed")._value.get() == 1
    finish(a, b)
    assert a.core.load().num_recomputed_tokens == 0


async def test_cancel_during_the_pull_ends_it_everywhere(migrator, a, b, roster):
    b.may_pull.clear()
    moving = asyncio.create_task(migrator.migrate("r0", "b"))
    await b.pulling.wait()
    roster.oracle.cancel((0, 0), a.core.cancel(SourceId(0), [0]))
    b.may_pull.set()
    assert (await moving).num_seqs == 0
    finish(a, b)


async def test_source_that_is_lost_during_the_pull_gives_its_requests_back(migrator, a, b):
    b.may_pull.clear()
    moving = asyncio.create_task(migrator.migrate("r0", "b"))
    await b.pulling.wait()
    a.is_lost = True
    (request,) = a.core.drain()
    b.core.submit(request, 0.0)  # like the fleet
    b.may_pull.set()
    with pytest.raises(UnavailableError, match="lost"):
        await moving
    assert len(list(b.core.live)) == 1
    finish(b)


async def test_target_that_is_lost_during_the_pull_changes_nothing(migrator, a, b):
    b.may_pull.clear()
    moving = asyncio.create_task(migrator.migrate("r0", "b"))
    await b.pulling.wait()
    b.is_lost = True
    b.may_pull.set()
    with pytest.raises(UnavailableError, match="lost"):
        await moving
    finish(a)


async def test_caller_that_goes_away_does_not_stop_the_move(migrator, a, b):
    b.may_pull.clear()
    moving = asyncio.create_task(migrator.migrate("r0", "b"))
    await b.pulling.wait()
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving
    b.may_pull.set()
    await asyncio.gather(*migrator._moves._tasks)
    assert not list(a.core.live)
    finish(a, b)


async def test_it_may_be_there_already(migrator):
    moved = await migrator.migrate("r0", "a")
    assert (moved.was_there, moved.num_blocks) == (True, 0)


async def test_refusals(migrator, roster, b, migrations):
    with pytest.raises(NotFoundError, match="'other' is not live"):
        await migrator.migrate("other", "b")
    with pytest.raises(NotFoundError):
        await migrator.migrate("r0", "c")
    b.info.dtype = "bfloat16"
    with pytest.raises(FailedPreconditionError, match="float32 here and bfloat16"):
        await migrator.migrate("r0", "b")
    roster.engines[1].session = None
    with pytest.raises(UnavailableError, match="b is not attached: not there"):
        await migrator.migrate("r0", "b")
    roster.engines[1].session = FakeSession(SchedulerConfig(16, 2, 4, 16, 32))
    with pytest.raises(FailedPreconditionError, match="'r0' cannot be moved: the target worker"):
        await migrator.migrate("r0", "b")
    assert migrations.labels("a", "b", "failed")._value.get() == 3


@pytest.mark.parametrize(("which", "verb"), [(0, "give"), (1, "take")])
async def test_worker_that_takes_no_kv_is_refused_before_anything_moves(
    migrator, a, b, which, verb
):
    info = (a, b)[which].info
    info.takes_kv = False
    with pytest.raises(FailedPreconditionError, match=f"{info.worker_id} cannot {verb} KV"):
        await migrator.migrate("r0", "b")
    assert not b.pulling.is_set()
    finish(a, b)


async def test_name_of_two_requests_is_refused(migrator, b):
    b.submit(5, [1])
    next(iter(b.core.live)).request = next(iter(b.others["a"].core.live)).request
    with pytest.raises(InvalidArgumentError, match="which 2 live requests have"):
        await migrator.migrate("r0", "b")


class TestImbalance:
    @pytest.fixture
    def a(self):
        """A worker with two sequences; one of them waits with its KV."""
        session = FakeSession()
        for key, prompt in enumerate(islice(prompts_with_long_outputs(), 2)):
            session.submit(key, prompt, max_tokens=18)
        session.step()
        return session

    def swap_one(self, a):
        while not a.load().num_swapped:
            assert a.oracle.live, "no request had to wait"
            a.step()

    async def test_a_waiting_request_moves_to_a_worker_with_room(self, migrator, a, b):
        self.swap_one(a)
        live, source, target = migrator._find_imbalance()
        assert (source.session, target.session) == (a, b)
        assert live.first_seq_key == a.core.moves.first_swapped().first_seq_key
        await migrator.move(live, source, target)
        finish(a, b)

    @pytest.mark.parametrize("which", [0, 1])
    async def test_worker_that_takes_no_kv_is_left_out(self, migrator, a, b, which):
        self.swap_one(a)
        (a, b)[which].info.takes_kv = False
        assert migrator._find_imbalance() is None

    async def test_nobody_waits(self, migrator):
        assert migrator._find_imbalance() is None

    async def test_no_room_to_its_end(self, migrator, a, b):
        self.swap_one(a)
        b.submit(7, [1, 1, 1], max_tokens=1)
        assert migrator._find_imbalance() is None, "a request waits there"
        b.core.schedule(0.0)
        assert migrator._find_imbalance() is None, "all of its blocks would be needed"
