"""A whole router that has no scheduler, or whose scheduler client breaks."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_fake_scheduler import FakeScheduler

from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from router.app import run_router
from router.schedulers.link import SchedulerLink
from router.settings import RouterSettings
from rpc.peers.channel import open_channel


async def test_a_broken_client_ends_its_requests_instead_of_waiting_for_them(
    model_dir, tmp_path, monkeypatch
):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(SchedulerLink, "_on_step", fail)
    scheduler = FakeScheduler(tmp_path / "s")
    await scheduler.start()
    uds = tmp_path / "r"
    settings = RouterSettings(
        model=model_dir, scheduler=(scheduler.target,), uds=uds, http_port=0, drain_s=1000
    )
    task = asyncio.create_task(run_router(settings))
    async with open_channel(f"unix:{uds}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="quire.v1.InferenceService"), wait_for_ready=True
        )
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()
        call = stub.Generate(inference_pb2.GenerateRequest(text="hello"))
        submit = await scheduler.submits.get()
        await scheduler.step({submit.first_seq_key: [70]})
        async with asyncio.timeout(20):
            responses = [response async for response in call]
            with pytest.raises(RuntimeError, match="a bug"):
                await task
    assert responses[0].finished.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert responses[0].finished.error.retryable
    await scheduler.stop()


async def test_nothing_is_tokenized_before_the_models_limits_are_known(model_dir, tmp_path):
    uds, stop = tmp_path / "r", asyncio.Event()
    settings = RouterSettings(
        model=model_dir, scheduler=(f"unix:{tmp_path / 'nobody'}",), uds=uds, http_port=0
    )
    task = asyncio.create_task(run_router(settings, stop))
    async with open_channel(f"unix:{uds}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="hello"), wait_for_ready=True)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "scheduler" in caught.value.details()
    stop.set()
    await task
