"""One client's connection: runs HTTP/2 with the library h2, starts calls, and enforces limits."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol, cast

import grpc
import structlog
from h2 import events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from rpc.http2.bounded_h2 import BoundedH2
from rpc.http2.call import Call
from rpc.http2.headers import Headers, Metadata, RefusedRequestError, read_request
from rpc.http2.inbox import Inbox
from rpc.http2.limits import ConnectionLimits, FrameBudget
from rpc.http2.outbox import Outbox, OutStream
from rpc.http2.turns import ParsingTurns
from rpc.security.client_certificates import auth_context

_PREFACE_S: Final = 10.0
"""How long a new connection waits for the client's first SETTINGS frame."""
_LINGER_S: Final = 2.0
"""How long a connection that closes may take to send its remaining bytes."""
_RECEIVE_WINDOW_BYTES: Final = 1024 * 1024
"""Flow-control window of the connection, for all its streams together."""
_MOST_UNREAD_BYTES: Final = 1024 * 1024
"""While more bytes than this wait to be sent, nothing is read from the client. Otherwise answers to
the client's pings could pile up."""
_LARGE_AT_ONCE: Final = 64
"""How many messages larger than a stream's window may arrive on a connection at the same time."""
_SLICE_BYTES: Final = 4096
"""Size of the slices in which received bytes are parsed, so that many small frames do not block the
event loop."""
_CALLS_AT_ONCE: Final = 100
"""Maximum number of handlers that are cancelled in one turn of the event loop. Each of them takes
20 us or more."""

log = structlog.get_logger()

# At level debug, hpack logs the headers that it decodes, including API keys.
logging.getLogger("hpack").setLevel(logging.INFO)


class Host(Protocol):
    """The part of the server that its connections use."""

    limits: ConnectionLimits
    connections: set["Connection"]
    is_stopping: bool
    turns: ParsingTurns

    async def find_handler(self, method: str, metadata: Metadata) -> Any:
        """Return the handler of a call; None: the method is unknown."""


def _peer_of(transport: asyncio.BaseTransport) -> str:
    """Return a client's address, as gRPC writes it."""
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "unix:"
    host, port = name[:2]
    if ":" not in host:
        return f"ipv4:{host}:{port}"
    if host.startswith("::ffff:") and "." in host:
        return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
    return f"ipv6:%5B{host}%5D:{port}"


class Connection(asyncio.Protocol):
    """A client's connection; while it is open, it is in the server's `connections`."""

    outbox: Outbox
    peer: str

    def __init__(self, server: Host) -> None:
        self.limits = server.limits
        self.tasks: set[asyncio.Task[None]] = set()
        """The running handlers, including handlers whose calls have already ended."""
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._transport = cast("asyncio.Transport", None)
        self._calls: dict[int, Call] = {}
        """Calls by stream id, until the status is sent or the client has cancelled the call."""
        self._waiting: dict[int, Call] = {}
        """The calls in `_calls` whose handlers have not started, oldest first."""
        self._backlog = bytearray()
        """Received bytes that have not been given to h2 yet."""
        self._is_waiting = False
        """Whether `parse` is still to be called for received bytes."""
        self._num_received = 0
        """Number of bytes of data received since the connection's window was last widened."""
        self._room = asyncio.Semaphore(_LARGE_AT_ONCE)
        """Limits how many messages larger than a stream's window arrive at the same time."""
        self._is_reading = True
        self._is_leaving = False
        self._is_closed = False
        self._auth: Mapping[str, list[bytes]] | None = None

    # --- asyncio's calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start HTTP/2, unless the server is full or stopping, or TLS chose another protocol."""
        self._transport = cast("asyncio.Transport", transport)
        self.peer = _peer_of(transport)
        most = self.limits.max_connections
        self._timer = self._loop.call_later(_PREFACE_S, self._abort)
        is_full = most is not None and len(self._server.connections) >= most
        tls = transport.get_extra_info("ssl_object")
        is_other = tls is not None and tls.selected_alpn_protocol() != "h2"
        if is_full or is_other or self._server.is_stopping:
            self._abort()
            return
        self._server.connections.add(self)
        self._heard_at = self._loop.time()
        self._is_pinged = False
        self._budget = FrameBudget(self.limits.max_concurrent_streams, self._heard_at)
        self._h2 = h2 = BoundedH2(self.limits)
        h2.initiate_connection()
        h2.increment_flow_control_window(_RECEIVE_WINDOW_BYTES - h2.inbound_flow_control_window)
        self.outbox = Outbox(h2, self._write)
        self.outbox.send_frames()

    def connection_lost(self, _exc: Exception | None) -> None:
        """End all calls."""
        self._close()
        self._timer.cancel()
        if self in self._server.connections:
            self._server.connections.remove(self)
            # Break reference cycles: if many connections end together, collecting all their garbage
            # at once would take too long.
            self._h2.close()
            self.outbox.close()
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        """Stop sending messages, because the transport's buffer is full."""
        self.outbox.pause()

    def resume_writing(self) -> None:
        """Continue to send messages."""
        self.outbox.resume()
        self._read_or_not()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; large amounts are parsed in slices."""
        if self._is_closed:
            return
        self._heard_at = self._loop.time()
        if self._is_pinged:
            self._is_pinged = False
            self._timer.cancel()
            self._keep_alive()
        self._backlog += data
        if not self._is_waiting:
            self._is_waiting = True
            self._server.turns.add(self)
            if self._is_waiting:
                self._read_or_not()

    # --- what the client sends ------------------------------------------------------------------

    def parse(self) -> bool:
        """Parse a slice of the received bytes; return whether bytes are left to parse."""
        if not self._is_closed:
            part = b""
            if not self._h2.has_more:
                part = bytes(self._backlog[:_SLICE_BYTES])
                del self._backlog[:_SLICE_BYTES]
            try:
                self._receive(part)
            except Exception:
                log.exception("an HTTP/2 connection failed", peer=self.peer)
                self._abort()
        self._is_waiting = not self._is_closed and (bool(self._backlog) or self._h2.has_more)
        if not self._is_waiting:
            self._read_or_not()
        return self._is_waiting

    def _read_or_not(self) -> None:
        if self._is_closed or self._transport.is_closing():
            return
        is_unread = self._transport.get_write_buffer_size() > _MOST_UNREAD_BYTES
        if (self._is_waiting or is_unread) is self._is_reading:
            self._is_reading = not self._is_reading
            if self._is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _receive(self, data: bytes) -> None:
        try:
            happened = self._h2.receive_data(data)
        except ProtocolError as error:  # h2 has prepared a GOAWAY
            log.debug("an HTTP/2 client broke the protocol", peer=self.peer, reason=str(error))
            self.close()
            return
        self.outbox.send_frames()  # settings must be acknowledged before they take effect
        self._spend(self._h2.num_idle_frames)
        for event in happened:
            if self._is_closed:
                return
            self._on_event(event)
        self.outbox.send_frames()

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.WindowUpdated():
                if not event.stream_id:
                    self.outbox.widen(None)
                elif (call := self._calls.get(event.stream_id)) is not None:
                    self.outbox.widen(call.stream)
            case events.RequestReceived():
                self._begin(event.stream_id, event.headers)
            case events.DataReceived():
                self._on_data(event)
            case events.StreamEnded():
                if (call := self._calls.get(event.stream_id)) is not None:
                    call.inbox.end()
            case events.StreamReset():
                self._waiting.pop(event.stream_id, None)
                if (call := self._calls.pop(event.stream_id, None)) is not None:
                    call.leave()
            case events.RemoteSettingsChanged():
                self._timer.cancel()
                self._keep_alive()
                if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
                    for call in self._calls.values():
                        self.outbox.widen(call.stream)

    def _on_data(self, event: events.DataReceived) -> None:
        num_bytes = event.flow_controlled_length or 0
        self._num_received += num_bytes
        if self._num_received > _RECEIVE_WINDOW_BYTES // 2:
            self._h2.increment_flow_control_window(self._num_received)
            self._num_received = 0
        if (call := self._calls.get(event.stream_id)) is not None:
            call.inbox.feed(event.data or b"", num_bytes)

    def _spend(self, num_frames: int) -> None:
        if not self._budget.spend(num_frames, self._loop.time()):
            self._refuse(ErrorCodes.ENHANCE_YOUR_CALM, "too many frames without a request or data")

    # --- calls ----------------------------------------------------------------------------------

    def _begin(self, stream_id: int, headers: Headers) -> None:
        h2_stream = self._h2.streams.get(stream_id)
        if h2_stream is None or h2_stream.closed:  # the same bytes also reset the stream
            return
        if self._is_leaving:
            self._reset(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        stream = OutStream(h2_stream)
        try:
            request = read_request(
                headers,
                self.limits.max_metadata_bytes,
                accepts_compressed=self.limits.accepts_compressed,
            )
        except RefusedRequestError as refused:
            self.send_headers(stream, refused.answer, end=True)
            return

        def allow(num_bytes: int) -> None:
            if not self._is_closed and h2_stream.open:
                self._h2.increment_flow_control_window(num_bytes, stream_id)
                self.outbox.send_frames()

        inbox = Inbox(self.limits.max_received_bytes, request.encoding, allow, self._room)
        self._calls[stream_id] = call = Call(self, stream, inbox, request)
        self._waiting[stream_id] = call
        self._start_calls()

    def _start_calls(self) -> None:
        # The limit counts handlers, because a client may reset streams whose handlers still run,
        # and open others.
        while self._waiting and len(self.tasks) < self.limits.max_concurrent_streams:
            call = self._waiting.pop(next(iter(self._waiting)))
            task = call.start(self._server.find_handler)
            self.tasks.add(task)
            task.add_done_callback(self._on_call_done)

    def _on_call_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._start_calls()
        self._close_if_idle()

    def send_headers(self, stream: OutStream, headers: Headers, *, end: bool = False) -> None:
        """Send headers; if `end` is true, the stream ends with them."""
        if self._is_closed or stream.h2.closed:
            return
        self._budget.earn(1)
        self._h2.send_headers(stream.num, headers, end_stream=end)
        if end:
            self._calls.pop(stream.num, None)
            self._waiting.pop(stream.num, None)
            if not stream.h2.closed:  # tells the client to send no more
                self._reset(stream.num, ErrorCodes.NO_ERROR)
            self._h2.forget(stream.num)
        self.outbox.send_frames()

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        self._h2.reset_stream(stream_id, code)
        self._h2.forget(stream_id)

    @property
    def auth_context(self) -> Mapping[str, list[bytes]]:
        """The names in the client's certificate, as in `grpc.aio.ServicerContext`."""
        if self._auth is None:
            self._auth = auth_context(self._transport.get_extra_info("peercert"))
        return self._auth

    # --- the end --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Accept no more calls; close the connection when the last handler has ended."""
        if not self._is_leaving and not self._is_closed:
            self._is_leaving = True
            for stream_id, call in self._waiting.items():
                self._reset(stream_id, ErrorCodes.REFUSED_STREAM)
                del self._calls[stream_id]
                call.leave()
            self._waiting.clear()
            self.outbox.send_frames()
            # h2's own GOAWAY would end all streams.
            frame = GoAwayFrame(0, last_stream_id=self._h2.highest_inbound_stream_id)
            self.outbox.add(frame.serialize())
            self._close_if_idle()

    def cut(self) -> None:
        """End all calls, because the server stops."""
        for call in list(self._calls.values()):
            call.cut(grpc.StatusCode.UNAVAILABLE, "the server has stopped")

    def close(self) -> None:
        """Cancel all calls, and close the connection after the remaining bytes have been sent."""
        if not self._is_closed:
            self.outbox.send_frames()
            self.outbox.flush()
            self._close()
            self._transport.close()
            self._timer = self._loop.call_later(_LINGER_S, self._transport.abort)

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._timer.cancel()
            self._backlog.clear()
            self._leave_calls(list(self._calls.values()))
            self._calls.clear()
            self._waiting.clear()

    def _leave_calls(self, calls: list[Call]) -> None:
        # Each cancelled handler runs at the next turn of the event loop, so only some are cancelled
        # in one turn.
        for call in calls[:_CALLS_AT_ONCE]:
            call.leave()
        if rest := calls[_CALLS_AT_ONCE:]:
            self._loop.call_soon(self._leave_calls, rest)

    def _close_if_idle(self) -> None:
        if self._is_leaving and not self.tasks:
            self.close()

    def _refuse(self, code: ErrorCodes, reason: str) -> None:
        if not self._is_closed:
            log.warning("closing the connection of an HTTP/2 client", peer=self.peer, reason=reason)
            self._h2.close_connection(code, reason.encode())
            self.close()

    def _abort(self) -> None:
        self._close()
        self._transport.abort()

    def _keep_alive(self) -> None:
        """Ping a silent client, and close the connection if the client does not answer."""
        if self._is_pinged:
            log.debug("an HTTP/2 client did not answer a ping", peer=self.peer)
            self._abort()
            return
        pings = self.limits.pings
        wait_ms = pings.after_ms - (self._loop.time() - self._heard_at) * 1e3
        if wait_ms <= 0:
            self._is_pinged = True
            self._h2.ping(bytes(8))
            self.outbox.send_frames()
            wait_ms = pings.timeout_ms
        self._timer = self._loop.call_later(wait_ms / 1e3, self._keep_alive)

    def _write(self, data: bytes, num_frames: int) -> None:
        self._budget.earn(num_frames)
        if not self._transport.is_closing():
            self._transport.write(data)
