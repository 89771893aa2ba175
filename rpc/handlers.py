"""gRPC handlers of all four kinds, as interceptors wrap them."""

from collections.abc import Callable
from typing import Any, Final

import grpc

_KINDS: Final = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""By whether request and response stream: a handler's attribute, and what makes such a one."""


def rewrapped(
    handler: Any,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    wrap_deserializer: Callable[[Any], Any] = lambda deserialize: deserialize,
) -> Any:
    """Return a handler of the same kind that behaves as `wrap` makes of it.

    `handler` is what an interceptor's continuation gave, and not None. What parses a request is as
    `wrap_deserializer` makes of it; it is None where requests are taken as bytes.
    """
    kind, make = _KINDS[handler.request_streaming, handler.response_streaming]
    return make(
        wrap(getattr(handler, kind)),
        request_deserializer=wrap_deserializer(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )
