"""A gRPC call's metadata and deadline, and the errors that outputs end a call with."""

import asyncio
from typing import Any, TypeAlias

import grpc.aio

from contract.errors import DeadlineExceededError, QuireError, UnavailableError
from contract.outputs import FinishReason, OutputFinished
from router.schedulers.wire import error_from_code

CallContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def metadata_of(context: CallContext) -> dict[str, str]:
    """Return the call's metadata without binary values."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def deadline_of(context: CallContext) -> float | None:
    """Return when the call's deadline passes, on the event loop's clock; None: never."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s


def failure_of(finished: OutputFinished) -> QuireError | None:
    """Return the error that a unary call ends with; None if the output ended well."""
    match finished.finish_reason:
        case FinishReason.ERROR:
            assert finished.error is not None, "ERROR comes with an error"
            return error_from_code(finished.error.code, finished.error.message)
        case FinishReason.DEADLINE:
            return DeadlineExceededError("the deadline passed before the outputs were complete")
        case FinishReason.CANCELLED:
            return UnavailableError("the service cancelled the request")
        case _:
            return None
