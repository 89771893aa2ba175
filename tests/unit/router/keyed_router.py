"""A router with API keys, and clients of both APIs."""

import asyncio
import contextlib
import hashlib

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_fake_scheduler import LENGTH, FakeScheduler

from quire.v1 import inference_pb2, inference_pb2_grpc
from router.app import run_router
from router.settings import RouterSettings
from rpc.peers.channel import open_channel

OPERATOR, ALICE, ALICE_2, BOB = "sk-operator", "sk-alice", "sk-alice-2", "sk-bob"
CAROL = "sk-carol"

KEYS = f"""
[[keys]]
key = "{ALICE}"
tenant = "alice"

[[keys]]
sha256 = "{hashlib.sha256(ALICE_2.encode()).hexdigest()}"
tenant = "alice"

[[keys]]
key = "{BOB}"
tenant = "bob"

[[keys]]
key = "{CAROL}"
tenant = "carol"

[tenants.bob]
max_concurrent_requests = 1
max_tokens_in_flight = 40

[tenants.carol]
requests_per_minute = 2
max_tokens_in_flight = 40
"""


class Router:
    def __init__(self, channel, http, scheduler):
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self.channel = channel
        self.http = http
        self.scheduler = scheduler

    def generate(self, key, *metadata, **fields):
        request = inference_pb2.GenerateRequest(text="hello", **fields)
        return self.stub.Generate(request, metadata=(*bearer(key), *metadata))

    async def submitted(self, key, *metadata, **fields):
        """The `Submit` of a call, as the scheduler receives it."""
        call = self.generate(key, *metadata, **fields)
        return call, await self.scheduler.submits.get()

    async def finish(self, submit):
        await self.scheduler.step(
            {submit.first_seq_key: [70]},
            finished={submit.first_seq_key: LENGTH},
            admitted={submit.first_seq_key: 0},
        )


def bearer(key):
    return () if key is None else (("authorization", f"Bearer {key}"),)


@contextlib.asynccontextmanager
async def running(settings, tmp_path):
    scheduler = FakeScheduler(tmp_path / "s")
    await scheduler.start()
    stop = asyncio.Event()
    addresses = asyncio.get_running_loop().create_future()

    async def on_started(bound):
        addresses.set_result(bound)

    task = asyncio.create_task(run_router(settings, stop, on_started=on_started))
    bound = await addresses
    async with (
        open_channel(f"unix:{settings.uds}") as channel,
        aiohttp.ClientSession(f"http://{bound.http}") as http,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for response in watch:  # health needs no key
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()
        yield Router(channel, http, scheduler)
    stop.set()
    await task
    await scheduler.stop()


async def failure(call):
    stream = isinstance(call, grpc.aio.UnaryStreamCall)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read_all(call) if stream else call)
    return caught.value


async def read_all(call):
    async for _ in call:
        pass


def plain_settings(model_dir, tmp_path, **flags):
    """Settings of a router of the model "tiny", whose scheduler's socket is `tmp_path / "s"`."""
    return RouterSettings(
        model=model_dir,
        served_model_name="tiny",
        scheduler=(f"unix:{tmp_path / 's'}",),
        uds=tmp_path / "r",
        http_port=0,
        drain_s=5,
        **flags,
    )


def keyed_settings(model_dir, tmp_path):
    """Settings of a router with `KEYS` in one file, and the operator's key in another."""
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return plain_settings(model_dir, tmp_path, api_key=(OPERATOR,), api_keys_file=file)
