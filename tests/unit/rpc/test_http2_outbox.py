"""Messages that bypass h2 keep its windows true, and arrive whole and in order."""

import asyncio

import h2.config
import h2.connection
import h2.events
import pytest
from h2.settings import SettingCodes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpc.http2.outbox import Outbox, OutStream

STREAMS = (1, 3, 5)
REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/m"),
    (":authority", "x"),
    ("te", "trailers"),
]


def connection(*, client_side):
    made = h2.connection.H2Connection(h2.config.H2Configuration(client_side=client_side))
    made.initiate_connection()
    return made


class Peers:
    """A client by h2 alone, and a server whose messages go by an outbox."""

    def __init__(self, initial_window=65_535):
        self.client = connection(client_side=True)
        self.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: initial_window})
        self.server = connection(client_side=False)
        self.outbox = Outbox(self.server, self.deliver)
        self.received = dict.fromkeys(STREAMS, b"")
        self.unread = dict.fromkeys(STREAMS, 0)
        self.to_client()
        self.to_server()
        for each in STREAMS:
            self.client.send_headers(each, REQUEST, end_stream=True)
        self.to_server()
        self.streams = {each: OutStream(self.server.streams[each]) for each in STREAMS}
        for each in STREAMS:
            self.server.send_headers(each, [(":status", "200")])
        self.to_client()

    def deliver(self, data, _num_frames):
        for event in self.client.receive_data(data):  # it raises if a window is overrun
            if isinstance(event, h2.events.DataReceived):
                self.received[event.stream_id] += event.data
                self.unread[event.stream_id] += event.flow_controlled_length

    def to_client(self):
        self.outbox.send_frames()
        self.outbox.flush()

    def to_server(self):
        happened = self.server.receive_data(self.client.data_to_send())
        self.outbox.send_frames()
        for event in happened:
            if isinstance(event, h2.events.WindowUpdated):
                self.outbox.widen(self.streams[event.stream_id] if event.stream_id else None)
            elif isinstance(event, h2.events.RemoteSettingsChanged) and hasattr(self, "streams"):
                for stream in self.streams.values():
                    self.outbox.widen(stream)
        self.to_client()

    def have_unsent(self):
        return any(stream.unsent is not None for stream in self.streams.values())

    def check_windows(self):
        assert self.server.outbound_flow_control_window >= 0
        assert self.server.outbound_flow_control_window == self.client.inbound_flow_control_window
        for each in STREAMS:
            server, client = self.server.streams[each], self.client.streams[each]
            assert server.outbound_flow_control_window == client.inbound_flow_control_window


def framed(message):
    return b"\0" + len(message).to_bytes(4, "big") + message


steps = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(("write", "put")), st.sampled_from(STREAMS), st.integers(0, 70_000)
        ),
        st.tuples(st.just("widen"), st.sampled_from((0, *STREAMS)), st.integers(1, 40_000)),
        st.tuples(st.just("initial"), st.none(), st.integers(0, 200_000)),
        st.tuples(st.just("frame"), st.none(), st.integers(16_384, 100_000)),
        st.tuples(st.just("pause"), st.none(), st.booleans()),
        st.tuples(st.just("turn"), st.none(), st.none()),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(steps=steps, initial=st.integers(0, 70_000))
def test_messages_arrive_whole_and_in_order(steps, initial):
    asyncio.run(interleave(steps, initial))


async def interleave(steps, initial):
    peers = Peers(initial)
    sent = dict.fromkeys(STREAMS, b"")
    sending = []

    last = dict.fromkeys(STREAMS)
    for number, (what, where, amount) in enumerate(steps):
        if what in ("write", "put"):
            message = bytes([number + 1]) * amount
            sent[where] += framed(message)

            async def in_turn(before=last[where], what=what, where=where, message=message):
                if before is not None:
                    await before
                peers.outbox.put(peers.streams[where], message)
                if what == "write":
                    await peers.streams[where].wait()

            last[where] = asyncio.create_task(in_turn())
            sending.append(last[where])
        elif what == "widen":
            peers.client.increment_flow_control_window(amount, where or None)
            peers.to_server()
        elif what in ("initial", "frame"):
            code = (
                SettingCodes.INITIAL_WINDOW_SIZE
                if what == "initial"
                else SettingCodes.MAX_FRAME_SIZE
            )
            peers.client.update_settings({code: amount})
            peers.to_server()
        elif what == "pause":
            (peers.outbox.pause if amount else peers.outbox.resume)()
        else:
            await asyncio.sleep(0)
        for each in STREAMS:
            assert sent[each].startswith(peers.received[each])
    peers.outbox.resume()
    while not all(each.done() for each in sending) or peers.have_unsent():
        peers.client.increment_flow_control_window(100_000)
        for each in STREAMS:
            peers.client.increment_flow_control_window(100_000, each)
        peers.to_server()
        await asyncio.sleep(0)
    await asyncio.gather(*sending)
    peers.to_client()
    peers.check_windows()
    assert peers.received == sent


async def test_messages_of_one_turn_are_one_write_in_the_order_of_h2_s_frames():
    peers = Peers()
    writes = []
    peers.outbox._write = lambda data, num_frames: writes.append((data, num_frames))
    one, three = peers.streams[1], peers.streams[3]
    for stream, message in ((one, b"a"), (three, b"b"), (one, b"c")):
        peers.outbox.put(stream, message)
    peers.server.send_headers(1, [("grpc-status", "0")], end_stream=True)
    peers.outbox.send_frames()
    assert not writes
    await asyncio.sleep(0)
    assert [num_frames for _, num_frames in writes] == [3]
    events = peers.client.receive_data(writes[0][0])
    kinds = [(type(event).__name__, event.stream_id) for event in events]
    data = "DataReceived"
    assert kinds == [(data, 1), (data, 3), (data, 1), ("TrailersReceived", 1), ("StreamEnded", 1)]


async def test_a_message_waits_for_its_stream_and_an_ended_stream_forgets_it():
    peers = Peers(initial_window=10)
    one, three = peers.streams[1], peers.streams[3]
    for stream in (one, three):
        peers.outbox.put(stream, bytes(50))
    waiting = asyncio.create_task(three.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    peers.outbox.end(three)
    await waiting
    for each in (1, 3):
        peers.client.increment_flow_control_window(1000, each)
    peers.to_server()
    await one.wait()
    assert peers.received[1] == framed(bytes(50))
    assert peers.received[3] == framed(bytes(50))[:10]
    peers.outbox.put(three, b"late")
    peers.to_client()
    assert len(peers.received[3]) == 10


async def test_tasks_that_wait_for_one_stream_go_on_in_turn():
    peers = Peers(initial_window=0)
    stream = peers.streams[1]
    order = []

    async def write(name):
        for _ in range(3):
            await stream.wait()
            order.append(name)
            peers.outbox.put(stream, bytes(1))

    peers.outbox.put(stream, bytes(1))
    writing = [asyncio.create_task(write(name)) for name in "abc"]
    while not all(each.done() for each in writing):
        for _ in range(5):
            await asyncio.sleep(0)
        peers.client.increment_flow_control_window(6, 1)
        peers.to_server()
    assert order == [*"abcabcabc"]


async def test_streams_share_the_connection_by_frames():
    peers = Peers(initial_window=10**6)
    for stream in peers.streams.values():
        peers.outbox.put(stream, bytes(200_000))
    peers.client.increment_flow_control_window(32 * 16_384)
    peers.to_server()
    amounts = [len(peers.received[each]) for each in STREAMS]
    # The first write used the connection's first window, before the others came.
    assert max(amounts[1:]) - min(amounts[1:]) <= 16_384
    assert min(amounts) > 100_000


def test_h2_has_what_the_short_way_uses():
    """If a new h2 moves its windows, the short way must follow; see `rpc/http2/outbox.py`."""
    server = connection(client_side=False)
    client = connection(client_side=True)
    client.send_headers(1, REQUEST)
    server.receive_data(client.data_to_send())
    server.send_headers(1, [(":status", "200")])
    before = (server.outbound_flow_control_window, server.streams[1].outbound_flow_control_window)
    server.send_data(1, bytes(100))
    after = (server.outbound_flow_control_window, server.streams[1].outbound_flow_control_window)
    assert [old - new for old, new in zip(before, after, strict=True)] == [100, 100]
    assert server.max_outbound_frame_size == 16_384
    assert server.max_inbound_frame_size == 16_384
    assert server.streams[1].stream_id == 1
    assert (server.streams[1].open, server.streams[1].closed) == (True, False)
    server.receive_data(b"\0\0\1")
    assert bytes(server.incoming_buffer._data) == b"\0\0\1"
    assert server.decoder.max_header_list_size
    assert h2.connection.H2Connection._receive_goaway_frame


@pytest.mark.parametrize("num_bytes", [0, 1, 16_379, 16_380])
async def test_a_message_fits_a_frame_or_does_not(num_bytes):
    peers = Peers()
    num_frames = []
    peers.outbox._write = lambda data, num: (num_frames.append(num), peers.deliver(data, num))
    peers.outbox.put(peers.streams[1], bytes(num_bytes))
    peers.to_client()
    assert sum(num_frames) == (1 if num_bytes + 5 <= 16_384 else 2)
    assert peers.received[1] == framed(bytes(num_bytes))
