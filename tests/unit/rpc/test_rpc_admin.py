"""The drain call: its permissions, and its reports."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from contract.errors import PermissionDeniedError
from quire.v1 import admin_pb2, admin_pb2_grpc
from rpc.admin import AdminServicer
from rpc.peers.channel import open_channel
from rpc.security.operators import Operators

pytestmark = pytest.mark.timeout(120)


async def test_a_draining_process_reports_progress_until_it_has_drained(run_server, settings):
    live, stop, leave = [3], asyncio.Event(), asyncio.Event()
    async with (
        run_server(
            settings.model_copy(update={"local_drain": True}),
            stop=stop,
            num_live=lambda: live[0],
            on_drain=leave.wait,
        ) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        call = admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
        assert (await call.read()).num_live == 3
        assert stop.is_set()
        live[0] = 1
        assert (await call.read()).num_live == 1
        leave.set()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_only_a_scheduler_has_workers_drain(run_server, settings):
    asked = []

    async def drain_worker(worker):
        asked.append(worker)
        yield 2
        yield 0

    stop, request = asyncio.Event(), admin_pb2.DrainRequest(worker="w:1")
    async with (
        run_server(settings, stop=stop, drain_worker=drain_worker) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        call = admin_pb2_grpc.AdminServiceStub(channel).Drain(request)
        assert [told.num_live async for told in call] == [2, 0]
        assert asked == ["w:1"]
        assert not stop.is_set()
    async with run_server(settings) as addresses, open_channel(addresses.grpc) as channel:
        call = admin_pb2_grpc.AdminServiceStub(channel).Drain(request)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_callers_that_are_no_operators_are_refused_and_the_process_continues(
    run_server, settings
):
    def check_operator():
        raise PermissionDeniedError("a tenant's key")

    stop = asyncio.Event()
    async with (
        run_server(settings, stop=stop, check_operator=check_operator) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        call = admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        assert await call.details() == "a tenant's key"
        assert not stop.is_set()


@pytest.mark.parametrize(
    ("peer", "has_client_certificates", "obeys_loopback", "may"),
    [
        ("unix:", False, False, True),
        ("unix:/run/q.sock", False, False, True),
        ("ipv4:127.0.0.1:4711", False, True, True),
        ("ipv6:[::1]:4711", False, True, True),
        ("ipv6:%5B::1%5D:4711", False, True, True),
        ("ipv4:127.0.0.1:4711", False, False, False),
        ("ipv6:[::1]:4711", False, False, False),
        ("ipv4:10.0.0.7:4711", False, True, False),
        ("ipv4:10.0.0.7:4711", True, False, True),
        ("ipv6:[2001:db8::1]:4711", False, True, False),
        ("", False, True, False),
    ],
)
async def test_strangers_are_refused(peer, has_client_certificates, obeys_loopback, may):
    stopping = asyncio.Event()
    servicer = AdminServicer(
        stopping,
        num_live=lambda: 0,
        operators=Operators(
            None,
            has_client_certificates=has_client_certificates,
            obeys_loopback=obeys_loopback,
        ),
    )
    told = servicer.Drain(admin_pb2.DrainRequest(), SimpleNamespace(peer=lambda: peer))
    if may:
        assert (await anext(told)).num_live == 0
    else:
        with pytest.raises(PermissionDeniedError, match="SIGTERM"):
            await anext(told)
    assert stopping.is_set() == may
    await told.aclose()
