"""Converts errors to a gRPC status with `google.rpc` details, and back."""

import asyncio
import contextlib
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final, TypeAlias, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from contract import errors
from rpc.security.tls import explain

TrailingMetadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Metadata key of the time that gRPC waits before it retries a call by itself. gRPC does not read
this time from the `RetryInfo` in the status."""
ERROR_DOMAIN = "quire.v1"

_MAX_MESSAGE_BYTES = 1024
"""Longest message of a status. The metadata has up to three copies of the message, one of them
percent-encoded, and peers may accept only 8 KiB of metadata."""

_MAX_RETRY_AFTER_S = 3600.0
"""Longest delay before a retry, even if a peer asks for a longer delay."""

_CODE_TO_ERROR: dict[grpc.StatusCode, type[errors.QuireError]] = {
    error.code: error
    for error in (
        errors.UnauthenticatedError,
        errors.PermissionDeniedError,
        errors.NotFoundError,
        errors.AbortedError,
        errors.AlreadyExistsError,
        errors.UnavailableError,
        errors.DeadlineExceededError,
        errors.FailedPreconditionError,
        errors.UnimplementedError,
    )
}

_HANDLER_KINDS: Final = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""Keys: whether requests are a stream, and whether responses are a stream. Values: the name of
the attribute with the handler's function, and the function that makes such a handler."""

_END: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it

log = structlog.get_logger()


def error_to_status(error: BaseException) -> tuple[grpc.StatusCode, str, TrailingMetadata]:
    """Return the code, message and trailing metadata that tell a client about `error`.

    An error other than QuireError is a bug. It is logged with its traceback and a new id, and the
    client gets only the id.
    """
    if isinstance(error, errors.QuireError):
        code, message = error.code, _shorten(str(error))
        details = _details(error)
    else:
        error_id = secrets.token_hex(8)
        log.error("unexpected error", error_id=error_id, exc_info=error)
        code = grpc.StatusCode.INTERNAL
        message = f"internal error {error_id}: the service's log has the details"
        details = [
            error_details_pb2.ErrorInfo(
                reason=code.name, domain=ERROR_DOMAIN, metadata={"error_id": error_id}
            )
        ]
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    trailing: TrailingMetadata = ((DETAILS_KEY, status.SerializeToString()),)
    if isinstance(error, errors.TooBusyError):
        trailing += ((PUSHBACK_KEY, str(round(error.retry_after_s * 1e3))),)
    return code, message, trailing


@contextlib.contextmanager
def calling() -> Iterator[None]:
    """Convert the errors of gRPC calls in the `with` block to QuireErrors.

    Closing a channel makes its calls raise CancelledError, although the task was not cancelled.
    This error becomes UnavailableError, so that the task does not end.

    Raises:
        QuireError: The peer's error, or UnavailableError if the peer is lost.
    """
    try:
        yield
    except grpc.RpcError as error:
        # Blocking calls raise a private class with the same methods.
        raise status_to_error(cast("grpc.aio.AioRpcError", error)) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise errors.UnavailableError("the connection was closed during the call") from None


def status_to_error(error: grpc.aio.AioRpcError) -> errors.QuireError:
    """Convert a status that a caller received to the error that the server raised.

    A status without a matching error (INTERNAL, UNKNOWN, a too large message) becomes a plain
    QuireError, which is not retryable.
    """
    code, message = error.code(), explain(error.details() or error.code().name)
    bad_request, retry_info = _parse_details(error)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        if bad_request is not None and bad_request.field_violations:
            violation = bad_request.field_violations[0]
            return errors.InvalidArgumentError(violation.field, violation.description)
        return errors.InvalidArgumentError("request", f"is refused: {message}")
    # Without RetryInfo, the status comes from gRPC itself, for example for a too large message.
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_info is not None:
        delay = retry_info.retry_delay
        delay_s = delay.seconds + delay.nanos * 1e-9  # a timedelta could overflow
        return errors.TooBusyError(message, min(max(delay_s, 0.0), _MAX_RETRY_AFTER_S))
    return _CODE_TO_ERROR.get(code, errors.QuireError)(message)


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Converts the errors of handlers to a status, for all four kinds of calls.

    All handlers must be coroutine functions or asynchronous generator functions. Cancellation and a
    handler's own `context.abort` pass through.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method, for which gRPC answers UNIMPLEMENTED
            return None
        if handler.request_streaming:  # the iterator raises the deserializer's errors
            return rewrapped(handler, partial(_wrap, request_streaming=True))
        return rewrapped(
            handler, partial(_wrap, request_streaming=False), wrap_deserializer=_or_error
        )


def rewrapped(
    handler: Any,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    wrap_deserializer: Callable[[Any], Any] = lambda deserialize: deserialize,
) -> Any:
    """Return a copy of `handler` whose function is wrapped with `wrap`.

    `handler` is what an interceptor's continuation has returned; it must not be None.
    `wrap_deserializer` wraps the function that parses requests; this function is None if requests
    are bytes.
    """
    kind, make = _HANDLER_KINDS[handler.request_streaming, handler.response_streaming]
    return make(
        wrap(getattr(handler, kind)),
        request_deserializer=wrap_deserializer(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )


def _or_error(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Make `deserialize` return its errors; if it raised an error, gRPC would answer UNKNOWN."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return invalid_message(error)
        except errors.QuireError as error:  # raised by an interceptor that reads the bytes
            return error.with_traceback(None)  # the traceback's frames refer to the bytes

    return parse


def invalid_message(error: DecodeError) -> errors.InvalidArgumentError:
    """Return the error for a message that cannot be parsed."""
    return errors.InvalidArgumentError(
        "request", f"is not a valid message, or a string in it is not UTF-8: {error}"
    )


def _check(request: Any) -> None:
    if isinstance(request, errors.QuireError):  # see `_or_error`
        try:
            raise request
        finally:
            del request  # the error refers to this frame; break the reference cycle


async def _abort(context: Any, status: tuple[grpc.StatusCode, str, TrailingMetadata]) -> None:
    """End a call; delete your references to `context` and the request before you await this.

    gRPC's context keeps the AbortError. If the error's traceback led back to the context, error,
    context and request would stay in memory until a garbage collection.
    """
    aborting = context.abort(*status)
    del context
    try:
        await aborting
    except grpc.aio.AbortError as error:
        raise error.with_traceback(None) from None


async def _received(context: Any) -> AsyncIterator[Any]:
    """Yield a call's requests.

    gRPC's own iterator refers to itself, so the iterator and the last request would stay in memory
    until a garbage collection. This generator replaces that iterator.
    """
    while (request := await context.read()) is not _END:
        yield request


def _wrap(behavior: Callable[..., Any], *, request_streaming: bool) -> Callable[..., Any]:
    def blamed(error: Exception) -> Exception:
        """Convert the error of an invalid message in a stream; return other errors unchanged."""
        if request_streaming and isinstance(error, DecodeError):
            return invalid_message(error)
        return error

    if inspect.isasyncgenfunction(behavior):

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                _check(request)
                if request_streaming:
                    request = _received(context)
                async with contextlib.aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - no caller handles it
                status = error_to_status(blamed(error))
            else:
                return
            aborting = _abort(context, status)
            del request, context
            await aborting

        return generate

    async def call(request: Any, context: Any) -> Any:
        try:
            _check(request)
            if request_streaming:
                request = _received(context)
            return await behavior(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - no caller handles it
            status = error_to_status(blamed(error))
        aborting = _abort(context, status)
        del request, context
        return await aborting

    return call


def _details(error: errors.QuireError) -> list[Any]:
    details: list[Any] = [
        error_details_pb2.ErrorInfo(
            reason=error.code.name,
            domain=ERROR_DOMAIN,
            metadata={"retryable": "true" if error.retryable else "false"},
        )
    ]
    if isinstance(error, errors.InvalidArgumentError):
        bad_request = error_details_pb2.BadRequest()
        bad_request.field_violations.add(
            field=_shorten(error.field), description=_shorten(error.problem)
        )
        details.append(bad_request)
    if isinstance(error, errors.TooBusyError):
        retry_info = error_details_pb2.RetryInfo()
        retry_info.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(retry_info)
    return details


def _parse_details(
    error: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.BadRequest | None, error_details_pb2.RetryInfo | None]:
    bad_request: error_details_pb2.BadRequest | None = None
    retry_info: error_details_pb2.RetryInfo | None = None
    # The type stubs do not know that the metadata iterates over pairs.
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        # Other implementations may send malformed details; code and message are still valid.
        with contextlib.suppress(DecodeError):
            for detail in status_pb2.Status.FromString(value).details:
                bad_request = _unpack(detail, error_details_pb2.BadRequest) or bad_request
                retry_info = _unpack(detail, error_details_pb2.RetryInfo) or retry_info
    return bad_request, retry_info


def _unpack(detail: AnyProto, kind: type[Any]) -> Any:
    message = kind()
    return message if detail.Unpack(message) else None


def _shorten(message: str) -> str:
    encoded = message.encode(errors="replace")
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"
