"""Fakes of the service's processes, for the clients and commands under test."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio
import pytest
from fake_inference import FakeInference

from quire.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from rpc.status import ErrorInterceptor
from rpc.transport import server_options

Serve: TypeAlias = Callable[[Callable[[Any, grpc.aio.Server], None], Any], Awaitable[str]]
"""Takes a function that registers a servicer, and the servicer; returns its target."""


@dataclass
class Served:
    target: str
    fake: FakeInference


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves fakes until the test ends."""
    async with contextlib.AsyncExitStack() as stack:

        async def serve(add_to_server: Callable[[Any, grpc.aio.Server], None], fake: Any) -> str:
            server = grpc.aio.server(
                interceptors=[ErrorInterceptor()], options=server_options(64, 16, 4096)
            )
            add_to_server(fake, server)
            # pytest's own temporary paths can be longer than a socket's may be.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="q-"))
            target = f"unix:{folder}/s"
            server.add_insecure_port(target)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            return target

        yield serve


@pytest.fixture
async def served(serve: Serve) -> Served:
    """Serve a fake of the router."""
    fake = FakeInference()
    return Served(await serve(add_InferenceServiceServicer_to_server, fake), fake)
