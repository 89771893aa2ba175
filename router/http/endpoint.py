"""Wraps the handlers of all routes, to add the call's id, trace context and error responses."""

import functools
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import structlog
from aiohttp import ClientConnectionResetError, web
from opentelemetry import context as otel_context

from contract.errors import InvalidArgumentError, UnimplementedError
from router.http.answers.sse import STARTED, WAITING, SseResponse
from router.http.errors import REQUEST_ID_HEADER, REQUEST_ID_PATTERN, failure_response
from router.http.strict_json import excerpt, json_bytes
from rpc.observe import telemetry

log = structlog.get_logger()

RESUMABLE_HEADER: Final = "X-Quire-Resumable"


@dataclass(slots=True)
class CallId:
    """A call's id: generated unless a header or the body sets it."""

    value: str


HttpHandler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
CallHandler: TypeAlias = Callable[[web.Request, CallId], Awaitable[web.StreamResponse]]


def endpoint(handler: CallHandler) -> HttpHandler:
    """Return a function that runs `handler` in the trace context that the client sent.

    The response gets the call's id in a header. An error that `handler` raises becomes a response.
    """

    @functools.wraps(handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        token = otel_context.attach(telemetry.extract(request.headers.get("traceparent", "")))
        call_id = CallId(uuid.uuid4().hex)
        try:
            if (header := request.headers.get(REQUEST_ID_HEADER)) is not None:
                call_id.value = _check_request_id(header)
            response: web.StreamResponse = await handler(request, call_id)
        except ClientConnectionResetError:
            raise  # the client is gone
        except Exception as error:
            if (waiting := request.get(WAITING)) is not None and waiting.is_held:
                response = await _fail(waiting, error, request, call_id)
            elif STARTED not in request:
                response = failure_response(error, path=request.path, request_id=call_id.value)
            else:  # a second head would be read as part of the body: close the connection instead
                log.exception("stream_failed", path=request.path, request_id=call_id.value)
                if request.transport is not None:
                    request.transport.close()
                response = request[STARTED]
        finally:
            otel_context.detach(token)
        if not response.prepared:
            response.headers.setdefault(REQUEST_ID_HEADER, call_id.value)
        return response

    return handle


async def _fail(
    waiting: SseResponse, error: Exception, request: web.Request, call_id: CallId
) -> web.StreamResponse:
    """Send an error as the only event of a stream whose head has been sent."""
    failure = failure_response(error, path=request.path, request_id=call_id.value)
    assert isinstance(failure.body, bytes), "it is JSON"
    await waiting.start(b"event: error\ndata: %b\n\n" % failure.body)
    await waiting.end()
    return waiting.response


def is_resumable(request: web.Request) -> bool:
    """Return whether the header `X-Quire-Resumable` is true; without the header, return False.

    Raises:
        InvalidArgumentError: The header is neither true nor false.
    """
    text = request.headers.get(RESUMABLE_HEADER, "false").lower()
    if text not in ("true", "false"):
        raise InvalidArgumentError(
            RESUMABLE_HEADER, f"is {excerpt(text)}; it must be true or false"
        )
    return text == "true"


def check_not_resumable(request: web.Request) -> None:
    """Raise UnimplementedError if `X-Quire-Resumable` is true; for routes without resumption."""
    if is_resumable(request):
        raise UnimplementedError(
            f"{RESUMABLE_HEADER} is true; streams of {request.path} cannot be resumed"
        )


def json_response(value: object, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=json_bytes(value), content_type="application/json", headers=headers)


def peer_of(remote: str | None) -> str:
    """Return the caller's address as gRPC writes it, but without a port, as in "ipv4:192.0.2.1"."""
    if remote is None:
        return "unknown"
    return f"ipv6:[{remote}]" if ":" in remote else f"ipv4:{remote}"


def _check_request_id(request_id: str) -> str:
    if not re.fullmatch(REQUEST_ID_PATTERN, request_id):
        raise InvalidArgumentError(
            REQUEST_ID_HEADER,
            f"is {excerpt(request_id)}; it must be 1 to 128 printable ASCII characters",
        )
    return request_id
