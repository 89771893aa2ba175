"""gRPC channel options for both ends of a connection: limits and keepalive."""

from dataclasses import dataclass
from typing import TypeAlias

ChannelOptions: TypeAlias = list[tuple[str, int]]

DEFAULT_MAX_MESSAGE_MB = 64
DEFAULT_MAX_METADATA_KB = 16
DEFAULT_MAX_CONCURRENT_STREAMS = 4096

_KIB = 1024
_MIB = 1024 * 1024
_MIN_PING_INTERVAL_MS = 10_000
_MAX_CONNECTIONS = "grpc.max_allowed_incoming_connections"


@dataclass(frozen=True, slots=True)
class Pings:
    """When to close a connection to a silent peer. Its calls then end as UNAVAILABLE.

    gRPC's own threads answer HTTP/2 pings. In our own server, the event loop answers; no request
    blocks it for long. So a busy peer answers. A stopped peer, or a peer behind a broken network,
    does not answer, even if the kernel still accepts data. The connection to such a peer is closed
    after at most `after_ms` + `timeout_ms`.
    """

    after_ms: int
    """Silence before a ping is sent."""
    timeout_ms: int
    """Longest wait for the answer to a ping."""
    are_sent_idly: bool
    """Whether pings are also sent while no call is active."""


PATIENT = Pings(after_ms=10_000, timeout_ms=20_000, are_sent_idly=True)
"""For calls that fail if the connection is lost: waiting for a slow peer is better than failing."""
QUICK = Pings(after_ms=1_000, timeout_ms=700, are_sent_idly=False)
"""For calls that can continue at another process. gRPC sends at most one ping per second."""


def channel_options(
    max_message_mb: int,
    max_metadata_kb: int = DEFAULT_MAX_METADATA_KB,
    pings: Pings = PATIENT,
    *,
    max_received_mb: int | None = None,
) -> ChannelOptions:
    """Return gRPC options with the limits and the keepalive of a server or a channel.

    `max_message_mb` limits sent and received messages; if `max_received_mb` is given, it limits
    received messages instead. The limits hold for decompressed messages. `max_metadata_kb` limits
    received metadata.
    """
    metadata_limit = max_metadata_kb * _KIB
    return [
        ("grpc.max_send_message_length", max_message_mb * _MIB),
        ("grpc.max_receive_message_length", (max_received_mb or max_message_mb) * _MIB),
        ("grpc.max_metadata_size", metadata_limit),
        ("grpc.absolute_max_metadata_size", metadata_limit),
        ("grpc.keepalive_time_ms", pings.after_ms),
        ("grpc.keepalive_timeout_ms", pings.timeout_ms),
        # Without this option, an unanswered ping ends the connection only after a minute.
        ("grpc.http2.ping_timeout_ms", pings.timeout_ms),
        ("grpc.keepalive_permit_without_calls", int(pings.are_sent_idly)),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC silently ignores the spelling with `min_recv_ping`.
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def server_options(
    max_message_mb: int,
    max_metadata_kb: int,
    max_concurrent_streams: int,
    *,
    max_received_mb: int | None = None,
    max_connections: int | None = None,
    shares_port: bool = False,
    accepts_compressed: bool = False,
) -> ChannelOptions:
    """Return the options of a server: those of `channel_options`, and some for servers only.

    With `shares_port`, other processes may listen on the same port; the kernel spreads connections
    among them.
    """
    most = [] if max_connections is None else [(_MAX_CONNECTIONS, max_connections)]
    codings = [] if accepts_compressed else [("grpc.compression_enabled_algorithms_bitset", 1)]
    return [
        *channel_options(max_message_mb, max_metadata_kb, max_received_mb=max_received_mb),
        *most,
        *codings,  # bit 0 is identity
        ("grpc.max_concurrent_streams", max_concurrent_streams),
        # By default, two processes could share a port by mistake, each with half of the calls.
        ("grpc.so_reuseport", int(shares_port)),
    ]
