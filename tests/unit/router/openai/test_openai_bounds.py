"""Bodies are bounded before they are parsed: bytes, parts, quota; the first problem is reported."""

import gzip
import json

import pytest

from contract.errors import TooBusyError
from contract.request import MAX_MESSAGES
from router.http import body
from router.http.requests.chat import ChatBody
from router.http.strict_json import MAX_CONTAINERS, MAX_STRINGS, check_num_parts, parse_json

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGE = {"role": "user", "content": "x"}


async def refused(http, path, data, status=400, **kwargs):
    async with http.post(path, data=data, **kwargs) as response:
        assert response.status == status, await response.text()
        return (await response.json())["error"]["message"]


def filled(begin, unit, end):
    """A body of just under 1 MiB."""
    return begin + unit * ((2**20 - len(begin) - len(end)) // len(unit)) + end


async def test_a_compressed_body_is_refused_by_its_header(http, inference):
    bomb = gzip.compress(b'{"messages":[' + b"{}," * 5_592_338 + b"{}]}")
    message = await refused(http, CHAT, bomb, 415, headers={"Content-Encoding": "gzip"})
    assert message.startswith('Content-Encoding is "gzip"; it must be absent')
    assert not inference.quota_checks


@pytest.mark.parametrize("may_be_compressed", [True])
async def test_a_body_is_bounded_after_decompression(http):
    bomb = gzip.compress(b'{"messages":[' + b"{}," * 5_592_338 + b"{}]}")
    assert len(bomb) < 20_000
    message = await refused(http, CHAT, bomb, 413, headers={"Content-Encoding": "gzip"})
    assert message == "body has more bytes; it must have at most 1048576 (--max-body-mb)"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (filled(b'{"messages":[', b"{},", b"{}]}"), "objects and lists"),
        (filled(b'{"messages":', b"[", b""), "objects and lists"),
        (filled(b'{"tools":', b'{"":', b"1}"), "strings"),
        (filled(b'{"stop":[', b'"",', b'""]}'), "strings"),
        (filled(b'{"stop":[', rb'"\"",', b'""]}'), "strings"),
        (filled(b'{"a\\\\":[', b"[],", b"[]]}"), "objects and lists"),
        (json.dumps({str(i): 1 for i in range(60_000)}).encode(), "strings"),
        (json.dumps({"logit_bias": {str(i): 1 for i in range(60_000)}}).encode(), "strings"),
    ],
    ids=["messages", "lists", "objects", "stops", "escapes", "backslashes", "unknown", "bias"],
)
async def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(
    http, inference, monkeypatch, data, problem
):
    monkeypatch.setattr("router.http.strict_json.from_json", None)
    message = await refused(http, CHAT, data)
    most = MAX_STRINGS if problem == "strings" else MAX_CONTAINERS
    assert message.startswith("body has ")
    assert message.endswith(f" {problem}; it must have at most {most}")
    assert not inference.requests


def test_brackets_and_quotes_in_strings_are_not_counted():
    texts = ['[{"' * 300_000, "\\", 'x"', '\\"']
    assert parse_json(json.dumps(texts).encode()) == texts


def test_as_many_parts_as_may_be_are_taken():
    check_num_parts(b"[" + b"{}," * (MAX_CONTAINERS - 2) + b"{}]")
    check_num_parts(b"[" + b'"",' * (MAX_STRINGS - 1) + b'""]')


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"messages": [MESSAGE] * (MAX_MESSAGES + 1)}, "messages is"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), "x")}, "at most 1024"),
        ({"metadata": dict.fromkeys(map(str, range(17)), 1)}, "at most 16"),
    ],
)
async def test_lists_and_objects_are_bounded_before_their_entries(http, fields, problem):
    message = await refused(http, CHAT, json.dumps({"messages": [MESSAGE], **fields}).encode())
    assert problem in message
    assert "must have at most" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}] * 999},
        {"messages": [MESSAGE], **{f"x{i}": 1 for i in range(999)}},
        {"messages": [MESSAGE], "stop": [1] * 999},
        {"messages": [MESSAGE], "tools": [{}] * 99},
        {"messages": [{"role": "user", "content": [{}] * 999}]},
        {"messages": [MESSAGE], "stop_token_ids": ["x"] * 999},
    ],
    ids=["messages", "unknown", "stop", "tools", "parts", "tokens"],
)
async def test_the_first_problem_ends_the_check(http, monkeypatch, fields):
    counts = []

    def counting(error):
        counts.append(error.error_count())
        return error_from_validation(error)

    error_from_validation = body.error_from_validation
    monkeypatch.setattr(body, "error_from_validation", counting)
    await refused(http, CHAT, json.dumps(fields).encode())
    assert counts[0] <= 2  # a list of tools may also be null


@pytest.mark.parametrize("num_bytes", [100, 500_000])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_the_quota_is_asked_before_the_body_is_parsed(
    http, inference, monkeypatch, num_bytes, is_chunked
):
    monkeypatch.setattr(body, "parse_json", None)
    inference.quota_refusal = TooBusyError("tenant 'a' has used up its requests_per_minute")
    data = b"{" * num_bytes

    async def pieces():
        yield data

    message = await refused(http, COMPLETIONS, pieces() if is_chunked else data, 429)
    assert "requests_per_minute" in message
    assert inference.quota_checks == [num_bytes]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_calls_that_generate_nothing_ask_for_no_quota(http, inference, path):
    await refused(http, path, b"{")
    assert not inference.quota_checks


def test_a_schema_knows_its_names_as_clients_write_them():
    assert {"messages", "logit_bias", "use_beam_search"} <= ChatBody.names
    assert not ChatBody.names & ChatBody.unimplemented.keys()
