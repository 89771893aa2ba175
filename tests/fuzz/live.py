"""A service in this process as a target. Its event loop runs only during a check."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import grpc

from tests.fuzz.fuzzing import Case, Check

Probe: TypeAlias = Callable[[Case], Awaitable[None]]

_START_S = 60.0
_HANG_S = 10.0
"""Time limit of a case and the check after it, which take milliseconds."""


@contextlib.contextmanager
def in_event_loop(service: contextlib.AbstractAsyncContextManager[Probe]) -> Iterator[Check]:
    """Run a service, and feed each case to the probe that it yields."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def start() -> Probe:
            async with asyncio.timeout(_START_S):
                return await stack.enter_async_context(service)

        async def check_one(case: Case) -> None:
            async with asyncio.timeout(_HANG_S):
                await probe(case)

        probe = runner.run(start())
        try:
            yield lambda case: runner.run(check_one(case))
        finally:
            runner.run(stack.aclose())


def as_is(data: Any) -> bytes:
    """A serializer for messages that may be bytes already."""
    return data if isinstance(data, bytes) else data.SerializeToString()


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Read a call to its end; its status must not be one that reports a bug."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    code, details = await call.code(), await call.details() or ""
    assert not details.startswith("internal error"), f"a bug, says the service: {details}"
    assert code is not grpc.StatusCode.UNKNOWN, f"UNKNOWN: {details}"
    return code, details
