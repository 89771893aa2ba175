"""Checks the API key of every gRPC call, before any API sees it.

All calls need a key, except calls of `_OPEN_METHODS`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from contract.errors import UnauthenticatedError
from router import metrics
from router.access.api_keys import ApiKeys

_OPEN_METHODS: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Prefixes of methods that need no key. Their answers contain no user's data."""


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers UNAUTHENTICATED to calls without a valid key, before their messages are read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Check a call's key, and make the key's owner the `current_caller` of the call's task."""
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
