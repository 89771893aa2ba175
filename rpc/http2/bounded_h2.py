"""`H2Connection` of the library h2, with limits on the work that a client's frame can cause."""

from typing import Any, Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, RequestReceived
from h2.exceptions import DenialOfServiceError, StreamClosedError
from h2.frame_buffer import FrameBuffer
from h2.settings import SettingCodes, Settings
from hpack import Decoder, HPACKDecodingError
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, SettingsFrame

from rpc.http2.inbox import WINDOW_BYTES
from rpc.http2.limits import ConnectionLimits

_LENGTH_BYTES: Final = 3
"""Size of the length field, with which each frame begins."""
_FRAMES_AT_ONCE: Final = 32
"""One `receive_data` parses at most this many frames; a frame takes 10 to 1000 us."""
_STREAMS_PER_FRAME: Final = 50
"""Changing the windows of this many streams takes as long as parsing one frame."""
_MOST_TABLE_BYTES: Final = 4096
"""Maximum size of the table with which hpack compresses the headers that we send: for each header,
hpack searches the table entry by entry."""
_MOST_TABLE_CHANGES: Final = 2
"""How often one block of headers may change the size of the table that decompresses the client's
headers (RFC 7541, 4.2). Otherwise a client could send many changes: each takes one byte to send,
but 1 us to apply."""
_USED_SETTINGS: Final = frozenset(
    (
        SettingCodes.HEADER_TABLE_SIZE,
        SettingCodes.ENABLE_PUSH,
        SettingCodes.INITIAL_WINDOW_SIZE,
        SettingCodes.MAX_FRAME_SIZE,
    )
)
"""The client's settings that `BoundedH2` passes to h2. `BoundedH2` drops all other settings: h2
would keep up to 65,536 settings, and check all of them at each SETTINGS frame."""
_SETTINGS_OF_STREAMS: Final = frozenset(
    (SettingCodes.INITIAL_WINDOW_SIZE, SettingCodes.MAX_FRAME_SIZE)
)
"""The settings whose changes affect all streams."""


class _Frames(FrameBuffer):
    """Yields at most `num_left` frames; refuses a too large frame once its length has arrived."""

    num_left = _FRAMES_AT_ONCE

    def __next__(self) -> Frame:
        if not self.num_left:
            raise StopIteration
        self.num_left -= 1
        if len(self._data) >= _LENGTH_BYTES:
            self._validate_frame_length(int.from_bytes(self._data[:_LENGTH_BYTES], "big"))
        return super().__next__()


class _Decoder(Decoder):
    """Decodes headers; refuses a block that resizes the decompression table more than twice."""

    _num_changes = 0

    def decode(self, data: bytes, raw: bool = False) -> Any:
        self._num_changes = 0
        # content-length is dropped, because a call whose data has another length would end the
        # connection.
        return [each for each in super().decode(data, raw) if each[0] != b"content-length"]

    def _update_encoding_context(self, data: bytes | memoryview) -> int:
        self._num_changes += 1
        if self._num_changes > _MOST_TABLE_CHANGES:
            raise HPACKDecodingError("too many changes of the table's size")
        return super()._update_encoding_context(data)


def _is_use(event: Event) -> bool:
    """Whether an event is a request, or data that is not empty."""
    if isinstance(event, DataReceived):
        return bool(event.data)
    return isinstance(event, RequestReceived)


class BoundedH2(H2Connection):
    """The server's side of a connection; open streams continue after a client's GOAWAY.

    The caller must call `forget` for each stream that has closed.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        # If h2 checked headers, one malformed call would end all calls of the connection.
        super().__init__(
            H2Configuration(
                client_side=False,
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: limits.max_metadata_bytes,
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
            },
        )
        self.incoming_buffer: _Frames = _Frames(server=True)
        self.decoder = _Decoder()
        # Metadata above the limit is refused with a status; above this size it ends the connection.
        self._max_headers_bytes = 4 * limits.max_metadata_bytes
        self.decoder.max_header_list_size = self._max_headers_bytes
        self.num_idle_frames = 0
        """Number of frames without a request or data in the last `receive_data`.

        A frame that changes the windows of many streams counts more than once.
        """

    @property
    def has_more(self) -> bool:
        """Whether `receive_data(b"")` may find further frames in the data of earlier calls."""
        return self.incoming_buffer.num_left == 0

    def receive_data(self, data: bytes) -> list[Event]:  # type: ignore[override] # no other buffers
        """Parse a few frames; see `has_more`.

        Raises:
            ProtocolError: The client broke the protocol. h2 has made a GOAWAY; send it, and close
                the connection.
        """
        self.incoming_buffer.num_left = _FRAMES_AT_ONCE
        self.num_idle_frames = 0
        return super().receive_data(data)

    def forget(self, stream_id: int) -> None:
        """Free a stream, if it is closed."""
        stream = self.streams.get(stream_id)
        if stream is not None and stream.closed:
            del self.streams[stream_id]
            self._closed_streams[stream_id] = stream.closed_by

    def close(self) -> None:
        """Receive no more frames, and clear the table of methods that handle them.

        The table refers to the methods, the methods to this object, and this object to the table.
        Clearing the table breaks this cycle, so the object's memory is freed as soon as the object
        is no longer used.
        """
        self._frame_dispatch_table.clear()

    def _open_streams(self, _remainder: int) -> int:
        # h2's own method looks at all streams, and h2 calls it for each new stream.
        return len(self.streams)

    def _receive_frame(self, frame: Frame) -> list[Event]:
        if isinstance(frame, HeadersFrame) and len(frame.data) > self._max_headers_bytes:
            raise DenialOfServiceError("too large a block of headers")
        happened = super()._receive_frame(frame)
        self.num_idle_frames += not any(map(_is_use, happened))
        self.forget(frame.stream_id)
        return happened

    # The next two methods drop tracebacks: an error and its traceback refer to each other, so both
    # would stay in memory until a garbage collection.

    def _receive_headers_frame(self, frame: HeadersFrame) -> tuple[list[Frame], list[Event]]:
        try:
            return super()._receive_headers_frame(frame)
        except StreamClosedError as error:
            raise error.with_traceback(None)  # noqa: B904

    def _handle_data_on_closed_stream(
        self, happened: list[Event], error: StreamClosedError, frame: DataFrame
    ) -> tuple[list[Frame], list[Event]]:
        error.__traceback__ = None
        return super()._handle_data_on_closed_stream(happened, error, frame)

    def _receive_settings_frame(self, frame: SettingsFrame) -> tuple[list[Frame], list[Event]]:
        known, changed = self.remote_settings, {}
        for code, value in frame.settings.items():
            most = _MOST_TABLE_BYTES if code == SettingCodes.HEADER_TABLE_SIZE else value
            if code in _USED_SETTINGS and known[code] != min(value, most):
                changed[code] = min(value, most)
        frame.settings = changed
        if changed.keys() & _SETTINGS_OF_STREAMS:
            self.num_idle_frames += len(self.streams) // _STREAMS_PER_FRAME
        return super()._receive_settings_frame(frame)

    def _receive_goaway_frame(self, _frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        # h2 would end all streams, but the client still reads responses on open streams.
        return [], []
