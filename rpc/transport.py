"""The gRPC channel arguments that both ends of a connection agree on."""

from dataclasses import dataclass
from typing import TypeAlias

ChannelOptions: TypeAlias = list[tuple[str, int]]

DEFAULT_MAX_MESSAGE_MB = 64
DEFAULT_MAX_METADATA_KB = 16
DEFAULT_MAX_CONCURRENT_STREAMS = 4096

_KIB = 1024
_MIB = 1024 * 1024
_MIN_PING_INTERVAL_MS = 10_000


@dataclass(frozen=True, slots=True)
class Pings:
    """When a connection whose other end says nothing is given up; its calls end as UNAVAILABLE.

    HTTP/2 pings are answered by gRPC's own threads: a peer that is merely busy answers, one that
    is stopped, or behind a network that has gone, does not, though the kernel may take what is
    sent to it. Both numbers together are how long that takes at most.
    """

    after_ms: int
    """How long nothing is heard before one is sent."""
    timeout_ms: int
    """How long the answer may take."""
    are_sent_idly: bool
    """Whether also while there is no call."""


PATIENT = Pings(after_ms=10_000, timeout_ms=20_000, are_sent_idly=True)
"""For calls that are lost with their connection: a pause is better."""
QUICK = Pings(after_ms=1_000, timeout_ms=2_000, are_sent_idly=False)
"""For calls that can go on elsewhere. gRPC sends no more than one ping a second."""


def channel_options(
    max_message_mb: int, max_metadata_kb: int = DEFAULT_MAX_METADATA_KB, pings: Pings = PATIENT
) -> ChannelOptions:
    """Limits and keepalive for a server or a channel.

    Messages are bounded both ways by `max_message_mb` MiB (gRPC's own default is 4 MiB, and only
    one way), what comes as metadata by `max_metadata_kb` KiB.
    """
    limit = max_message_mb * _MIB
    metadata_limit = max_metadata_kb * _KIB
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_metadata_size", metadata_limit),
        ("grpc.absolute_max_metadata_size", metadata_limit),
        ("grpc.keepalive_time_ms", pings.after_ms),
        ("grpc.keepalive_timeout_ms", pings.timeout_ms),
        # Without it an unanswered ping ends the connection after a minute, whatever the others say.
        ("grpc.http2.ping_timeout_ms", pings.timeout_ms),
        ("grpc.keepalive_permit_without_calls", int(pings.are_sent_idly)),
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
