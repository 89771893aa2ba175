"""HTTP/1.1 requests as bytes: odd paths, headers and framings, and bodies.

Bodies are JSON close to what a client sends, any JSON, or no JSON at all.
"""

import json
from typing import Any

from hypothesis import strategies as st

_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    {
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 4,
    },
    {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"type": "object"}},
        },
    },
)
_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"prompt": "hello", "max_tokens": 3},
    {"prompt": [5, 6, 7], "n": 2, "logprobs": 2, "stream": True, "stop": ["x"], "seed": 1},
    {"prompt": ["a", "b"], "logit_bias": {"7": 3.5}, "temperature": 0, "top_k": -1},
    {"prompt": [[5, 6], [7]], "min_p": 0.1, "ignore_eos": True, "cache_pin_s": 2},
    {"prompt": "a", "use_beam_search": True, "n": 2, "best_of": 2, "temperature": 0},
)
_FIELDS = sorted(
    {name for body in (*_CHATS, *_COMPLETIONS) for name in body}
    | {"model", "user", "tools", "echo", "suffix", "request_id", "min_tokens", "stop_token_ids",
       "guided_json", "guided_regex", "guided_choice", "cache_salt", "priority", "top_p",
       "presence_penalty", "frequency_penalty", "repetition_penalty", "max_completion_tokens",
       "chat_template_kwargs", "length_penalty", "early_stopping", "prompt_logprobs", "", "\0"}
)  # fmt: skip

_NUMBERS = (0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, -0.0, 5e-324)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.integers(-3, 9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "x", "\0", "\ud800", "é" * 100, "7", "-1", "auto", "text", "user"]),
    st.text(max_size=12),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6) | st.sampled_from(_FIELDS), inner, max_size=4)
    ),
    max_leaves=8,
)
_RAW = (
    b"", b" ", b"\xff\xfe", b"{", b"[" * 100_000, b'{"a":' * 5_000, b"nul", b'"\\ud800"',
    b"1" * 5000,
    b"NaN", b'{"prompt": 1e999}', b'{"prompt": NaN}', b'{"prompt":"a","prompt":1}',
    b"\xef\xbb\xbf{}",
    b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}", b'{"prompt":"\xc3\x28"}', b"{}\0",
    b"{} {}",
    b'{"prompt":"a","logit_bias":{"1":1,"1":2}}', b'{"messages":' + b"[" * 150 + b"]" * 150 + b"}",
)  # fmt: skip


@st.composite
def _changed(draw: st.DrawFn, known: tuple[dict[str, Any], ...]) -> bytes:
    body = json.loads(json.dumps(draw(st.sampled_from(known))))
    for _ in range(draw(st.integers(0, 3))):
        node: Any = body
        while draw(st.booleans()):  # go deeper
            children = [
                child
                for child in (node.values() if isinstance(node, dict) else node)
                if isinstance(child, dict | list) and child
            ]
            if not children:
                break
            node = draw(st.sampled_from(children))
        if isinstance(node, dict):
            key = draw(st.sampled_from(sorted(node) or [""]) | st.sampled_from(_FIELDS))
            node[key] = draw(_VALUES)
        else:
            node[draw(st.integers(0, len(node) - 1))] = draw(_VALUES)
    return json.dumps(body).encode("utf-8", "surrogatepass")


def bodies(kind: str) -> st.SearchStrategy[bytes]:
    """Bodies for a "chat" or a "completion"."""
    known = _changed(_CHATS if kind == "chat" else _COMPLETIONS)
    any_json = _VALUES.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
    return st.one_of(known, known, known, any_json, st.sampled_from(_RAW), st.binary(max_size=40))


# --- requests -------------------------------------------------------------------------------------

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
    """The header with the body's length, the empty line, and the body."""
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
    """A request, or nearly one; the client sends nothing after it."""
    kind = draw(st.sampled_from(["chat", "completion"]))
    path = b"/v1/chat/completions" if kind == "chat" else b"/v1/completions"
    method, version = b"POST", b"HTTP/1.1"
    if draw(st.integers(0, 3)) == 0:
        path = draw(st.sampled_from(_PATHS))
        method = draw(st.sampled_from(_METHODS))
        version = draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"", b"HTTP/2"]))
    headers = draw(st.lists(st.sampled_from(_HEADERS), max_size=3))
    # A router refuses a request without these two before it reads the rest.
    usual = [b"Host: localhost", b"Content-Type: application/json"]
    if draw(st.integers(0, 9)) == 0:
        del usual[draw(st.integers(0, 1))]
    line = b" ".join([method, path, version])
    head = b"\r\n".join([line, b"Connection: close", *usual, *headers, b""])
    data = head + draw(_framed(draw(bodies(kind))))
    if draw(st.integers(0, 9)) == 0:
        data = data[: draw(st.integers(0, len(data)))]
    return data
