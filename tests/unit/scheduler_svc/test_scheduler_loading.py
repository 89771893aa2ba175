"""Workers whose models are unloaded and loaded while a scheduler works: no request is lost."""

import asyncio
import contextlib

import grpc
import pytest
from scheduler_fake_adapters import adapter
from scheduler_fake_worker import FakeWorker, expected_tokens
from scheduler_harness import FakeRouter, get, running_scheduler

from contract.errors import StaleEpochError
from quire.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    common_pb2,
    loading_pb2,
    loading_pb2_grpc,
    scheduler_pb2,
)
from scheduler_svc.operations import loading as loading_module
from scheduler_svc.workers import roster
from scheduler_svc.workers.link import ADAPTER_TIMEOUT_S

pytestmark = pytest.mark.timeout(30)

OTHER = "/other"


async def wait_until_unloaded(scheduler):
    """Return the status and body of `/ready` once it reports an unloaded model."""
    while "unloaded" not in (answer := await get(scheduler, "/ready"))[1]["status"]:
        pass
    return answer


class Router(FakeRouter):
    """A fake router that also makes operators' calls."""

    def __init__(self, target):
        super().__init__(target)
        self.loading = loading_pb2_grpc.LoadingServiceStub(self.channel)

    async def unload(self, worker=""):
        answer = await self.loading.Unload(loading_pb2.UnloadRequest(worker=worker))
        return {each.worker: each.was_unloaded for each in answer.workers}

    async def load_models(self, worker="", directory=""):
        request = loading_pb2.LoadRequest(worker=worker, directory=directory)
        return [told async for told in self.loading.Load(request)]

    async def activity(self, worker=""):
        query = common_pb2.ActivityQuery(worker=worker)
        request = scheduler_pb2.DescribeSchedulerActivityRequest(query=query)
        answer = await self.stub.DescribeSchedulerActivity(request)
        return {each.worker: each.is_unloaded for each in answer.workers}


@contextlib.asynccontextmanager
async def service(folder, num_workers):
    """A scheduler with `num_workers` attached, and a router."""
    workers = [FakeWorker(f"unix:{folder}/w{i}") for i in range(num_workers)]
    for worker in workers:
        await worker.start()
    targets = [worker.target for worker in workers]
    try:
        async with running_scheduler(folder, targets) as scheduler:
            router = await Router(scheduler.target).connect()
            await router.wait_for_load(lambda load: load.num_workers == num_workers)
            yield scheduler, router, *workers
            await router.disconnect()
    finally:
        for worker in workers:
            worker.resume()
            await worker.die()


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()


async def test_running_sequences_continue_at_another_worker(folder):
    async with service(folder, 2) as (_, router, first, second):
        second.pause()
        first.pause_at = 3
        for key in range(4):
            await router.submit(key, [1, key], max_tokens=12)
        await first.has_paused.wait()
        unloading = asyncio.create_task(router.unload(first.target))
        first.pause_at = None
        first.resume()
        second.resume()
        assert await unloading == {first.target: False}
        await router.read_until_finished(0, 1, 2, 3)
        for key in range(4):
            assert router.tokens[key] == expected_tokens([1, key], 12)
        assert not first.rows
        assert await router.activity() == {second.target: False, first.target: True}
        assert await router.activity(first.target) == {first.target: True}
        load = await router.load()
        assert (load.num_workers, load.num_unloaded_workers) == (1, 1)
        await router.submit(10, [5], max_tokens=2)
        await router.read_until_finished(10)
        assert await router.unload(first.target) == {first.target: True}


async def test_requests_without_another_worker_wait_until_theirs_returns(folder):
    async with service(folder, 1) as (scheduler, router, worker):
        worker.pause_at = 4
        await router.submit(0, [1, 2], max_tokens=12)
        await router.submit(1, [3, 4], max_tokens=12)
        await worker.has_paused.wait()
        unloading = asyncio.create_task(router.unload())
        worker.pause_at = None
        worker.resume()
        assert await unloading == {worker.target: False}
        unloaded = f"{worker.target} (its model is unloaded)"
        status, body = await wait_until_unloaded(scheduler)
        assert (status, body["status"]) == (200, f"ready, but every model is unloaded: {unloaded}")
        await router.submit(2, [5, 6], max_tokens=12)
        load = await router.wait_for_load(lambda load: load.num_requests_waiting == 3)
        assert (load.num_workers, load.num_unloaded_workers) == (0, 1)
        assert not router.finished
        told = await router.load_models()
        assert [(each.worker, each.status, each.is_done) for each in told] == [
            (worker.target, "loading weights", False),
            (worker.target, "being attached", False),
            (worker.target, "ready", True),
        ]
        await router.read_until_finished(0, 1, 2)
        for key, prompt in enumerate(([1, 2], [3, 4], [5, 6])):
            assert router.tokens[key] == expected_tokens(prompt, 12)
        (told,) = (each for each in await router.load_models() if each.is_done)
        assert told.was_loaded


async def test_routers_are_notified_when_no_worker_has_the_model(folder):
    def unloaded_events(router):
        steps = [message.step for message in router.messages]
        return [step.is_unloaded for step in steps if step.HasField("is_unloaded")]

    async with service(folder, 2) as (_, router, first, second):
        await router.unload(first.target)
        await router.unload(second.target)
        await router.read_until(lambda: unloaded_events(router) == [True])
        await router.load_models(first.target)
        await router.read_until(lambda: unloaded_events(router) == [True, False])


async def test_all_are_unloaded_and_loaded_if_none_is_named(folder):
    async with service(folder, 3) as (_, router, *workers):
        targets = {worker.target for worker in workers}
        assert await router.unload() == dict.fromkeys(targets, False)
        assert all(worker.loading.is_unloaded for worker in workers)
        assert {each.worker for each in await router.load_models() if each.is_done} == targets
        assert (await router.load()).num_workers == 3


async def test_a_worker_that_keeps_its_model_keeps_its_requests(folder):
    async with service(folder, 1) as (_, router, worker):
        worker.loading.error = grpc.StatusCode.INTERNAL, "it will not"
        worker.pause_at = 2
        await router.submit(0, [1, 2], max_tokens=12)
        await worker.has_paused.wait()
        unloading = asyncio.create_task(refusal(router.unload(worker.target)))
        await router.submit(1, [3, 4], max_tokens=12)
        await router.wait_for_live(2)
        worker.pause_at = None
        worker.resume()
        assert await unloading == ("INTERNAL", f"worker {worker.target}: it will not")
        await router.read_until_finished(0, 1)
        assert router.tokens[0] == expected_tokens([1, 2], 12)
        assert router.tokens[1] == expected_tokens([3, 4], 12)
        assert worker.num_attaches == 1


async def test_impossible_values_are_refused_by_name(folder):
    async with service(folder, 2) as (_, router, first, second):
        assert (await refusal(router.unload("w9")))[0] == "NOT_FOUND"
        assert (await refusal(router.load_models("w9")))[0] == "NOT_FOUND"
        await second.die()
        await router.wait_for_load(lambda load: load.num_workers == 1)
        code, details = await refusal(router.unload(second.target))
        assert code == "UNAVAILABLE"
        assert details.startswith(f"worker {second.target}: ")
        assert (await refusal(router.load_models(second.target)))[0] == "UNAVAILABLE"
        assert not first.loading.is_unloaded
        await router.unload(first.target)
        first.loading.error = grpc.StatusCode.INVALID_ARGUMENT, "directory is /x: nothing there"
        code, details = await refusal(router.load_models(first.target, "/x"))
        assert code == "INVALID_ARGUMENT"
        assert details == (
            f"request is refused: directory is /x: nothing there (says worker {first.target})"
        )
        assert (await router.load()).num_unloaded_workers == 1


async def test_one_whose_model_is_on_its_way_is_not_said_to_be_unloaded(folder):
    async with service(folder, 1) as (_, router, worker):
        await router.unload()
        worker.loading.may_load.clear()
        loading = router.loading.Load(loading_pb2.LoadRequest())
        assert (await loading.read()).status == "loading weights"
        loading.cancel()  # the load continues
        assert await refusal(router.unload()) == (
            "FAILED_PRECONDITION",
            f"worker {worker.target}: it is being loaded",
        )


async def test_one_whose_model_is_about_to_go_is_loaded_when_it_is_gone(folder):
    async with service(folder, 1) as (_, router, worker):
        worker.loading.may_unload.clear()
        unloading = asyncio.create_task(router.unload())
        await worker.loading.was_asked.wait()
        loading = router.loading.Load(loading_pb2.LoadRequest())
        assert (await loading.read()).status == "being unloaded"
        worker.loading.may_unload.set()
        assert await unloading == {worker.target: False}
        *_, told = [told async for told in loading]
        assert (told.is_done, told.was_loaded) == (True, False)
        assert not worker.loading.is_unloaded
        assert worker.loading.unload_limit_s > ADAPTER_TIMEOUT_S, "it may be reading an adapter"


async def test_one_that_cannot_unload_is_not_emptied_nor_are_the_others(folder):
    workers = [FakeWorker(f"unix:{folder}/w{i}") for i in range(2)]
    workers[1].info.can_unload = False
    for worker in workers:
        await worker.start()
    async with running_scheduler(folder, [worker.target for worker in workers]) as scheduler:
        router = await Router(scheduler.target).connect()
        await router.wait_for_load(lambda load: load.num_workers == 2)
        code, details = await refusal(router.unload())
        assert code == "UNIMPLEMENTED"
        assert details.startswith(f"worker {workers[1].target} keeps its model: ")
        assert not workers[0].loading.was_asked.is_set()
        await router.submit(0, [1, 2])
        await router.read_until_finished(0)
        await router.disconnect()
    for worker in workers:
        await worker.die()


async def test_the_next_scheduler_sees_that_it_is_unloaded_and_has_it_load(folder):
    # The first scheduler ends if it notices the second.
    with contextlib.suppress(StaleEpochError):
        await _unload_and_load_at_the_next_scheduler(folder)


async def _unload_and_load_at_the_next_scheduler(folder):
    async with service(folder, 1) as (_, router, worker):
        await router.unload()
        async with running_scheduler(folder, [worker.target], socket="s2") as successor:
            await wait_until_unloaded(successor)
            second = Router(successor.target)
            assert (await second.load()).num_unloaded_workers == 1
            assert (await second.load_models())[-1].is_done
            await second.connect()
            await second.submit(0, [1, 2])
            await second.read_until_finished(0)
            assert second.tokens[0] == expected_tokens([1, 2], 8)
            await second.disconnect()


async def test_adapters_that_came_at_run_time_are_loaded_again(folder):
    async with service(folder, 1) as (scheduler, router, worker):
        adapters = adapters_pb2_grpc.AdapterServiceStub(router.channel)
        request = adapters_pb2.LoadAdapterRequest(name="sql", directory="/a")
        await adapters.LoadAdapter(request)
        await router.unload()
        del worker.info.model.adapters[:]
        await router.load_models()
        assert worker.adapters.names == ["sql"]
        await router.submit(0, [1, 2], adapter=adapter("sql", "/a"))
        await router.read_until_finished(0)
        # Another model has no adapters.
        await router.unload()
        await router.load_models(directory=OTHER)
        assert worker.adapters.names == []
        answer = await adapters.ListAdapters(adapters_pb2.ListAdaptersRequest())
        assert not answer.adapters
        assert (await get(scheduler, "/ready"))[0] == 200


async def test_however_long_adapters_take_a_load_waits_for_them(folder, monkeypatch):
    async with service(folder, 1) as (_, router, worker):
        adapters = adapters_pb2_grpc.AdapterServiceStub(router.channel)
        await adapters.LoadAdapter(adapters_pb2.LoadAdapterRequest(name="sql", directory="/a"))
        await router.unload()
        del worker.info.model.adapters[:]
        worker.adapters.may_load.clear()
        worker.adapters.was_asked.clear()
        worker.loading.may_load.clear()
        loading = asyncio.create_task(router.load_models())
        worker.loading.is_unloaded = False  # so that its engine loads adapters at that moment
        await worker.adapters.was_asked.wait()
        monkeypatch.setattr(loading_module, "_NOTICE_S", 0.01)
        worker.loading.may_load.set()
        await asyncio.wait([loading], timeout=0.1)
        assert not loading.done()
        worker.adapters.may_load.set()
        assert (await loading)[-1].is_done


async def test_another_model_serves_nothing_that_was_asked_of_the_one_before(folder):
    async with service(folder, 1) as (_, router, worker):
        worker.pause_at = 3
        await router.submit(0, [1, 2], max_tokens=12)
        await worker.has_paused.wait()
        unloading = asyncio.create_task(router.unload())
        worker.pause_at = None
        worker.resume()
        await unloading
        await router.submit(1, [3, 4], max_tokens=12, resume_record=b"r")
        await router.wait_for_live(2)
        num_answered = len(worker.answered)
        await router.load_models(directory=OTHER)
        await router.read_until_finished(0, 1)
        for key in (0, 1):
            assert router.finished[key].finish_reason == common_pb2.FINISH_REASON_ERROR
            assert "another model, 'other'" in router.finished[key].error.message
        assert await refusal(router.read_to_end()) == (
            "UNAVAILABLE",
            "the service now has another model, 'other'",
        )
        assert len(worker.answered) == num_answered
        again = await Router(f"unix:{folder}/s").connect()
        assert (again.welcome.model.id, again.welcome.model.directory) == ("other", OTHER)
        await again.resume("request-1", 50)
        await again.read_until(lambda: 50 in again.refused)
        assert again.refused[50].code == grpc.StatusCode.NOT_FOUND.value[0]
        await again.submit(0, [1, 2])
        await again.read_until_finished(0)
        await again.disconnect()


async def test_another_model_waits_until_no_worker_serves_the_old_one(folder):
    async with service(folder, 2) as (scheduler, router, first, second):
        await router.unload(first.target)
        loading = asyncio.create_task(refusal(router.load_models(first.target, OTHER)))
        while "serves" not in (await get(scheduler, "/ready"))[1]["status"]:
            pass
        await router.submit(0, [1, 2])
        await router.read_until_finished(0)
        loading.cancel()
        await router.unload(second.target)
        again = await Router(scheduler.target).connect()
        assert again.welcome.model.id == "other"
        await again.load_models(second.target, OTHER)
        assert (await again.load()).num_workers == 2
        await again.disconnect()


@pytest.mark.parametrize("comes_back", [True, False])
async def test_another_model_waits_for_a_worker_that_is_lost_a_moment(
    folder, monkeypatch, comes_back
):
    async with service(folder, 2) as (scheduler, router, first, second):
        await router.unload(first.target)
        second.pause_at = 3
        await router.submit(0, [1, 2], max_tokens=12)
        await second.has_paused.wait()
        loading = asyncio.create_task(refusal(router.load_models(first.target, OTHER)))
        while "serves" not in (await get(scheduler, "/ready"))[1]["status"]:
            pass
        await second.die()
        while f"waits for {second.target}" not in (await get(scheduler, "/ready"))[1]["status"]:
            pass
        loading.cancel()
        second.pause_at = None
        second.resume()
        if comes_back:
            await second.start()
            await router.read_until_finished(0)
            assert router.tokens[0] == expected_tokens([1, 2], 12)
        else:
            monkeypatch.setattr(roster, "_GRACE_S", 0.0)
            await router.read_until_finished(0)
            assert "another model, 'other'" in router.finished[0].error.message


async def test_a_worker_of_another_model_is_refused_as_ever_if_it_was_not_unloaded(folder):
    async with service(folder, 1) as (scheduler, _, worker):
        await worker.die()
        worker.info.model.id = "other"
        await worker.start()
        while "serves" not in (await get(scheduler, "/ready"))[1]["status"]:
            pass


async def test_one_that_is_back_with_its_flags_model_is_told_to_load_what_is_served(folder):
    async with service(folder, 1) as (scheduler, router, worker):
        await router.unload()
        await router.load_models(directory=OTHER)
        await worker.die()
        worker.info.model.id, worker.info.model.directory = "fake", ""
        await worker.start()
        while "serves" not in (await get(scheduler, "/ready"))[1]["status"]:
            pass
        assert await router.unload() == {worker.target: False}
        await router.load_models(directory=OTHER)
        again = await Router(scheduler.target).connect()
        assert again.welcome.model.id == "other"
        await again.disconnect()
