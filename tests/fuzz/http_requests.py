"""HTTP/1.1 requests as bytes: odd paths, headers, framings; bodies from `json_bodies`."""

from hypothesis import strategies as st

from tests.fuzz.json_bodies import bodies

_PATHS = (
    b"/v1/completions", b"/v1/chat/completions", b"/v1/models", b"/v1/models/x", b"/health",
    b"/ready", b"/metrics", b"/", b"*", b"/v1/models/%ff%00", b"/v1/../v1/models", b"//", b"/%",
    b"/v1/completions?x=\xff", b"http://x/v1/models", b"/" + b"a" * 9000,
    b"/v1/models/" + b"%2e" * 9,
)  # fmt: skip
_METHODS = (
    b"POST",
    b"GET",
    b"HEAD",
    b"OPTIONS",
    b"PUT",
    b"DELETE",
    b"TRACE",
    b"CONNECT",
    b"get",
    b"",
)
_HEADERS = (
    b"Content-Type: application/json", b"Content-Type: \xff", b"X-Request-Id: a b",
    b"X-Request-Id:", b"X-Request-Id: " + b"x" * 200,
    b"traceparent: 00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
    b"traceparent: \xff", b"X-Quire-Resumable: maybe", b"X-Quire-Priority: 99999999999999999999",
    b"X-Quire-Tenant: \xe9", b"Expect: 100-continue", b"Expect: 200-ok", b"Connection: Upgrade",
    b"Upgrade: websocket", b"Upgrade: h2c", b"Content-Encoding: gzip", b"Content-Encoding: deflate",
    b"Content-Encoding: br", b"Accept-Encoding: \x00", b"Transfer-Encoding: gzip",
    b"A" * 9000 + b": b",
    b"Host: ", b"Host: a\r\nHost: b", b": x", b"no colon", b" folded", b"Cookie: " + b"a=b;" * 500,
    b"Range: bytes=0-", b"Authorization: Bearer \xff", b"Content-Length: 0", b"Content-Length: -1",
    b"Content-Length: 99999999999999999999", b"Content-Length: 1e3", b"priority: x",
    b"x-quire-deadline: nan", b"\r\n".join(b"X-%d: y" % i for i in range(300)),
)  # fmt: skip
_CHUNK_SIZES = (b"FFFFFFFFFFFFFFFF", b"-1", b"0x3", b"3;ext=1", b"g", b"", b" 3", b"00000003")


@st.composite
def _framed(draw: st.DrawFn, body: bytes) -> bytes:
    """The header that says how long the body is, the empty line, and the body."""
    match draw(st.integers(0, 9)):
        case 0:
            lied = draw(st.sampled_from([0, max(0, len(body) - 1), len(body) + 1, 2**40]))
            return b"Content-Length: %d\r\n\r\n%b" % (lied, body)
        case 1 | 2:
            place = draw(st.integers(0, len(body)))
            pieces = [piece for piece in (body[:place], body[place:]) if piece]
            chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
            if draw(st.booleans()):
                at = draw(st.integers(0, len(chunks)))
                chunks.insert(at, draw(st.sampled_from(_CHUNK_SIZES)) + b"\r\nabc\r\n")
            end = draw(st.sampled_from([b"0\r\n\r\n", b"0\r\nX-Trailer: a\r\n\r\n", b"", b"0\r\n"]))
            return b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + end
        case 3:
            both = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(body)
            return both + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        case _:
            return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


@st.composite
def raw_requests(draw: st.DrawFn) -> bytes:
    """A request, or what comes close; the client says no more after it."""
    kind = draw(st.sampled_from(["chat", "completion"]))
    path = b"/v1/chat/completions" if kind == "chat" else b"/v1/completions"
    method, version = b"POST", b"HTTP/1.1"
    if draw(st.integers(0, 3)) == 0:
        path = draw(st.sampled_from(_PATHS))
        method = draw(st.sampled_from(_METHODS))
        version = draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"", b"HTTP/2"]))
    headers = draw(st.lists(st.sampled_from(_HEADERS), max_size=3))
    head = b"\r\n".join([b" ".join([method, path, version]), b"Connection: close", *headers, b""])
    data = head + draw(_framed(draw(bodies(kind))))
    if draw(st.integers(0, 9)) == 0:
        data = data[: draw(st.integers(0, len(data)))]
    return data
