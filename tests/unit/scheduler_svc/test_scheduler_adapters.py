"""A running scheduler loads and unloads LoRA adapters at all its workers."""

import asyncio

import grpc
import pytest
from adapters_harness import SQL, A, B, Router, refusal, service
from scheduler_fake_adapters import adapter
from scheduler_fake_worker import FakeWorker, expected_tokens
from scheduler_harness import get, running_scheduler

from quire.v1 import adapters_pb2, scheduler_pb2
from scheduler_svc.operations.services import AdapterServicer
from scheduler_svc.workers import adapters
from scheduler_svc.workers.adapters import AdapterUse

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def _expects_no_requests(monkeypatch):
    """Requests from before the scheduler's start, or from an ended stream."""
    monkeypatch.setattr(adapters, "REUNION_S", 0.0)


async def test_all_workers_load_and_the_router_is_notified(folder):
    async with service(folder, 2) as (_, router, *workers):
        assert router.sent_adapters == []
        loaded = await router.load_adapter("sql", A)
        assert (loaded.adapter, loaded.was_there) == (SQL, False)
        assert [worker.adapters.names for worker in workers] == [["sql"], ["sql"]]
        assert router.sent_adapters == ["sql"]
        assert await router.listed() == [("sql", A)]
        await router.submit(0, [1, 2], adapter=SQL)
        await router.read_until_finished(0)
        assert router.tokens[0] == expected_tokens([1, 2], 8)
        assert (await router.load_adapter("sql", A)).was_there


async def test_if_one_refuses_none_has_it(folder):
    async with service(folder, 3) as (_, router, first, second, third):
        second.adapters.error = grpc.StatusCode.INVALID_ARGUMENT, "directory is not there"
        code, details = await refusal(router.load_adapter("sql", A))
        assert code == "INVALID_ARGUMENT"
        assert second.target in details
        assert first.adapters.names == third.adapters.names == []
        assert await router.listed() == []
        await router.submit(0, [1, 2], adapter=SQL)
        await router.read_until(lambda: 0 in router.refused)
        second.adapters.error = None
        await router.load_adapter("sql", A)


async def test_another_of_the_name_is_refused_and_the_first_stays(folder):
    async with service(folder, 1) as (_, router, worker):
        await router.load_adapter("sql", A)
        code, details = await refusal(router.load_adapter("sql", B))
        assert (code, details) == (
            "ALREADY_EXISTS",
            f"worker {worker.target}: it has other contents",
        )
        other = adapters_pb2.UnloadAdapterRequest(name="sql", digest=b"b" * 32)
        code, details = await refusal(router.adapters.UnloadAdapter(other))
        assert (code, details) == ("NOT_FOUND", "LoRA adapter 'sql' (62626262) is not loaded")
        assert await router.listed() == [("sql", A)]
        assert router.sent_adapters == ["sql"]


async def test_unloading_refuses_new_requests_at_once_and_lets_those_that_run_end(folder):
    async with service(folder, 1) as (_, router, worker):
        await router.load_adapter("sql", A)
        worker.pause()
        await router.submit(0, [1, 2], max_tokens=20, adapter=SQL)
        await router.wait_for_live(1)
        unloading = asyncio.create_task(router.unload_adapter("sql"))
        await router.read_until(lambda: router.sent_adapters == [])
        await router.submit(10, [1, 2], adapter=SQL)
        await router.read_until(lambda: 10 in router.refused)
        refused = router.refused[10]
        assert refused.code == grpc.StatusCode.NOT_FOUND.value[0]
        assert refused.message.startswith("LoRA adapter 'sql' (61616161) is not served")
        code, details = await refusal(router.unload_adapter("sql"))
        assert (code, details) == (
            "FAILED_PRECONDITION",
            "LoRA adapter 'sql' is being unloaded",
        )
        assert worker.adapters.names == ["sql"]
        assert not unloading.done()
        worker.resume()
        await router.read_until_finished(0)
        assert router.tokens[0] == expected_tokens([1, 2], 20)
        await unloading
        assert worker.adapters.names == await router.listed() == []
        code, details = await refusal(router.unload_adapter("sql"))
        assert (code, details) == ("NOT_FOUND", "LoRA adapter 'sql' is not loaded")


@pytest.mark.parametrize("num_known", [0, 3])
async def test_a_request_comes_again_while_its_adapter_leaves(folder, num_known):
    """The request may have no tokens yet; `is_again` says that it was accepted before."""
    async with service(folder, 1) as (_, router, worker):
        await router.load_adapter("sql", A)
        worker.pause()
        await router.submit(0, [1, 2], adapter=SQL)
        await router.wait_for_live(1)
        unloading = asyncio.create_task(router.unload_adapter("sql"))
        await router.read_until(lambda: router.sent_adapters == [])
        tokens = expected_tokens([1, 2], 8)
        so_far = scheduler_pb2.OutputSoFar(
            token_ids=b"".join(t.to_bytes(4, "little") for t in tokens[:num_known])
        )
        outputs = [so_far] if num_known else []
        await router.submit(10, [1, 2], adapter=SQL, outputs=outputs, is_again=True)
        await router.wait_for_live(2)
        worker.resume()
        await router.read_until_finished(0, 10)
        assert router.tokens[10] == tokens[num_known:]
        await unloading


async def test_a_request_whose_stream_has_broken_finds_its_adapter(folder, monkeypatch):
    expect = AdapterUse.expect
    monkeypatch.setattr(AdapterUse, "expect", lambda _: None)  # at the start
    monkeypatch.setattr(adapters, "_POLL_S", 0.0)
    async with service(folder, 1) as (scheduler, router, worker):
        await router.load_adapter("sql", A)
        worker.pause()
        other = await Router(scheduler.target).connect()
        await other.submit(0, [1, 2], adapter=SQL)
        await router.wait_for_live(1)
        unloading = asyncio.create_task(router.unload_adapter("sql"))
        await router.read_until(lambda: router.sent_adapters == [])
        monkeypatch.setattr(AdapterUse, "expect", expect)
        monkeypatch.setattr(adapters, "REUNION_S", 1000.0)
        await other.disconnect()
        await router.wait_for_live(0)
        worker.resume()
        again = await Router(scheduler.target).connect()
        await again.submit(0, [1, 2], adapter=SQL, is_again=True)
        await again.read_until_finished(0)
        assert again.tokens[0] == expected_tokens([1, 2], 8)
        assert not unloading.done()
        monkeypatch.setattr(adapters, "REUNION_S", 0.0)
        await unloading
        await again.disconnect()


async def test_unclaimed_sequences_keep_their_adapter(folder):
    worker = await FakeWorker(f"unix:{folder}/w").start()
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await Router(scheduler.target).connect()
        await router.load_adapter("sql", A)
        await router.submit(0, [1, 2], max_tokens=300, adapter=SQL)
        await worker.run_until_answered(5)
        worker.resume()
    async with running_scheduler(folder, [worker.target], socket="t") as scheduler:
        router = await Router(scheduler.target).connect()
        unloading = asyncio.create_task(router.unload_adapter("sql"))
        await router.read_until(lambda: router.sent_adapters == [])
        await router.submit(0, [1, 2], max_tokens=300, adapter=SQL, is_again=True)
        await router.read_until_finished(0)
        assert router.tokens[0] == expected_tokens([1, 2], 300)
        await unloading
        assert worker.num_computed_before[-1] > 2
        await router.disconnect()
    await worker.die()


async def test_it_is_unloaded_after_the_steps_that_may_name_it(folder):
    async with service(folder, 1) as (_, router, worker):
        await router.load_adapter("sql", A)
        worker.pause()
        await router.submit(0, [1, 2], adapter=SQL)
        await worker.wait_for_batches(2)
        await router.cancel(0)
        await router.read_until_finished(0)
        unloading = asyncio.create_task(router.unload_adapter("sql"))
        while await router.listed():
            pass
        for _ in range(5):  # as long as it would take
            await router.load()
        assert worker.adapters.names == ["sql"]
        worker.resume()
        await unloading
        assert worker.adapters.names == []


async def test_a_worker_that_comes_back_without_an_adapter_loads_it(folder):
    async with service(folder, 1) as (_, router, worker):
        await router.load_adapter("sql", A)
        worker.pause()
        await router.submit(0, [1, 2], max_tokens=20, adapter=SQL)
        await router.wait_for_live(1)
        await worker.run_until_answered(3)
        await worker.die()
        del worker.info.model.adapters[:]
        await worker.start()
        worker.resume()
        await router.read_until_finished(0)
        assert router.tokens[0] == expected_tokens([1, 2], 20)
        assert worker.adapters.names == ["sql"]


async def test_a_worker_that_comes_back_with_what_was_unloaded_unloads_it(folder):
    def load(workers):
        workers[0].adapters.add("sql", A)

    async with service(folder, 1, load) as (_, router, worker):
        assert router.sent_adapters == ["sql"]
        await router.unload_adapter("sql")
        await worker.die()
        worker.adapters.add("sql", A)  # as if by a flag
        await worker.start()
        await router.wait_for_load(lambda _: not worker.adapters.names)
        assert await router.listed() == []


async def test_an_adapter_of_one_worker_is_loaded_by_the_others(folder):
    def load(workers):
        workers[0].adapters.add("sql", A)
        workers[1].adapters.add("chat", B)

    async with service(folder, 2, load) as (_, router, first, second):
        assert await router.listed() == [("chat", B), ("sql", A)]
        assert sorted(first.adapters.names) == sorted(second.adapters.names) == ["chat", "sql"]


async def test_the_next_scheduler_learns_what_was_loaded_from_its_workers(folder):
    worker = await FakeWorker(f"unix:{folder}/w").start()
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await Router(scheduler.target).connect()
        await router.load_adapter("sql", A)
        await router.disconnect()
    async with running_scheduler(folder, [worker.target], socket="t") as scheduler:
        router = await Router(scheduler.target).connect()
        assert router.sent_adapters == ["sql"]
        await router.unload_adapter("sql")
        await router.disconnect()
    await worker.die()


async def test_a_worker_with_another_of_the_name_is_not_used(folder):
    other = FakeWorker(f"unix:{folder}/w1")
    other.adapters.add("sql", B)
    async with service(folder, 2) as (scheduler, router, first, second):
        await router.load_adapter("sql", A)
        await second.die()
        other.target = second.target
        await other.start()
        why = "it holds LoRA adapter 'sql' (62626262); this scheduler serves LoRA adapter 'sql' (61"
        while why not in (await get(scheduler, "/ready"))[1]["status"]:
            pass
        await first.die()  # the second worker's adapter is now the only one of its name
        while await router.listed() != [("sql", B)]:
            pass
        await router.submit(0, [1, 2], adapter=adapter("sql", B))
        await router.read_until_finished(0)
        assert other.adapters.names == ["sql"]
        await other.die()


async def test_the_only_worker_is_used_even_if_an_adapter_is_there_no_more(folder):
    async with service(folder, 1) as (scheduler, router, worker):
        await router.load_adapter("sql", A)
        worker.pause()
        await router.submit(0, [1, 2], max_tokens=20, adapter=SQL)
        await router.submit(10, [1, 2], max_tokens=20)
        await router.wait_for_live(2)
        await worker.die()
        del worker.info.model.adapters[:]
        worker.adapters.error = grpc.StatusCode.INVALID_ARGUMENT, "directory is gone"
        worker.resume()
        await worker.start()
        await router.read_until_finished(10)
        await router.read_until(lambda: 0 in router.refused)
        assert router.refused[0].code == grpc.StatusCode.NOT_FOUND.value[0]
        assert router.sent_adapters == []
        assert (await get(scheduler, "/ready"))[0] == 200


async def test_it_is_loaded_even_if_the_caller_leaves(folder, monkeypatch):
    has_left, load = asyncio.Event(), AdapterServicer.LoadAdapter

    async def watched(self, request, context):
        try:
            return await load(self, request, context)
        except asyncio.CancelledError:
            has_left.set()
            raise

    monkeypatch.setattr(AdapterServicer, "LoadAdapter", watched)
    async with service(folder, 1) as (_, router, worker):
        worker.adapters.may_load.clear()
        call = router.adapters.LoadAdapter(adapters_pb2.LoadAdapterRequest(name="sql", directory=A))
        asking = asyncio.ensure_future(refusal(call))
        await worker.adapters.was_asked.wait()
        asking.cancel()
        await has_left.wait()
        worker.adapters.may_load.set()
        await router.read_until(lambda: router.sent_adapters == ["sql"])
