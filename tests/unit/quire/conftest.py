"""A served fake of the router, for the clients and the commands that talk to it."""

import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import pytest
from fake_inference import FakeInference

from quire.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from rpc.status import ErrorInterceptor
from rpc.transport import server_options


@dataclass
class Served:
    target: str
    fake: FakeInference


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    fake = FakeInference()
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor()], options=server_options(64, 16, 4096)
    )
    add_InferenceServiceServicer_to_server(fake, server)
    # pytest's own temporary paths can be longer than a socket's may be.
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        target = f"unix:{folder}/s"
        server.add_insecure_port(target)
        await server.start()
        yield Served(target, fake)
        await server.stop(0)
