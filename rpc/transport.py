"""The gRPC channel arguments that both ends of a connection agree on."""

from typing import TypeAlias

ChannelOptions: TypeAlias = list[tuple[str, int]]

DEFAULT_MAX_MESSAGE_MB = 64
DEFAULT_MAX_METADATA_KB = 16
DEFAULT_MAX_CONCURRENT_STREAMS = 4096

_KIB = 1024
_MIB = 1024 * 1024
_PING_AFTER_MS = 20_000
_PING_TIMEOUT_MS = 10_000
_MIN_PING_INTERVAL_MS = 10_000


def channel_options(
    max_message_mb: int, max_metadata_kb: int = DEFAULT_MAX_METADATA_KB
) -> ChannelOptions:
    """Limits and keepalive for a server or a channel.

    A peer that vanishes without closing its connection is noticed in half a minute. Messages are
    bounded both ways by `max_message_mb` MiB (gRPC's own default is 4 MiB, and only one way), what
    comes as metadata by `max_metadata_kb` KiB.
    """
    limit = max_message_mb * _MIB
    metadata_limit = max_metadata_kb * _KIB
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_metadata_size", metadata_limit),
        ("grpc.absolute_max_metadata_size", metadata_limit),
        ("grpc.keepalive_time_ms", _PING_AFTER_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # The spelling with `min_recv_` is ignored silently.
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def server_options(
    max_message_mb: int, max_metadata_kb: int, max_concurrent_streams: int
) -> ChannelOptions:
    """Those of `channel_options`, and what holds for servers only."""
    return [
        *channel_options(max_message_mb, max_metadata_kb),
        ("grpc.max_concurrent_streams", max_concurrent_streams),
        # Else two processes share a port in silence, each with half of the calls.
        ("grpc.so_reuseport", 0),
    ]
