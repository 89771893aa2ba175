"""Checks the API key of every call, gRPC or HTTP, before any API sees it.

All calls need a key except those exempted here.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

import grpc
import grpc.aio
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from contract.errors import UnauthenticatedError
from router import metrics
from router.access.api_keys import ApiKeys
from router.http.errors import error_response

_OPEN_METHODS: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Prefixes of methods that need no key. Their answers contain no user's data."""


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers UNAUTHENTICATED to calls without a key, without reading their messages."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Check the call's key, and set the caller in the call's own task."""
        if handler_call_details.method.startswith(_OPEN_METHODS):
            return await continuation(handler_call_details)
        values = [
            value
            for key, value in handler_call_details.invocation_metadata or ()
            if key == "authorization" and isinstance(value, str)
        ]
        try:
            self._keys.enter(values[0] if len(values) == 1 else None)
        except UnauthenticatedError as error:
            metrics.REQUESTS_REFUSED.labels("", error.code.name).inc()
            return grpc.stream_stream_rpc_method_handler(_refusal(error))
        return await continuation(handler_call_details)


def _refusal(error: UnauthenticatedError) -> Callable[[Any, Any], Awaitable[None]]:
    async def refuse(_requests: Any, _context: Any) -> None:
        raise error

    return refuse


def key_middleware(keys: ApiKeys, open_paths: Collection[str] = ()) -> Middleware:
    """Make the middleware that answers 401 to calls without a key.

    Reading `open_paths` needs no key; their answers must contain no user's data.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in open_paths and request.method in ("GET", "HEAD"):
            return await handler(request)
        try:
            keys.enter(_authorization(request.headers))
        except UnauthenticatedError as error:
            metrics.REQUESTS_REFUSED.labels("", error.code.name).inc()
            response = error_response(error, path=request.path)
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return await handler(request)

    return middleware


def _authorization(headers: Mapping[str, str]) -> str | None:
    """Return the authorization header; for Anthropic's clients, make it from `x-api-key`."""
    key = headers.get("x-api-key")
    return headers.get("Authorization", None if key is None else f"Bearer {key}")
