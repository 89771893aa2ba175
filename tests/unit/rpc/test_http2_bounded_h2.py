"""What a frame of a client may cost: time, and memory that stays."""

import gc
import struct

import h2.connection
import h2.events
import pytest
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
)

from rpc.http2.bounded_h2 import BoundedH2
from rpc.http2.limits import ConnectionLimits

LIMITS = ConnectionLimits(
    max_received_bytes=1000,
    max_sent_bytes=1000,
    max_metadata_bytes=4096,
    max_concurrent_streams=200,
)
SETTINGS = SettingsFrame(0).serialize()
POST = b"\x83\x86\x84"
""":method, :scheme and :path of the static table."""


@pytest.fixture
def server():
    server = BoundedH2(LIMITS)
    server.initiate_connection()
    server.receive_data(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
    server.data_to_send()
    return server


def headers(stream_id, block=POST):
    return HeadersFrame(stream_id, block, flags=["END_HEADERS"]).serialize()


def settings(**named):
    codes = {getattr(SettingsFrame, name): value for name, value in named.items()}
    return SettingsFrame(0, settings=codes).serialize()


def refused(server, data):
    with pytest.raises(ProtocolError):
        server.receive_data(data)
    return struct.unpack(">I", server.data_to_send()[-4:])[0]


def test_few_frames_are_parsed_at_once(server):
    happened = server.receive_data(PingFrame(0, bytes(8)).serialize() * 100)
    assert 10 < len(happened) < 50
    while server.has_more:
        happened += server.receive_data(b"")
    assert len(happened) == 100


def test_a_block_of_headers_that_is_too_large_is_not_decoded(server, monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(server.decoder, "decode", fail)
    part = bytes(16_000)
    frames = HeadersFrame(1, part).serialize()
    frames += ContinuationFrame(1, part, flags=["END_HEADERS"]).serialize()
    assert refused(server, frames) == ErrorCodes.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("num_changes", [2, 3, 16_000])
def test_changes_of_the_table_s_size(server, num_changes):
    frame = headers(1, b"\x20" * num_changes + POST)
    if num_changes <= 2:
        (request,) = server.receive_data(frame)
        assert len(request.headers) == 3
    else:
        assert refused(server, frame) == ErrorCodes.PROTOCOL_ERROR


def test_unknown_settings_are_not_kept(server):
    before = len(server.remote_settings)
    unknown = b"".join(struct.pack(">HI", code, 1) for code in range(100, 1100))
    head = len(unknown).to_bytes(3, "big") + b"\x04\0\0\0\0\0"
    server.receive_data(head + unknown)
    assert len(server.remote_settings) == before
    assert server.data_to_send() == SettingsFrame(0, flags=["ACK"]).serialize()


def test_the_table_for_sent_headers_stays_small(server):
    server.receive_data(headers(1) + settings(HEADER_TABLE_SIZE=2**32 - 1))
    assert server.encoder.header_table_size == 4096
    server.receive_data(settings(HEADER_TABLE_SIZE=100))
    assert server.encoder.header_table_size == 100
    server.receive_data(settings(HEADER_TABLE_SIZE=2**31))
    assert server.encoder.header_table_size == 4096


def test_changes_of_all_windows_count_by_the_streams(server):
    for number in range(100):
        server.receive_data(headers(2 * number + 1))
    server.receive_data(settings(INITIAL_WINDOW_SIZE=1000))
    assert server.num_idle_frames == 3
    assert server.streams[1].outbound_flow_control_window == 1000
    (event,) = server.receive_data(settings(INITIAL_WINDOW_SIZE=1000))
    assert server.num_idle_frames == 1
    assert not event.changed_settings
    server.receive_data(settings(MAX_FRAME_SIZE=20_000, INITIAL_WINDOW_SIZE=1000))
    assert server.num_idle_frames == 3
    assert server.max_outbound_frame_size == 20_000


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (SettingCodes.ENABLE_PUSH, 2),
        (SettingCodes.INITIAL_WINDOW_SIZE, 2**31),
        (SettingCodes.MAX_FRAME_SIZE, 100),
    ],
)
def test_invalid_settings_are_refused(server, code, value):
    frame = b"\0\0\6\4\0\0\0\0\0" + struct.pack(">HI", code, value)
    assert refused(server, frame) in (ErrorCodes.PROTOCOL_ERROR, ErrorCodes.FLOW_CONTROL_ERROR)


def test_closed_streams_are_forgotten(server):
    server.receive_data(headers(1) + headers(3) + RstStreamFrame(1).serialize())
    assert list(server.streams) == [3]
    server.send_headers(3, [(":status", "200")], end_stream=True)
    server.forget(3)
    assert list(server.streams) == [3]  # the client may still send
    server.receive_data(DataFrame(3, b"a", flags=["END_STREAM"]).serialize())
    assert not server.streams
    server.data_to_send()
    server.receive_data(DataFrame(1, b"late").serialize())
    assert server.data_to_send().startswith(b"\0\0\4\3\0\0\0\0\1")  # RST_STREAM


@pytest.mark.parametrize("late", [DataFrame(1, b"late").serialize(), headers(1)])
def test_frames_on_an_ended_stream_leave_no_garbage(server, late):
    server.receive_data(headers(1) + DataFrame(1, b"", flags=["END_STREAM"]).serialize())
    gc.collect()
    gc.disable()
    try:
        (event,) = server.receive_data(late)
        assert isinstance(event, h2.events.StreamReset)
        assert event.error_code == ErrorCodes.STREAM_CLOSED
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_streams_are_counted_without_a_look_at_each(server, monkeypatch):
    most = LIMITS.max_concurrent_streams
    for number in range(most):
        server.receive_data(headers(2 * number + 1))
        if number % 2:  # half of the streams end at once
            server.receive_data(RstStreamFrame(2 * number + 1).serialize())
    monkeypatch.setattr("h2.stream.H2Stream.open", None)
    at = 2 * most + 1
    for number in range(at, at + most, 2):
        server.receive_data(headers(number))
    assert refused(server, headers(at + most)) == ErrorCodes.PROTOCOL_ERROR


def test_h2_has_what_is_overridden():
    """If a new h2 or hpack renames these, `rpc/http2/bounded_h2.py` must follow."""
    for name in (
        "_open_streams",
        "_receive_frame",
        "_receive_headers_frame",
        "_handle_data_on_closed_stream",
        "_frame_dispatch_table",
        "_receive_settings_frame",
        "_receive_goaway_frame",
    ):
        assert hasattr(h2.connection.H2Connection(), name)
    base = BoundedH2.__mro__[1]
    assert base is h2.connection.H2Connection
    assert all(
        hasattr(kind.__mro__[1], name)
        for kind, name in (
            (type(BoundedH2(LIMITS).decoder), "_update_encoding_context"),
            (type(BoundedH2(LIMITS).incoming_buffer), "_validate_frame_length"),
        )
    )
