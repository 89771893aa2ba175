"""Looks at the API key of every call, by gRPC or HTTP, before anything else does.

What is not exempted here needs a key, whichever face it belongs to.
"""

from collections.abc import Awaitable, Callable, Collection
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
"""They tell nothing of anybody's; a probe has no key."""


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers UNAUTHENTICATED to a call without a key, and does not read its messages."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Let the call pass, as its caller's: each call has a task of its own."""
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
            metrics.REQUESTS_REFUSED.labels(error.code.name).inc()
            return grpc.stream_stream_rpc_method_handler(_refusal(error))
        return await continuation(handler_call_details)


def _refusal(error: UnauthenticatedError) -> Callable[[Any, Any], Awaitable[None]]:
    async def refuse(_requests: Any, _context: Any) -> None:
        raise error

    return refuse


def key_middleware(keys: ApiKeys, open_paths: Collection[str] = ()) -> Middleware:
    """Make the middleware that answers 401 to a call without a key; probes are outside of it.

    `open_paths` can be got without one: they must tell nothing of anybody's.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in open_paths and request.method in ("GET", "HEAD"):
            return await handler(request)
        try:
            keys.enter(request.headers.get("Authorization"))
        except UnauthenticatedError as error:
            metrics.REQUESTS_REFUSED.labels(error.code.name).inc()
            response = error_response(error)
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return await handler(request)

    return middleware
