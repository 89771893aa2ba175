"""Readiness and liveness as HTTP and gRPC clients see them, from start to drain."""

import asyncio
import json

import aiohttp
import grpc
import grpc.aio
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc import health as rpc_health
from rpc.grpc_server import Service
from rpc.health import Health
from rpc.peers.channel import open_channel

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

SERVICE = Service("quire.test.Idle", lambda _server: None)


async def get(addresses, path, method="GET"):
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{addresses.http}{path}") as response,
    ):
        text = await response.text()
        return response.status, json.loads(text) if text else None


async def check(addresses, service=""):
    async with open_channel(addresses.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_a_start_is_seen_with_its_progress_until_ready(run_server, settings):
    health = Health()
    async with run_server(settings, health=health, services=[SERVICE]) as addresses:
        assert await get(addresses, "/ready") == (503, {"status": "starting"})
        health.set_starting("loading weights", 0.25)
        assert await get(addresses, "/ready") == (
            503,
            {"status": "loading weights", "progress": 0.25},
        )
        assert await get(addresses, "/health") == (200, {"status": "ok"})
        assert await check(addresses) == NOT_SERVING
        health.set_ready()
        assert await get(addresses, "/ready") == (200, {"status": "ready"})
        assert await get(addresses, "/ready", "HEAD") == (200, None)
        for service in ("", SERVICE.name, "grpc.health.v1.Health"):
            assert await check(addresses, service) == SERVING
        health.set_not_ready("no worker is attached")
        assert await get(addresses, "/ready") == (503, {"status": "no worker is attached"})
        assert await check(addresses, SERVICE.name) == NOT_SERVING


async def test_a_failing_liveness_check_fails_every_probe(run_server, settings):
    health = Health()
    health.set_ready()
    wrong: list[str | None] = [None]
    health.add_liveness("steps", lambda: wrong[0])
    async with run_server(settings, health=health) as addresses:
        assert (await get(addresses, "/health"))[0] == 200
        wrong[0] = "no step for 60 s"
        failing = {"status": "failing", "failures": {"steps": "no step for 60 s"}}
        assert await get(addresses, "/health") == (503, failing)
        assert await get(addresses, "/ready") == (503, failing)
        assert await check(addresses) == NOT_SERVING
        wrong[0] = None
        assert (await get(addresses, "/health"))[0] == 200
        assert await check(addresses) == SERVING


async def test_an_unknown_service_is_not_found(run_server, settings):
    async with run_server(settings) as addresses:
        with pytest.raises(grpc.aio.AioRpcError) as it:
            await check(addresses, "quire.test.Nowhere")
        assert it.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watchers_see_each_change_when_another_leaves(run_server, settings):
    health = Health()
    stop = asyncio.Event()
    async with (
        run_server(settings, health=health, stop=stop) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch
        first = watch(health_pb2.HealthCheckRequest())
        second = watch(health_pb2.HealthCheckRequest())
        assert (await first.read()).status == NOT_SERVING
        assert (await second.read()).status == NOT_SERVING
        first.cancel()
        await asyncio.to_thread(health.set_ready)
        assert (await second.read()).status == SERVING
        stop.set()
        assert (await second.read()).status == NOT_SERVING
        assert await second.read() is grpc.aio.EOF


async def test_a_watch_of_an_unknown_service_says_so(run_server, settings):
    async with run_server(settings) as addresses, open_channel(addresses.grpc) as channel:
        request = health_pb2.HealthCheckRequest(service="quire.test.Nowhere")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert (await watch.read()).status == SERVICE_UNKNOWN
        watch.cancel()


async def test_a_watcher_learns_of_a_failing_check_unasked(run_server, settings, monkeypatch):
    monkeypatch.setattr(rpc_health, "_RECHECK_S", 0.01)
    health = Health()
    health.set_ready()
    wrong: list[str | None] = [None]
    health.add_liveness("steps", lambda: wrong[0])
    async with (
        run_server(settings, health=health) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        wrong[0] = "no step for 60 s"
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


def test_draining_is_final():
    changes = []
    health = Health()
    health.on_change(lambda: changes.append(health.status))
    health.set_ready()
    health.set_draining()
    health.set_ready()
    health.set_not_ready("no worker is attached")
    assert not health.ready
    assert changes == ["ready", "draining"]


async def test_metrics_are_prometheus_text(run_server, settings):
    async with (
        run_server(settings) as addresses,
        aiohttp.ClientSession() as session,
        session.get(f"http://{addresses.http}/metrics") as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/plain"
        assert "process_cpu_seconds_total" in await response.text()


async def test_the_applications_middleware_does_not_shut_probes_out(run_server, settings):
    @web.middleware
    async def refuse(request, handler):  # noqa: ARG001 - aiohttp names them
        raise web.HTTPUnauthorized

    app = web.Application(middlewares=[refuse])
    async with run_server(settings, http=app) as addresses:
        assert (await get(addresses, "/health"))[0] == 200
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{addresses.http}/v1/models") as response,
        ):
            assert response.status == 401
