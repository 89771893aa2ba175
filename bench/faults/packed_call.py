"""Makes a gRPC call whose requests arrive together, many in each frame.

gRPC's own clients cannot do this: they write one message at a time.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import grpc
import h2.config
import h2.connection
import h2.events

_MOST_READ_BYTES = 65_536


async def packed_call(socket: str, method: str, messages: Sequence[bytes]) -> grpc.StatusCode:
    """Send all messages on one call to a Unix socket; return its status when it has ended."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        return await _call(reader, writer, method, messages)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _call(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    method: str,
    messages: Sequence[bytes],
) -> grpc.StatusCode:
    http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    http2.initiate_connection()
    http2.send_headers(
        1,
        (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ),
    )
    data = b"".join(b"\0" + len(each).to_bytes(4, "big") + each for each in messages)
    at = 0
    has_ended = False
    while True:
        while not has_ended and (
            room := min(http2.local_flow_control_window(1), http2.max_outbound_frame_size)
        ):
            has_ended = at + room >= len(data)
            http2.send_data(1, data[at : at + room], end_stream=has_ended)
            at += room
        writer.write(http2.data_to_send())
        received = await reader.read(_MOST_READ_BYTES)
        if not received:
            return grpc.StatusCode.UNAVAILABLE
        for event in http2.receive_data(received):
            match event:
                case h2.events.DataReceived():
                    http2.acknowledge_received_data(event.flow_controlled_length, 1)
                case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                    if (status := dict(event.headers).get("grpc-status")) is not None:
                        return _STATUSES[int(status)]
                case h2.events.StreamReset() | h2.events.ConnectionTerminated():
                    return grpc.StatusCode.UNAVAILABLE


_STATUSES = {status.value[0]: status for status in grpc.StatusCode}
