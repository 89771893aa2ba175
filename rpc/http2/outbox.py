"""Sends a connection's messages, and the frames that h2 makes, in the order in which they came.

h2 takes 10 us for a DATA frame. So this module makes the DATA frames of messages itself, and
subtracts their bytes from h2's windows, as `H2Connection.send_data` does. h2 makes all other frames
(headers, settings, pings, resets).
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

from h2.connection import H2Connection
from h2.stream import H2Stream

_FULL_BYTES: Final = 64 * 1024
"""Frames are collected until the event loop's turn ends, or until their total size reaches this."""

_FRAME_AND_PREFIX: Final = struct.Struct(">BHBBIBI")
"""A DATA frame's header (length in 8 and 16 bits, type, flags, stream), then a message's prefix
(compression flag, length)."""
_FRAME: Final = struct.Struct(">BHBBI")
_PREFIX: Final = struct.Struct(">BI")


def _drop(_data: bytes, _num_frames: int) -> None:
    pass


class OutStream:
    """The outgoing half of a stream."""

    __slots__ = ("_turn", "h2", "has_ended", "is_queued", "num", "sent", "unsent")

    def __init__(self, h2: H2Stream) -> None:
        self.h2 = h2
        self.num: int = h2.stream_id
        self.unsent: memoryview | None = None
        """Bytes that wait for room: the rest of a message, and the messages after it."""
        self.sent = asyncio.Event()
        """Set when `unsent` becomes None."""
        self.is_queued = False
        """Whether the stream is in the outbox's queue.

        If `unsent` has bytes and the stream is not in the queue, the client must first widen the
        stream's window.
        """
        self.has_ended = False
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Wait until all bytes have been sent or the stream has ended.

        If several tasks wait, each continues only when the bytes of the task before it are sent.
        """
        async with self._turn:
            while self.unsent is not None:
                await self.sent.wait()


class Outbox:
    """Sends messages as far as the client's windows and the transport's buffer have room."""

    def __init__(self, h2: H2Connection, write: Callable[[bytes, int], None]) -> None:
        """`write` sends bytes; its second argument counts the DATA frames in them."""
        self._h2 = h2
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._num_h2_parts = 0
        self._num_bytes = 0
        self._queue: deque[OutStream] = deque()
        """Streams whose messages wait for the connection's window or the transport."""
        self._is_paused = False
        self._is_flushing = False

    def put(self, stream: OutStream, message: bytes) -> None:
        """Send as much of a message as there is room for; the rest follows later.

        The message follows the bytes in `stream.unsent`. After `end`, messages are dropped. A
        stream has unsent bytes only while a flow-control window is used up or the transport is
        full.
        """
        num_bytes = len(message) + _PREFIX.size
        h2, own = self._h2, stream.h2
        if (
            num_bytes > h2.outbound_flow_control_window
            or num_bytes > own.outbound_flow_control_window
            or num_bytes > h2.max_outbound_frame_size
            or self._is_paused
            or stream.has_ended
        ):
            self._put_slowly(stream, message)
            return
        h2.outbound_flow_control_window -= num_bytes
        own.outbound_flow_control_window -= num_bytes
        head = _FRAME_AND_PREFIX.pack(
            num_bytes >> 16, num_bytes & 0xFFFF, 0, 0, stream.num, 0, len(message)
        )
        self._add(head + message)

    def _put_slowly(self, stream: OutStream, message: bytes) -> None:
        if stream.has_ended:
            return
        data = _PREFIX.pack(0, len(message)) + message
        if stream.unsent is not None:
            stream.unsent = memoryview(b"".join((stream.unsent, data)))
            return
        stream.unsent = memoryview(data)
        stream.sent.clear()
        stream.is_queued = True
        self._queue.append(stream)
        self._advance()

    @property
    def is_full(self) -> bool:
        """Whether the collected frames have so many bytes that they should be written now."""
        return self._num_bytes >= _FULL_BYTES

    def end(self, stream: OutStream) -> None:
        """Drop a stream's unsent bytes, and send no more messages on the stream."""
        stream.has_ended = True
        stream.unsent = None
        stream.sent.set()

    def widen(self, stream: OutStream | None) -> None:
        """Send more, because the client has widened a window.

        The window is that of `stream`; if `stream` is None, it is the connection's.
        """
        if stream is not None and stream.unsent is not None and not stream.is_queued:
            stream.is_queued = True
            self._queue.append(stream)
        self._advance()

    def pause(self) -> None:
        """Stop sending messages, because the transport's buffer is full."""
        self._is_paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._is_paused = False
        self._advance()

    def send_frames(self) -> None:
        """Send the frames that h2 has made. Call this after each h2 method that makes frames."""
        if data := self._h2.data_to_send():
            self.add(data)

    def close(self) -> None:
        """Send nothing more, and drop the reference to the connection."""
        self._write = _drop

    def add(self, frames: bytes) -> None:
        """Send frames other than DATA frames of messages."""
        self._num_h2_parts += 1
        self._add(frames)

    def _add(self, frames: bytes) -> None:
        self._parts.append(frames)
        self._num_bytes += len(frames)
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write all collected frames."""
        self._is_flushing = False
        if not self._parts:
            return
        data, num_frames = b"".join(self._parts), len(self._parts) - self._num_h2_parts
        self._parts.clear()
        self._num_h2_parts = self._num_bytes = 0
        self._write(data, num_frames)

    def _advance(self) -> None:
        """Send frames of the queued streams in turn, while there is room."""
        queue = self._queue
        while queue and not self._is_paused and self._h2.outbound_flow_control_window > 0:
            stream = queue.popleft()
            if self._send_frame(stream):
                queue.append(stream)
            else:
                stream.is_queued = False

    def _send_frame(self, stream: OutStream) -> bool:
        """Send one frame of a stream's unsent bytes; return whether to try another frame.

        False: nothing is unsent, or the client must widen the stream's window first.
        """
        h2, own, unsent = self._h2, stream.h2, stream.unsent
        if unsent is None:
            return False
        num_bytes = min(
            len(unsent),
            h2.outbound_flow_control_window,
            own.outbound_flow_control_window,
            h2.max_outbound_frame_size,
        )
        if num_bytes <= 0:  # the stream waits for `widen`; a client may make a window negative
            return False
        h2.outbound_flow_control_window -= num_bytes
        own.outbound_flow_control_window -= num_bytes
        head = _FRAME.pack(num_bytes >> 16, num_bytes & 0xFFFF, 0, 0, stream.num)
        self._add(head + unsent[:num_bytes])
        if num_bytes == len(unsent):
            stream.unsent = None
            stream.sent.set()
        else:
            stream.unsent = unsent[num_bytes:]
        if self.is_full:
            self.flush()  # the transport may pause
        return stream.unsent is not None
