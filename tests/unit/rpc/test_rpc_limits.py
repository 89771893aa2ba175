"""Messages that are too large are refused, with the limit in the answer."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rpc.peers.channel import open_channel

CHECK = health_pb2.HealthCheckRequest()


@pytest.fixture(params=[True, False], ids=["grpcio", "quire"])
def by_grpcio(request):
    return request.param


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_oversized_metadata_is_refused(run_server, settings):
    settings = settings.model_copy(update={"max_metadata_kb": 4})
    async with run_server(settings) as addresses, open_channel(addresses.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await stub.Check(CHECK, metadata=[("x-long", "a" * 3000)], timeout=10)
        error = await failure(stub.Check(CHECK, metadata=[("x-long", "a" * 5000)], timeout=10))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4096" in error.details()
        assert await stub.Check(CHECK, timeout=10), "the connection goes on"


async def test_oversized_message_is_refused(run_server, settings):
    settings = settings.model_copy(update={"max_message_mb": 1})
    async with run_server(settings) as addresses, open_channel(addresses.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="s" * (2**20 + 1))
        error = await failure(stub.Check(request, timeout=10))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(2**20) in error.details()


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_compressed_messages_are_refused_unless_asked_for(run_server, settings, is_accepted):
    server = run_server(settings, accepts_compressed=is_accepted)
    async with server as addresses, open_channel(addresses.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="s" * 1000)
        call = stub.Check(request, compression=grpc.Compression.Gzip, timeout=10)
        code = (await failure(call)).code()
        assert code.name == ("NOT_FOUND" if is_accepted else "UNIMPLEMENTED")
        assert await stub.Check(CHECK, timeout=10), "the connection goes on"


async def test_calls_beyond_the_streams_of_a_connection_wait(run_server, settings):
    settings = settings.model_copy(update={"max_concurrent_streams": 1})
    async with run_server(settings) as addresses, open_channel(addresses.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(CHECK)
        await watch.read()  # its call has the only stream
        waiting = asyncio.ensure_future(stub.Check(CHECK, timeout=10))
        error = await failure(stub.Check(CHECK, timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        watch.cancel()
        assert await waiting


@pytest.mark.parametrize("reflection", [True, False])
async def test_reflection_can_be_turned_off(run_server, settings, reflection):
    settings = settings.model_copy(update={"reflection": reflection})
    async with run_server(settings) as addresses, open_channel(addresses.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        if reflection:
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await call.read()).list_services_response.service
        else:  # the test writes nothing, because a write may fail before the answer arrives
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
