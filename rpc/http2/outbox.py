"""What goes out on a connection: h2's frames and messages, in the order in which they were made.

h2 takes 10 us for a DATA frame, so messages do not pass through it: their frames are made here, and
their bytes are subtracted from h2's windows as `H2Connection.send_data` does. All else (headers,
settings, pings, resets) is h2's.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

from h2.connection import H2Connection
from h2.stream import H2Stream

_FULL_BYTES: Final = 64 * 1024
"""What may collect until the end of the event loop's turn."""

_FRAME_AND_PREFIX: Final = struct.Struct(">BHBBIBI")
"""A DATA frame's head: length in 8 and 16 bits, type, flags, stream; and a message's prefix:
whether it is compressed, and its length."""
_FRAME: Final = struct.Struct(">BHBBI")
_PREFIX: Final = struct.Struct(">BI")


def _drop(_data: bytes, _num_frames: int) -> None:
    pass


class OutStream:
    """The outgoing half of a stream."""

    __slots__ = ("h2", "has_ended", "is_queued", "num", "sent", "unsent")

    def __init__(self, h2: H2Stream) -> None:
        self.h2 = h2
        self.num: int = h2.stream_id
        self.unsent: memoryview | None = None
        """The rest of a message that waits for room."""
        self.sent = asyncio.Event()
        """Set when `unsent` has been sent or forgotten."""
        self.is_queued = False
        """Whether `unsent` waits for the connection, and not for the stream's own window."""
        self.has_ended = False

    async def wait(self) -> None:
        """Wait until all has been sent, or the stream has ended."""
        while self.unsent is not None:
            await self.sent.wait()


class Outbox:
    """Sends messages as far as the client's windows and the transport admit it."""

    def __init__(self, h2: H2Connection, write: Callable[[bytes, int], None]) -> None:
        """Take frames from `h2`; `write` gets bytes, and how many messages' frames are in them."""
        self._h2 = h2
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._num_h2_parts = 0
        self._num_bytes = 0
        self._queue: deque[OutStream] = deque()
        """The streams whose messages wait for the connection."""
        self._is_paused = False
        self._is_flushing = False

    def put(self, stream: OutStream, message: bytes) -> None:
        """Send a message, or as much as there is room for; the rest follows as room appears.

        The stream must have no `unsent`; nothing is sent after its end.
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
        stream.unsent = memoryview(_PREFIX.pack(0, len(message)) + message)
        stream.sent.clear()
        stream.is_queued = True
        self._queue.append(stream)
        self._advance()

    @property
    def is_full(self) -> bool:
        """Whether so much has collected that it should be written at once."""
        return self._num_bytes >= _FULL_BYTES

    def end(self, stream: OutStream) -> None:
        """Forget what waits on a stream, and accept no more for it."""
        stream.has_ended = True
        stream.unsent = None
        stream.sent.set()

    def widen(self, stream: OutStream | None) -> None:
        """Continue after the client has widened a window: a stream's, or the connection's."""
        if stream is not None and stream.unsent is not None and not stream.is_queued:
            stream.is_queued = True
            self._queue.append(stream)
        self._advance()

    def pause(self) -> None:
        """Send no more messages: the transport's buffer is full."""
        self._is_paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._is_paused = False
        self._advance()

    def take(self) -> None:
        """Take the frames that h2 has made; to be called after each call of h2 that makes some."""
        if data := self._h2.data_to_send():
            self.add(data)

    def close(self) -> None:
        """Send nothing more, and refer to nobody who would."""
        self._write = _drop

    def add(self, frames: bytes) -> None:
        """Send frames other than messages'."""
        self._num_h2_parts += 1
        self._add(frames)

    def _add(self, frames: bytes) -> None:
        self._parts.append(frames)
        self._num_bytes += len(frames)
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write all frames."""
        self._is_flushing = False
        if not self._parts:
            return
        data, num_frames = b"".join(self._parts), len(self._parts) - self._num_h2_parts
        self._parts.clear()
        self._num_h2_parts = self._num_bytes = 0
        self._write(data, num_frames)

    def _advance(self) -> None:
        """Send frames of the waiting messages in turn."""
        queue = self._queue
        while queue and not self._is_paused and self._h2.outbound_flow_control_window > 0:
            stream = queue.popleft()
            if self._send_frame(stream):
                queue.append(stream)
            else:
                stream.is_queued = False

    def _send_frame(self, stream: OutStream) -> bool:
        """Send a frame of a stream's message; return whether it could send another."""
        h2, own, unsent = self._h2, stream.h2, stream.unsent
        if unsent is None:
            return False
        num_bytes = min(
            len(unsent),
            h2.outbound_flow_control_window,
            own.outbound_flow_control_window,
            h2.max_outbound_frame_size,
        )
        if num_bytes <= 0:  # `widen` continues; a client may even make its window negative
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
