"""Opens channels to other processes."""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from rpc.observe import telemetry
from rpc.security.tls import ClientTls, channel_credentials, is_local
from rpc.transport import DEFAULT_MAX_MESSAGE_MB, PATIENT, Pings, channel_options


def open_channel(
    target: str,
    max_message_mb: int = DEFAULT_MAX_MESSAGE_MB,
    tls: ClientTls | None = None,
    *,
    pings: Pings = PATIENT,
) -> grpc.aio.Channel:
    """Open a channel to "host:port" or "unix:/path"; the channel connects at its first call.

    Calls with a single request carry the current trace context. Long-lived streams carry none: a
    stream serves many requests, and its messages name their traces. Unix sockets do not use TLS.
    """
    # The type stubs do not accept a list of different interceptors.
    interceptors: Any = [_UnaryUnaryTrace(), _UnaryStreamTrace()]
    options = _options(max_message_mb, tls, pings)
    if tls is None or is_local(target):
        return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
    return grpc.aio.secure_channel(
        target, channel_credentials(tls), options=options, interceptors=interceptors
    )


def open_blocking_channel(
    target: str,
    max_message_mb: int = DEFAULT_MAX_MESSAGE_MB,
    tls: ClientTls | None = None,
    *,
    pings: Pings = PATIENT,
) -> grpc.Channel:
    """Open a blocking channel; the caller adds the trace context to its calls."""
    options = _options(max_message_mb, tls, pings)
    if tls is None or is_local(target):
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, channel_credentials(tls), options=options)


def _options(max_message_mb: int, tls: ClientTls | None, pings: Pings) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        *channel_options(max_message_mb, pings=pings),
        # Reconnect to a restarted peer within seconds instead of gRPC's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Enough time for an attempt with TLS, over a long distance, or to a busy peer.
        ("grpc.min_reconnect_backoff_ms", 2_000),
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def _traced(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    injected = telemetry.inject_metadata()
    metadata = details.metadata
    if not injected or (metadata is not None and telemetry.TRACEPARENT in metadata):
        return details
    merged = grpc.aio.Metadata(*(metadata or ()), *injected)
    return grpc.aio.ClientCallDetails(
        method=details.method,
        timeout=details.timeout,
        metadata=merged,
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
    )


# gRPC accepts an interceptor for only one kind of call, so two kinds need two classes.
class _UnaryUnaryTrace(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_traced(client_call_details), request)


class _UnaryStreamTrace(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_traced(client_call_details), request)
