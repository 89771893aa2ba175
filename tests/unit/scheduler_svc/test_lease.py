"""A Lease of Kubernetes as a hint for which scheduler leads, against a fake API server."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from fake_leases import FakeApi
from scheduler_fake_worker import FakeWorker
from scheduler_harness import get, running_scheduler
from structlog.testing import capture_logs

from rpc.peers.discovery import Discovery
from scheduler_svc import lease as leases
from scheduler_svc.app import run_scheduler
from scheduler_svc.lease import Cluster, Lease
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers.standby import wait_for_vacancy

pytestmark = pytest.mark.timeout(60)
FOREVER = 3600.0


@pytest.fixture
async def api(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "_RENEW_S", 0.01)
    monkeypatch.setattr(leases, "_RETRY_S", 0.01)
    monkeypatch.setattr(leases, "_WRITE_S", 30.0)
    monkeypatch.setattr(leases, "_QUIET_S", FOREVER)
    folder = tmp_path / "account"
    folder.mkdir()
    async with FakeApi(folder).running() as running:
        yield running


async def until(condition):
    while not condition():  # noqa: ASYNC110 - several parts change it
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def leading(api, holder):
    async with api.open(holder) as lease:
        keeping = asyncio.create_task(lease.keep())
        await until(lambda: api.holder.startswith(holder))
        yield lease
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def reading(lease):
    await until(lambda: lease._found is not None)


async def test_the_leader_writes_its_name_renews_it_and_gives_it_up(api):
    async with leading(api, "a"):
        spec = api.lease["spec"]
        assert spec["leaseDurationSeconds"] == leases.DURATION_S
        assert spec["leaseTransitions"] == 1
        await until(lambda: api.lease["spec"]["renewTime"] > spec["renewTime"])
        assert api.lease["spec"]["acquireTime"] == spec["acquireTime"]
    assert api.holder == ""
    async with leading(api, "b"):
        assert api.lease["spec"]["leaseTransitions"] == 2


async def test_no_other_one_takes_a_lease_that_is_renewed(api):
    async with leading(api, "a"), api.open("b") as other:
        keeping = asyncio.create_task(other.keep())
        await reading(other)
        version = int(api.lease["metadata"]["resourceVersion"])
        await until(lambda: int(api.lease["metadata"]["resourceVersion"]) > version + 5)
        assert api.holder.startswith("a_")
        assert not other.is_free
        keeping.cancel()


async def test_of_two_that_claim_at_the_same_moment_one_may_take_over(api):
    async with api.open("a") as one, api.open("b") as other:
        await reading(one)
        await reading(other)
        api.writing.clear()
        claims = asyncio.gather(one.claim(), other.claim())
        await asyncio.sleep(0)
        api.writing.set()
        assert sorted(await claims) == [False, True]


async def test_who_has_just_claimed_it_has_a_head_start(api, monkeypatch):
    monkeypatch.setattr(leases, "_HEAD_START_S", FOREVER)
    async with api.open("a") as one, api.open("b") as other:
        await reading(one)
        await reading(other)
        assert await one.claim()
        await until(lambda: other._moved_at > 0)
        assert not await other.claim()
        monkeypatch.setattr(leases, "_HEAD_START_S", 0.0)
        assert await other.claim(), "the first did not take over"
        assert api.holder.startswith("b_")


async def test_it_is_free_when_it_was_given_up_or_is_not_renewed(api, monkeypatch):
    async with api.open("b") as other:
        await reading(other)
        assert not other.is_free, "perhaps no scheduler may write it"
        async with leading(api, "a"):
            await until(lambda: other._found == api.lease)
            assert not other.is_free
        await until(lambda: other.is_free)
        assert await other.claim()
        assert not other.is_free
        monkeypatch.setattr(leases, "DURATION_S", -1)
        assert other.is_free


async def test_a_token_that_is_replaced_is_read_again(api):
    async with leading(api, "a"):
        (api.folder / "token").write_text("second")
        await until(lambda: "Bearer second" in api.tokens)
    assert api.tokens[0] == "Bearer first"


async def test_a_watch_that_ends_begins_again(api):
    async with api.open("b") as other:
        await reading(other)
        await until(lambda: api.num_watches == 1)
        api.end_watches()
        await until(lambda: api.num_watches == 2)
        async with leading(api, "a"):
            await until(lambda: other._found == api.lease)


async def test_watches_that_end_at_once_do_not_follow_each_other_without_a_pause(api, monkeypatch):
    api.ends_watches = True
    with monkeypatch.context() as patch:
        patch.setattr(leases, "_RETRY_S", FOREVER)
        async with api.open("a") as paused:
            await until(lambda: api.num_watches >= 1)
            for _ in range(20):  # time enough for more watches
                await paused._read()
            assert api.num_watches == 1
    async with api.open("b") as other:
        await until(lambda: api.num_watches > 3)
        api.touch()
        await until(lambda: other._found == api.lease)


async def test_a_claim_that_is_too_late_for_its_dead_watch_reads_the_object_again(api, monkeypatch):
    monkeypatch.setattr(leases, "_HEAD_START_S", 0.0)
    async with api.open("b") as other:
        await reading(other)
        await until(lambda: api.num_watches == 1)
        api.are_watches_dead = True
        api.touch()
        assert not await other.claim()
        assert await other.claim(), "it knows the newer version"
        assert api.holder.startswith("b_")


async def test_a_leader_whose_watch_is_dead_gives_the_lease_up(api):
    async with leading(api, "a") as lease:
        await until(lambda: lease._is_mine)
        api.are_watches_dead = True
        api.touch()
    assert api.holder == ""


async def test_a_watch_that_brings_nothing_is_checked(api, monkeypatch):
    monkeypatch.setattr(leases, "_QUIET_S", 0.1)
    async with api.open("b") as other:
        await until(lambda: api.num_watches >= 1)
        api.are_watches_dead = True
        api.touch()
        await until(lambda: other._found == api.lease)
        api.forbidden = {"GET"}
        await until(lambda: other._found is None)
        assert not other.is_free


def warnings(logs):
    return [each["reason"] for each in logs if each["event"] == "the lease is ignored"]


async def is_no_hint(lease, num_attempts=lambda: 0):
    """Checks that a Lease changes nothing, and that one log line says why; returns the line."""
    with capture_logs() as logs:
        async with lease:
            await until(lambda: warnings(logs))
            before = num_attempts()
            await until(lambda: num_attempts() > before + 3 or not before)
            assert not lease.is_free
            assert await lease.claim()
    (reason,) = warnings(logs)
    return reason


async def test_without_the_right_to_read_it_is_ignored(api):
    api.forbidden = {"GET", "PUT"}
    reason = await is_no_hint(api.open("a"), lambda: len(api.tokens))
    assert "HTTP 403" in reason
    assert "may not" in reason


async def test_without_the_right_to_write_a_standby_takes_over_nevertheless(api):
    api.forbidden = {"PUT"}
    with capture_logs() as logs:
        async with api.open("a") as lease:
            await reading(lease)
            keeping = asyncio.create_task(lease.keep())
            await until(lambda: len(api.tokens) > 5)
            assert not lease.is_free
            assert await lease.claim()
            keeping.cancel()
    (reason,) = warnings(logs)
    assert "HTTP 403" in reason


async def test_an_api_server_that_cannot_be_reached_is_ignored(api):
    cluster = Cluster("http://127.0.0.1:1", api.folder)
    assert "127.0.0.1:1" in await is_no_hint(Lease("cell", "a", cluster))


async def test_outside_kubernetes_it_is_ignored(api, tmp_path):
    assert "No such file" in await is_no_hint(
        Lease("cell", "a", Cluster(api.url, tmp_path / "none"))
    )


async def test_an_api_server_that_does_not_answer_delays_no_takeover_for_long(api, monkeypatch):
    monkeypatch.setattr(leases, "_WRITE_S", 0.01)
    api.writing.clear()
    async with api.open("a") as lease:
        await reading(lease)
        assert await lease.claim()
    api.writing.set()


async def test_a_deleted_lease_is_ignored(api):
    async with leading(api, "a"), api.open("b") as other:
        await until(lambda: api.num_watches == 2)
        await reading(other)
        api.forbidden = {"GET", "PUT"}
        api.delete()
        await until(lambda: other._found is None)
        assert not other.is_free
        assert await other.claim()


# --- with workers ---------------------------------------------------------------------------------


@pytest.fixture
async def worker(tmp_path):
    """A worker that has had a scheduler, whose stream is gone."""
    one = FakeWorker(f"unix:{tmp_path}/w")
    await one.start()
    async with running_scheduler(tmp_path, [one.target]) as scheduler:
        while (await get(scheduler, "/ready"))[0] != 200:
            pass
    yield one
    await one.die()


def stand_by(worker, lease, absence_s=0.0):
    return asyncio.create_task(
        wait_for_vacancy(Discovery([worker.target]), absence_s, FOREVER, lease=lease)
    )


async def test_of_several_standbys_one_takes_over(api, worker, monkeypatch):
    monkeypatch.setattr(leases, "_HEAD_START_S", FOREVER)
    async with contextlib.AsyncExitStack() as stack:
        standbys = [await stack.enter_async_context(api.open(name)) for name in "abc"]
        for each in standbys:
            await reading(each)
        waits = [stand_by(worker, each) for each in standbys]
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        (first,) = (each for each, wait in zip(standbys, waits, strict=True) if wait in done)
        assert first._is_mine
        monkeypatch.setattr(leases, "_HEAD_START_S", 0.0)
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


async def test_a_lease_that_is_given_up_makes_the_takeover_quick(api, worker):
    async with api.open("b") as other:
        async with leading(api, "a"):
            waiting = stand_by(worker, other, absence_s=FOREVER)
            await until(lambda: other._found == api.lease)
            assert not waiting.done()
        await waiting
        assert api.holder.startswith("b_")


async def test_a_lease_that_a_dead_scheduler_holds_delays_nothing(api, worker):
    async with api.open("b") as other, leading(api, "a"):
        await reading(other)
        await stand_by(worker, other)
        assert api.holder.startswith("b_")


async def test_a_standby_answers_probes_and_ends_when_it_is_told_to(tmp_path):
    stop = asyncio.Event()
    settings = SchedulerSettings(
        uds=tmp_path / "s",
        http_port=0,
        workers=(f"unix:{tmp_path}/w",),
        standby=True,
        standby_http=True,
    )
    with capture_logs() as logs:
        task = asyncio.create_task(run_scheduler(settings, stop=stop))
        await until(lambda: any("http" in each for each in logs))
    (http,) = (each["http"] for each in logs if "http" in each)
    scheduler = SimpleNamespace(http=http)
    assert await get(scheduler, "/ready") == (200, {"status": "ready, but it stands by"})
    assert await get(scheduler, "/health") == (200, {"status": "ok"})
    assert not (tmp_path / "s").exists()
    stop.set()
    await task


async def test_a_scheduler_that_serves_holds_the_lease_until_it_ends(
    api, tmp_path, worker, monkeypatch
):
    monkeypatch.setattr(leases, "Cluster", lambda: api.cluster)
    async with running_scheduler(
        tmp_path, [worker.target], standby=True, standby_s=0, lease="cell", scheduler_id="pod-1"
    ):
        await until(lambda: api.holder.startswith("pod-1_"))
    assert api.holder == ""
