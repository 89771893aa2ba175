"""Fields that only a worker honours are refused by name at router and scheduler: `epoch`."""

import contextlib
import tempfile

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory

import router.grpc.operations
import scheduler_svc.operations.services
from quire.v1 import adapters_pb2, loading_pb2
from rpc.grpc_server import make_grpc_server
from rpc.peers.channel import open_channel
from rpc.settings import ProcessSettings

METHODS = [
    method
    for file in (adapters_pb2, loading_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if "epoch" in method.input_type.fields_by_name
]
# The call is refused before the servicer uses its dependencies.
SERVICES = {
    "router": router.grpc.operations.operator_services(None, None, None, None, None),
    "scheduler": (
        scheduler_svc.operations.services.adapter_service(None, None),
        scheduler_svc.operations.services.loading_service(None),
    ),
}


@contextlib.asynccontextmanager
async def connected(services):
    server = make_grpc_server(ProcessSettings(), services)
    # pytest's own temporary paths can be longer than a socket's may be.
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        server.add_insecure_port(f"unix:{folder}/s")
        await server.start()
        async with open_channel(f"unix:{folder}/s") as channel:
            yield channel
        await server.stop(0)


def test_the_methods_that_carry_an_epoch_are_found():
    assert {method.name for method in METHODS} == {"LoadAdapter", "UnloadAdapter", "Load", "Unload"}


@pytest.mark.parametrize("process", SERVICES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_an_epoch_is_refused_by_name(process, method):
    request = message_factory.GetMessageClass(method.input_type)(epoch=7)
    async with connected(SERVICES[process]) as channel:
        call = channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=type(request).SerializeToString,
        )(request, timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith("epoch is 7; only calls to workers have an epoch")
