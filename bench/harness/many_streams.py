"""Reads many streams at once with little processor time, and counts tokens and pieces.

    python -m harness.many_streams http HOST:PORT --model NAME --streams N --tokens N

`control_plane.py` starts this process. All streams begin at once. They are read through plain
sockets, because a client library takes more time per token than the router. Over HTTP, each stream
has its own connection. Over gRPC, `--per-connection` streams share a connection, like the streams
of one channel; with `grpc-many` they also share a call. Prints a line of JSON when every stream has
its first token, and another after SIGTERM: how many tokens and pieces have come. A piece is an SSE
event or a message with tokens.
"""

import argparse
import json
import random
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.v1 import common_pb2, inference_pb2

_PROMPT_LEN = 16
_RECEIVE_BYTES = 1 << 18
_EVENT = b'"finish_reason":null'
"""Occurs once in each SSE event with text."""


@dataclass(slots=True)
class Counts:
    """Totals over all streams."""

    num_pieces: int = 0
    num_tokens: int = 0
    """Counted only for gRPC."""
    started: set[object] = field(default_factory=set)
    """Streams that have received a piece."""


class HttpStream:
    """A streamed completion on a separate connection."""

    def __init__(self, address: tuple[str, int], body: bytes, counts: Counts) -> None:
        self._counts = counts
        self._rest = b""
        self.socket = socket.create_connection(address)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)

    def receive(self, piece: bytes) -> None:
        text = self._rest + piece
        if num_pieces := text.count(_EVENT):
            self._counts.num_pieces += num_pieces
            self._counts.started.add(self)
        elif text.startswith(b"HTTP/1.1 ") and not text.startswith(b"HTTP/1.1 200"):
            sys.exit(f"refused: {text[:300]!r}")
        # the next piece may complete an event that is cut in two
        self._rest = text[max(text.rfind(_EVENT) + len(_EVENT), len(text) - len(_EVENT) + 1) :]


class GrpcConnection:
    """An HTTP/2 connection with calls of `InferenceService`.

    With `is_many`, the requests share a `GenerateMany` call; otherwise each is a `Generate` call.
    """

    _DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
    _ACK = _END_STREAM = 1
    _END_HEADERS = 4
    _MOST = 2**31 - 1

    def __init__(
        self, address: tuple[str, int], requests: list[bytes], counts: Counts, *, is_many: bool
    ) -> None:
        self._counts = counts
        self._is_many = is_many
        self._stream_to_rest: dict[int, bytes] = {}
        """The beginnings of messages that are cut in two."""
        self._rest = b""
        self.socket = socket.create_connection(address)
        method = b"GenerateMany" if is_many else b"Generate"
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        window = (4).to_bytes(2, "big") + self._MOST.to_bytes(4, "big")  # INITIAL_WINDOW_SIZE
        more = (self._MOST - 65_535).to_bytes(4, "big")
        headers = b"".join(
            b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value  # HPACK: literal
            for name, value in (
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":path", b"/quire.v1.InferenceService/" + method),
                (b":authority", b"localhost"),
                (b"te", b"trailers"),
                (b"content-type", b"application/grpc"),
            )
        )
        sent = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", _frame(self._SETTINGS, 0, 0, window)]
        sent.append(_frame(self._WINDOW_UPDATE, 0, 0, more))
        messages = [b"\0" + len(request).to_bytes(4, "big") + request for request in requests]
        for index, message in enumerate([messages] if is_many else [[each] for each in messages]):
            stream = 2 * index + 1
            sent.append(_frame(self._HEADERS, self._END_HEADERS, stream, headers))
            sent += [_frame(self._DATA, 0, stream, each) for each in message]
            sent.append(_frame(self._DATA, self._END_STREAM, stream, b""))
        self.socket.sendall(b"".join(sent))

    def receive(self, piece: bytes) -> None:
        data = self._rest + piece
        start, end = 0, len(data)
        while start + 9 <= end:
            size = int.from_bytes(data[start : start + 3], "big")
            body = start + 9
            if body + size > end:
                break
            kind, flags = data[start + 3], data[start + 4]
            if kind == self._DATA:
                stream = int.from_bytes(data[start + 5 : body], "big")
                self._count(stream, data[body : body + size])
            elif kind in (self._SETTINGS, self._PING) and not flags & self._ACK:
                said = data[body : body + size] if kind == self._PING else b""
                self.socket.sendall(_frame(kind, self._ACK, 0, said))
            elif (kind == self._HEADERS and flags & self._END_STREAM) or kind == self._GOAWAY:
                sys.exit(f"a call ended: {data[body : body + size]!r}")
            start = body + size
        self._rest = data[start:]

    def _count(self, stream: int, data: bytes) -> None:
        data = self._stream_to_rest.pop(stream, b"") + data
        start = 0
        while start < len(data):
            size = int.from_bytes(data[start + 1 : start + 5], "big")
            if len(data) < start + 5 + size:
                self._stream_to_rest[stream] = data[start:]
                return
            message = data[start + 5 : start + 5 + size]
            if self._is_many:
                for event in inference_pb2.GenerateManyResponse.FromString(message).events:
                    if event.HasField("error"):
                        sys.exit(f"a request ended: {event.error.message}")
                    self._count_delta(event.number, event.delta)
            else:
                response = inference_pb2.GenerateResponse.FromString(message)
                self._count_delta(stream, response.delta)
            start += 5 + size

    def _count_delta(self, number: int, delta: inference_pb2.OutputDelta) -> None:
        if num_tokens := len(delta.token_ids):
            self._counts.num_pieces += 1
            self._counts.num_tokens += num_tokens
            self._counts.started.add((self, number))


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _http_bodies(given: argparse.Namespace) -> Iterator[bytes]:
    for prompt in _prompts(given):
        body = {"model": given.model, "prompt": prompt, "max_tokens": given.tokens, "stream": True}
        body |= {"ignore_eos": True, "stream_interval": given.stream_interval}
        yield json.dumps(body).encode()


def _grpc_requests(given: argparse.Namespace) -> Iterator[bytes]:
    for index, prompt in enumerate(_prompts(given)):
        sampling = common_pb2.SamplingParams(max_tokens=given.tokens, ignore_eos=True)
        token_ids = inference_pb2.TokenIds(ids=prompt)
        request = inference_pb2.GenerateRequest(
            token_ids=token_ids, sampling=sampling, stream_interval=given.stream_interval
        )
        if given.api == "grpc-many":
            many = inference_pb2.GenerateManyRequest(number=index + 1, generate=request)
            yield many.SerializeToString()
        else:
            yield request.SerializeToString()


def _prompts(given: argparse.Namespace) -> Iterator[list[int]]:
    draw = random.Random(0)
    for _ in range(given.streams):
        yield [draw.randrange(2, 4000) for _ in range(_PROMPT_LEN)]


def read(given: argparse.Namespace, counts: Counts) -> None:
    """Read until SIGTERM."""
    host, _, port = given.address.rpartition(":")
    address = (host, int(port))
    connections: list[HttpStream | GrpcConnection]
    if given.api == "http":
        connections = [HttpStream(address, body, counts) for body in _http_bodies(given)]
    else:
        requests, size = list(_grpc_requests(given)), given.per_connection
        parts = [requests[start : start + size] for start in range(0, len(requests), size)]
        is_many = given.api == "grpc-many"
        connections = [GrpcConnection(address, part, counts, is_many=is_many) for part in parts]
    ready = selectors.DefaultSelector()
    for each in connections:
        ready.register(each.socket, selectors.EVENT_READ, each)
    is_reported = False
    while True:
        for key, _ in ready.select():
            if not (piece := key.data.socket.recv(_RECEIVE_BYTES)):
                sys.exit("a connection ended")
            key.data.receive(piece)
        if not is_reported and len(counts.started) == given.streams:
            is_reported = True
            _report(counts)


def _report(counts: Counts) -> None:
    print(
        json.dumps({"num_pieces": counts.num_pieces, "num_tokens": counts.num_tokens}), flush=True
    )


def _end(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("api", choices=("http", "grpc", "grpc-many"))
    parser.add_argument("address")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="limit on tokens of each stream")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens per event")
    parser.add_argument("--per-connection", type=int, default=64, help="streams, for gRPC")
    given = parser.parse_args()
    counts = Counts()
    signal.signal(signal.SIGTERM, _end)
    try:
        read(given, counts)
    except KeyboardInterrupt:
        _report(counts)
