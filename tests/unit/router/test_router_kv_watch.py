"""KV events at the router: the streams of its schedulers as one."""

import asyncio
from contextlib import aclosing

import grpc
import pytest
from keyed_router import ALICE, OPERATOR, bearer, failure, keyed_settings, running
from router_fake_scheduler import FakeKvEvents

from contract.errors import UnimplementedError
from quire.v1 import kv_pb2, kv_pb2_grpc
from quire.vllm_engine import smg_common_pb2, vllm_engine_pb2_grpc


def message(worker, epoch, sequence, **event):
    return kv_pb2.WatchKvResponse(
        worker=worker, epoch=epoch, sequence=sequence, events=[kv_pb2.KvEvent(**event)]
    )


STORED = kv_pb2.KvBlocksStored(tier=kv_pb2.KV_TIER_DEVICE, block_hashes=bytes(32))
CLEARED = kv_pb2.KvCacheCleared()


async def with_events(router):
    """Restart the scheduler with the service."""
    lost = asyncio.Event()
    router.health.on_change(lambda: None if router.health.ready else lost.set())
    await router.scheduler.stop()
    await lost.wait()
    events = router.scheduler.kv_events = FakeKvEvents()
    await router.scheduler.start()
    await router.ready.wait()
    return events


async def test_a_lost_schedulers_workers_are_cleared_and_older_epochs_are_void(router):
    events = await with_events(router)
    async with aclosing(router.cells.watch_kv()) as watch:
        events.messages.put_nowait(first := message("w", 5, 1, stored=STORED))
        assert await anext(watch) == first
        events.messages.put_nowait(None)
        assert await anext(watch) == message("w", 5, 1, cleared=CLEARED)
        events.messages.put_nowait(message("w", 4, 9, stored=STORED))
        events.messages.put_nowait(newer := message("w", 6, 1, stored=STORED))
        assert await anext(watch) == newer


async def test_a_scheduler_without_events_is_named(router):
    async with aclosing(router.cells.watch_kv()) as watch:
        with pytest.raises(UnimplementedError, match=r"s was started without --kv-events"):
            await anext(watch)


async def test_only_operators_see_the_tokens_of_prompts(model_dir, tmp_path):
    settings = keyed_settings(model_dir, tmp_path).model_copy(update={"vllm_engine": True})
    async with running(settings, tmp_path) as router:
        watch = kv_pb2_grpc.KvEventServiceStub(router.channel).WatchKv
        subscribe = vllm_engine_pb2_grpc.VllmEngineStub(router.channel).SubscribeKvEvents
        for method, request in (
            (watch, kv_pb2.WatchKvRequest()),
            (subscribe, smg_common_pb2.SubscribeKvEventsRequest()),
        ):
            refused = await failure(method(request, metadata=bearer(ALICE)))
            assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
            passed = await failure(method(request, metadata=bearer(OPERATOR)))
            assert passed.code() is grpc.StatusCode.UNIMPLEMENTED
