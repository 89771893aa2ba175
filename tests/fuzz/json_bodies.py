"""HTTP bodies: JSON that is nearly what a client sends, any JSON, and what is no JSON."""

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
        while draw(st.booleans()):  # somewhere deeper
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
    """Bodies of a "chat" or of a "completion"."""
    known = _changed(_CHATS if kind == "chat" else _COMPLETIONS)
    any_json = _VALUES.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
    return st.one_of(known, known, known, any_json, st.sampled_from(_RAW), st.binary(max_size=40))
