"""A gRPC call's metadata and deadline."""

import asyncio
from typing import Any, TypeAlias

import grpc.aio

CallContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def metadata_of(context: CallContext) -> dict[str, str]:
    """Return the call's metadata without binary values."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def deadline_of(context: CallContext) -> float | None:
    """Return when the call's deadline passes, on the event loop's clock; None: never."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s
