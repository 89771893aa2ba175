"""The OpenAI API's refusals: fields by name, bodies by size and form, and the errors."""

import asyncio
import gzip
import json

import pytest
from openai_fakes import FakeInference

from contract.errors import AlreadyExistsError, ContextLengthError, InvalidArgumentError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def refused(http, path, body, status=400, **kwargs):
    """The error for a refused body; a body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(path, data=data, **kwargs) as response:
        assert response.status == status, await response.text()
        assert response.content_type == "application/json"
        assert response.headers["X-Request-Id"]
        error = (await response.json())["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == {404: "not_found", 409: "already_exists"}.get(status)
        return error


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"frobnicate": 3}, "frobnicate", "frobnicate is 3; there is no such field"),
        ({"temperature": "hot"}, "temperature", 'temperature is "hot"; it must be a valid number'),
        ({"temperature": "1"}, "temperature", 'temperature is "1"; it must be a valid number'),
        ({"max_tokens": True}, "max_tokens", "max_tokens is true; it must be a valid integer"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5; it must be a valid integer"),
        ({"stream": 1}, "stream", "stream is 1; it must be a valid boolean"),
        ({"temperature": float("nan")}, "temperature", "NaN; it must be a finite number"),
        ({"stop": [".", 1]}, "stop[1]", "stop[1] is 1; it must be a valid string"),
        ({"logit_bias": {"x": 1}}, "logit_bias", 'has the key "x"'),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "each key must be a token id"),
        ({"stream_options": 3, "stream": True}, "stream_options", "is 3; it must be an object"),
        ({"stream_options": {}}, "stream_options", "it needs stream to be true"),
        ({"stream_options": {"usage": 1}, "stream": True}, "stream_options.usage", "no such field"),
        (
            {"stream_options": {"continuous_usage_stats": True}, "stream": True},
            "stream_options.continuous_usage_stats",
            "it needs include_usage",
        ),
        ({"metadata": {"a": 1}}, "metadata.a", "is 1; it must be a valid string"),
        ({"request_id": "a\nb"}, "request_id", "request_id is"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": []}, "prompt", "prompt is []"),
        ({"prompt": {"a": 1}}, "prompt", 'prompt is {"a":1}'),
        ({"prompt": [1, "x"]}, "prompt[1]", 'prompt[1] is "x"; it must be a token id'),
        ({"prompt": [1, True]}, "prompt[1]", "prompt[1] is true"),
        ({"prompt": [[1], [2, 3.0]]}, "prompt[1][1]", "prompt[1][1] is 3.0"),
        ({"prompt": [[1], 2]}, "prompt[1]", "prompt[1] is 2; it must be a list of token ids"),
        ({"prompt": ["a", 1]}, "prompt[1]", "prompt[1] is 1; it must be a string"),
        ({"prompt": [None]}, "prompt[0]", "prompt[0] is null"),
        ({"prompt": ["a"] * 1025}, "prompt", "holds 1025 prompts; one call takes at most 1024"),
        ({"suffix": "x"}, None, "suffix is set; the model has no tokens"),
        ({"echo": 0}, "echo", "echo is 0; it must be a valid boolean"),
        ({"suffix": "b", "echo": True}, "echo", "is true; with suffix"),
        ({"suffix": "b", "prompt": [1]}, "suffix", "it needs prompts that are text"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
        ({"stream_interval": 2}, "stream_interval", "needs stream to be true"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "[]"),
        ({"best_of": 3, "n": 2}, None, "best_of is 3; without use_beam_search it must equal n"),
        ({"length_penalty": 0.5}, "length_penalty", "it needs use_beam_search to be true"),
        ({"early_stopping": True}, "early_stopping", "it needs use_beam_search to be true"),
        ({"use_beam_search": True, "early_stopping": "no"}, "early_stopping", 'is "no"'),
        ({"store": True}, None, "store is true; it is not supported"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs", "valid integer"),
    ],
)
async def test_bad_completion_is_refused_by_name(http, inference, fields, param, message):
    error = await refused(http, COMPLETIONS, {"prompt": "x", **fields})
    assert message in error["message"]
    assert error["param"] == param
    assert not inference.requests


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "messages is []"),
        ({"messages": None}, "messages", "messages is missing"),
        ({"messages": "Hello"}, "messages", "it must be a valid list"),
        ({"messages": ["Hello"]}, "messages[0]", 'messages[0] is "Hello"; it must be an object'),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", 'is "robot"'),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", 'is ""'),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "is 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "is \"image_url\"; it must be 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]},
            "messages[0].tool_call_id",
            'is "y"; it must be set with role "tool" and only with it',
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is not set",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", 'is "xml"'),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "structured_outputs",
            "asks for regex and json_object",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "it needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21"),
        ({"logprobs": 1}, "logprobs", "logprobs is 1; it must be a valid boolean"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "is 2; it must equal"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "key messages"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "key tools"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "key self"),
        ({"prompt": "x"}, "prompt", "there is no such field"),
    ],
)
async def test_bad_chat_is_refused_by_name(http, inference, fields, param, message):
    error = await refused(http, CHAT, {"messages": HELLO, **fields})
    assert message in error["message"]
    assert error["param"] == param
    assert not inference.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 1_000 + b"]" * 1_000 + b"}",
        b'{"prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}",
        b"\x00" * 100,
    ],
    ids=["empty", "cut", "words", "utf8", "surrogate", "nesting", "digits", "zeros"],
)
async def test_a_body_that_is_not_json_is_refused(http, body):
    error = await refused(http, COMPLETIONS, body)
    assert "body is not valid JSON" in error["message"]


@pytest.mark.parametrize("body", [b"[1]", b'"x"', b"null", b"3"])
async def test_json_that_is_no_object_is_refused(http, body):
    error = await refused(http, COMPLETIONS, body)
    assert "it must be an object" in error["message"]


async def test_a_value_too_long_to_quote_is_cut(http):
    error = await refused(http, COMPLETIONS, {"prompt": "x", "temperature": "h" * 500_000})
    assert len(error["message"]) < 200
    error = await refused(http, COMPLETIONS, {"prompt": {"x": "h" * 500_000}})
    assert len(error["message"]) < 200


async def test_a_body_of_100_mb_is_refused_from_its_headers(server):
    reader, writer = await asyncio.open_connection(*server)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: quire.test\r\nContent-Type: application/json\r\n"
        b'Content-Length: 104857600\r\n\r\n{"prompt": "'
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    error = json.loads(await reader.readuntil(b"}}"))["error"]
    assert error["message"] == (
        "body has 104857600 bytes; it must have at most 1048576 (--max-body-mb)"
    )
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("may_be_compressed", [True])
@pytest.mark.parametrize("encoding", [None, "gzip", "deflate"])
async def test_a_body_without_length_is_refused_when_it_grows(http, inference, encoding):
    async def pieces():
        for _ in range(40):
            yield b" " * 2**16

    data = pieces() if encoding is None else b" " * (40 * 2**16)
    async with http.post(
        COMPLETIONS, data=data, compress=encoding, chunked=encoding is None or None
    ) as response:
        assert response.status == 413
        error = (await response.json())["error"]
    assert error["message"] == "body has more bytes; it must have at most 1048576 (--max-body-mb)"
    assert not inference.requests


@pytest.mark.parametrize("may_be_compressed", [True])
@pytest.mark.parametrize(
    ("coding", "body", "problem"),
    [
        ("gzip", b"plain", "body is not gzip"),
        ("deflate", b"plain", "body is not deflate"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], "body is not one whole gzip stream"),
        ("gzip", gzip.compress(b"{}", mtime=0) * 2, "body is not one whole gzip stream"),
    ],
)
async def test_a_body_that_is_not_what_its_encoding_says_is_refused(http, coding, body, problem):
    error = await refused(http, COMPLETIONS, body, headers={"Content-Encoding": coding})
    assert error["message"].startswith(problem)


@pytest.mark.parametrize("may_be_compressed", [True])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_body_is_taken_if_it_may_be(http, inference, coding):
    async with http.post(
        COMPLETIONS, data=json.dumps({"prompt": "x" * 9999}).encode(), compress=coding
    ) as response:
        assert response.status == 200
    assert inference.requests[0].prompt == "x" * 9999


@pytest.mark.parametrize("may_be_compressed", [True])
async def test_an_unknown_content_encoding_is_refused(http):
    error = await refused(http, COMPLETIONS, b"x", 415, headers={"Content-Encoding": "br"})
    assert error["message"].startswith('Content-Encoding is "br"; it must be gzip or deflate')


async def test_paths_and_methods_that_are_not_there(http):
    async with http.get("/v1/moderations") as response:
        assert response.status == 404
        assert "/v1/moderations" in (await response.json())["error"]["message"]
    async with http.get(COMPLETIONS) as response:
        assert response.status == 405
        assert "GET" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "field", "param"),
    [
        (COMPLETIONS, {"prompt": "x"}, "sampling.top_p", "top_p"),
        (COMPLETIONS, {"prompt": "x"}, "prompt", "prompt"),
        (COMPLETIONS, {"prompt": [5]}, "prompt[0]", "prompt[0]"),
        (COMPLETIONS, {"prompt": "x"}, "sampling.logit_bias[7]", "logit_bias[7]"),
        (CHAT, {"messages": HELLO}, "prompt", "messages"),
        (CHAT, {"messages": HELLO}, "sampling.max_tokens", "max_tokens"),
        (
            CHAT,
            {"messages": HELLO, "max_completion_tokens": 1},
            "sampling.max_tokens",
            "max_completion_tokens",
        ),
    ],
)
async def test_an_error_of_the_service_names_the_field_as_the_client_does(
    http, inference, path, fields, field, param
):
    inference.refusal = InvalidArgumentError(field, "is 2; it must be 1")
    error = await refused(http, path, fields)
    assert (error["param"], error["message"]) == (param, f"{param} is 2; it must be 1")


async def test_a_request_id_that_is_live_is_a_conflict(http, inference):
    inference.refusal = AlreadyExistsError("request_id mine is live")
    await refused(http, COMPLETIONS, {"prompt": "x", "request_id": "mine"}, status=409)


async def test_a_request_id_that_no_header_can_carry_is_refused(http):
    error = await refused(http, COMPLETIONS, {"prompt": "x"}, headers={"X-Request-Id": "ä" * 3})
    assert error["param"] == "X-Request-Id"


async def test_a_header_that_is_no_utf8_is_refused(server):
    reader, writer = await asyncio.open_connection(*server)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: quire.test\r\nX-Request-Id: \xe4\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert b"X-Request-Id is" in await reader.readuntil(b"}}")
    writer.close()
    await writer.wait_closed()


async def test_a_bug_is_500_without_details(http, inference: FakeInference):
    inference.refusal = RuntimeError("a secret")
    error = await refused(http, COMPLETIONS, {"prompt": "x"}, status=500)
    assert error["message"] == "internal error"
    assert error["type"] == "server_error"


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(http, inference):
    inference.refusal = ContextLengthError("prompt", "has 70 tokens")
    async with http.post(CHAT, json={"messages": HELLO}) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
