"""Bad input gets the right status and a message with field, value and limit; nothing else fails."""

import contextlib
import http.client
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from quire.v1 import inference_pb2
from tests.e2e.generation import generate_request, read
from tests.e2e.service import JSON_TYPE, Service
from tests.models_fixture import ModelDirs

VOCAB_SIZE = 500
CONTEXT = 4096
MIB = 2**20
GOOD_PROMPT = [9, 8, 7, 6, 5]

StatusCode = grpc.StatusCode
INVALID = StatusCode.INVALID_ARGUMENT


@dataclass(frozen=True)
class Expected:
    """An expected error: its status, its field, and words of its message."""

    code: StatusCode
    http_status: int
    field: str | None
    words: tuple[str, ...]


def _invalid(field: str, *words: str) -> Expected:
    return Expected(INVALID, 400, field, words)


@pytest.fixture(scope="module")
def good_tokens(service: Service) -> list[int]:
    return _generate_well(service)


@pytest.fixture(autouse=True)
def _goes_on(service: Service, good_tokens: list[int]) -> Iterator[None]:
    """After each test here the same service answers a normal request as before."""
    yield
    assert _generate_well(service) == good_tokens
    load = service.wait_until_idle()
    assert load.num_workers == 1


def _generate_well(service: Service) -> list[int]:
    request = generate_request(GOOD_PROMPT, max_tokens=12, ignore_eos=True)
    return read(service.stub.Generate(request, timeout=30)).outputs[0]


# --- gRPC -----------------------------------------------------------------------------------------

GRPC_CASES: dict[str, tuple[dict[str, Any], Expected]] = {
    "empty text": ({"prompt": ""}, _invalid("prompt", "empty", "at least 1")),
    "no token ids": ({"prompt": []}, _invalid("prompt", "empty", "at least 1")),
    "prompt longer than the context": (
        {"prompt": [7] * (CONTEXT + 1)},
        _invalid("prompt", str(CONTEXT + 1), str(CONTEXT - 1)),
    ),
    "text longer than the context": (
        {"prompt": "the quick brown fox " * CONTEXT},
        _invalid("prompt", str(CONTEXT)),
    ),
    "max_tokens 0": ({"max_tokens": 0}, _invalid("sampling.max_tokens", "0", "[1, 4096]")),
    "max_tokens negative": ({"max_tokens": -5}, _invalid("sampling.max_tokens", "-5", "[1, 4096]")),
    "max_tokens absurd": (
        {"max_tokens": 2**31 - 1},
        _invalid("sampling.max_tokens", "2147483647", "[1, 4096]"),
    ),
    "max_tokens beyond the room": (
        {"max_tokens": CONTEXT - 4},
        _invalid("sampling.max_tokens", "4092", "at most 4091", "5"),
    ),
    "temperature NaN": (
        {"temperature": math.nan},
        _invalid("sampling.temperature", "nan", "[0, 100]"),
    ),
    "temperature infinite": (
        {"temperature": math.inf},
        _invalid("sampling.temperature", "inf", "[0, 100]"),
    ),
    "top_p 2": ({"top_p": 2.0}, _invalid("sampling.top_p", "2.0", "(0, 1]")),
    "top_p 0": ({"top_p": 0.0}, _invalid("sampling.top_p", "0.0", "(0, 1]")),
    "min_p NaN": ({"min_p": math.nan}, _invalid("sampling.min_p", "nan", "[0, 1]")),
    "top_k beyond the vocabulary": (
        {"top_k": VOCAB_SIZE + 1},
        _invalid("sampling.top_k", "501", "[0, 500]"),
    ),
    "repetition_penalty 0": (
        {"repetition_penalty": 0.0},
        _invalid("sampling.repetition_penalty", "0.0", "(0, 100]"),
    ),
    "logit_bias of an unknown token": (
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        _invalid("sampling.logit_bias", "500", "[0, 500)"),
    ),
    "unknown model": (
        {"model": "gpt-17"},
        Expected(StatusCode.NOT_FOUND, 404, None, ("gpt-17", "not served")),
    ),
    "token id beyond the vocabulary": (
        {"prompt": [5, VOCAB_SIZE, 6]},
        _invalid("prompt[1]", "500", "[0, 500)"),
    ),
    "token id beyond int32": (
        {"prompt": [2**32 - 1]},
        _invalid("prompt[0]", "4294967295", "[0, 500)"),
    ),
    "10,000 stop strings": ({"stop": ["x"] * 10_000}, _invalid("stop", "10000", "at most 16")),
    "stop string of 1 MB": (
        {"stop": ["x" * 1_000_000]},
        _invalid("stop[0]", "1000000", "1 to 1024"),
    ),
    "empty stop string": ({"stop": ["a", ""]}, _invalid("stop[1]", "0 characters", "1 to 1024")),
    "500 logprobs": ({"logprobs": 500}, _invalid("sampling.logprobs", "500", "[0, 20]")),
    "n 0": ({"n": 0}, _invalid("n", "0", "[1, 64]")),
    "n absurd": ({"n": 1_000_000}, _invalid("n", "1000000", "[1, 64]")),
    "min_tokens above max_tokens": (
        {"max_tokens": 5, "min_tokens": 6},
        _invalid("sampling.min_tokens", "6", "[0, 5]"),
    ),
}


def _request(options: dict[str, Any]) -> inference_pb2.GenerateRequest:
    options = {"prompt": GOOD_PROMPT, **options}
    model = options.pop("model", "")
    request = generate_request(options.pop("prompt"), **options)
    request.model = model
    return request


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
@pytest.mark.parametrize("case", GRPC_CASES)
def test_grpc(service: Service, case: str, method: str):
    options, expected = GRPC_CASES[case]
    request = _request(options)
    if method == "Generate":
        error = _refusal(service, request)
    else:
        once = inference_pb2.GenerateOnceRequest(request=request)
        with pytest.raises(grpc.RpcError) as caught:
            service.stub.GenerateOnce(once, timeout=30)
        error = caught.value
    _assert_status(error, expected)


def test_grpc_without_a_prompt(service: Service):
    error = _refusal(service, inference_pb2.GenerateRequest())
    _assert_status(error, _invalid("prompt", "not set", "text or token_ids"))


def test_grpc_detokenize_beyond_the_vocabulary(service: Service):
    with pytest.raises(grpc.RpcError) as caught:
        service.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1, VOCAB_SIZE]))
    _assert_status(caught.value, _invalid("token_ids[1]", "500", "[0, 500)"))


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce", "Tokenize"])
@pytest.mark.parametrize(
    "payload", [b"\x1a\x03a\xffb", b"\x1a\x7f", b"\xff\xff\xff"], ids=["utf-8", "cut", "no-tag"]
)
def test_grpc_bytes_that_are_no_message(service: Service, method: str, payload: bytes):
    if method == "GenerateOnce":  # field 1 of the message is the request
        payload = b"\x0a" + bytes([len(payload)]) + payload
    if method == "Tokenize":  # field 2 of the request is its text
        payload = payload.replace(b"\x1a", b"\x12")
    # A client cannot tell a stream of one response from a single response.
    stream = service.channel.unary_stream(f"/quire.v1.InferenceService/{method}")(payload)
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    _assert_status(caught.value, _invalid("request", "not a valid message", f"{method}Request"))


def test_grpc_message_of_100_mb(service: Service):
    error = _refusal(service, generate_request("x" * 100 * MIB))
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    assert str(4 * MIB) in error.details()


def _refusal(service: Service, request: inference_pb2.GenerateRequest) -> grpc.RpcError:
    """The status of a request that is not accepted."""
    with pytest.raises(grpc.RpcError) as caught:
        next(service.stub.Generate(request, timeout=30))
    return caught.value


def _assert_status(error: grpc.RpcError, expected: Expected) -> None:
    assert error.code() is expected.code, error.details()
    for word in (expected.field or "", *expected.words):
        assert word in error.details()
    status = status_pb2.Status.FromString(
        dict(error.trailing_metadata())["grpc-status-details-bin"]
    )
    bad_request = error_details_pb2.BadRequest()
    blamed = [
        violation.field
        for detail in status.details
        if detail.Unpack(bad_request)
        for violation in bad_request.field_violations
    ]
    assert blamed == ([expected.field] if expected.field else [])


# --- HTTP -----------------------------------------------------------------------------------------

HTTP_CASES: dict[str, tuple[dict[str, Any], Expected]] = {
    "empty text": ({"prompt": ""}, _invalid("prompt", "empty", "at least 1")),
    "no token ids": ({"prompt": []}, _invalid("prompt", "[]")),
    "prompt longer than the context": (
        {"prompt": [7] * (CONTEXT + 1)},
        _invalid("prompt", str(CONTEXT + 1), str(CONTEXT - 1)),
    ),
    "max_tokens 0": ({"max_tokens": 0}, _invalid("max_tokens", "0", "[1, 4096]")),
    "max_tokens negative": ({"max_tokens": -5}, _invalid("max_tokens", "-5", "[1, 4096]")),
    "max_tokens absurd": (
        {"max_tokens": 10**30},
        _invalid("max_tokens", "1" + "0" * 30, "[1, 4096]"),
    ),
    "top_p 2": ({"top_p": 2}, _invalid("top_p", "2", "(0, 1]")),
    "unknown model": ({"model": "gpt-17"}, Expected(StatusCode.NOT_FOUND, 404, None, ("gpt-17",))),
    "unknown field": ({"tempreature": 1}, _invalid("tempreature", "no such field")),
    "wrong type": ({"max_tokens": "16"}, _invalid("max_tokens", '"16"', "integer")),
    "a number for a flag": ({"stream": 1}, _invalid("stream", "1", "boolean")),
    "wrong type within": ({"prompt": [1, "a"]}, _invalid("prompt[1]", '"a"', "token id")),
    "token id beyond the vocabulary": (
        {"prompt": [5, VOCAB_SIZE]},
        _invalid("prompt[1]", "500", "[0, 500)"),
    ),
    "negative token id": ({"prompt": [-1]}, _invalid("prompt[0]", "-1", "[0, 500)")),
    "huge token id": ({"prompt": [2**70]}, _invalid("prompt[0]", str(2**70), "[0, 500)")),
    "10,000 stop strings": ({"stop": ["x"] * 10_000}, _invalid("stop", "10000", "at most 16")),
    "stop string of 1 MB": (
        {"stop": "x" * 1_000_000},
        _invalid("stop[0]", "1000000", "1 to 1024"),
    ),
    "500 logprobs": ({"logprobs": 500}, _invalid("logprobs", "500", "[0, 20]")),
    "n 0": ({"n": 0}, _invalid("n", "0", "[1, 64]")),
    "half of a surrogate pair": (
        {"prompt": "a\ud800"},
        _invalid("body", "not valid JSON", "hex escape", "column"),
    ),
    "not implemented": (
        {"suffix": "end"},
        Expected(StatusCode.UNIMPLEMENTED, 400, "suffix", ("is set", "prompts that are text")),
    ),
}

BODIES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "malformed": (b'{"prompt": "a"', ("not valid JSON",)),
    "empty": (b"", ("not valid JSON",)),
    "an array": (b"[1]", ("[1]", "must be an object")),
    "invalid UTF-8": (b'{"prompt": "a\xff"}', ("not valid JSON", "unicode", "column 14")),
    "not a number": (b'{"prompt": "a", "temperature": NaN}', ("temperature",)),
    "nested too deep": (b'{"prompt": ' + b"[" * 1_000, ("not valid JSON",)),
    "100,000 lists": (b'{"prompt": ' + b"[" * 100_000, ("objects and lists", "16384")),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", HTTP_CASES)
def test_http(service: Service, case: str, stream: bool):
    fields, expected = HTTP_CASES[case]
    body = {"prompt": GOOD_PROMPT, "temperature": 0, "stream": stream, **fields}
    status, answer = _post(service, json.dumps(body).encode())
    assert status == expected.http_status, answer
    error = answer["error"]
    assert error["param"] == expected.field
    for word in (expected.field or "", *expected.words):
        assert word in error["message"]
    code = "context_length_exceeded" if "longer than the context" in case else None
    assert error["code"] == {404: "model_not_found", 409: "already_exists"}.get(status, code)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("case", BODIES)
def test_http_body_that_is_no_request(service: Service, case: str, path: str):
    body, words = BODIES[case]
    status, answer = _post(service, body, path)
    assert status == 400
    for word in words:
        assert word in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, ("messages", "at least 1")),
        ({"messages": [{"role": "user"}]}, ("messages[0].content", "missing")),
        ({"messages": [{"role": "ghost", "content": "boo"}]}, ("messages[0].role", "ghost")),
        ({"max_completion_tokens": 0}, ("max_completion_tokens", "0", "[1, 4096]")),
        ({"logprobs": True, "top_logprobs": 500}, ("top_logprobs", "500", "20")),
        ({"stop": ["x"] * 10_000}, ("stop", "10000", "at most 16")),
    ],
    ids=["no messages", "no content", "unknown role", "no tokens", "logprobs", "stop strings"],
)
def test_http_chat(service: Service, fields: dict[str, Any], words: tuple[str, ...]):
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    status, answer = _post(service, json.dumps(body).encode(), "/v1/chat/completions")
    assert status == 400, answer
    for word in words:
        assert word in answer["error"]["message"]


@pytest.mark.parametrize("is_chunked", [False, True], ids=["with length", "chunked"])
def test_http_body_of_100_mb(service: Service, is_chunked: bool):
    piece = b" " * MIB

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield piece

    headers = {} if is_chunked else {"Content-Length": str(100 * MIB)}
    status, answer = _post(service, pieces(), headers=headers)
    assert status == 413
    assert str(MIB) in answer["error"]["message"]


def _post(
    service: Service,
    body: Any,
    path: str = "/v1/completions",
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    host, port = service.router.http.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    # the router answers before the client has sent the body
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request(
            "POST", path, body, JSON_TYPE | (headers or {}), encode_chunked=not headers
        )
    try:
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


# --- a pool that is smaller than the context ------------------------------------------------------


def test_prompt_that_can_never_fit_the_pool(model_dirs: ModelDirs, run_dir: Callable[[], Path]):
    """The error names the pool's limit, not the model's."""
    with Service(run_dir(), model_dirs.get("llama"), worker=["--num-blocks=8"]) as service:
        good = _generate_well(service)
        error = _refusal(service, generate_request([7] * 200))
        _assert_status(error, _invalid("prompt", "200", "127"))
        error = _refusal(service, generate_request([7] * 100, max_tokens=60))
        _assert_status(error, _invalid("sampling.max_tokens", "60", "at most 28", "128"))
        body = {"prompt": [7] * 200}
        status, answer = _post(service, json.dumps(body).encode())
        assert (status, answer["error"]["param"]) == (400, "prompt")
        # A request that just fits is served.
        result = read(service.stub.Generate(generate_request([7] * 100, max_tokens=28), timeout=30))
        assert len(result.outputs[0]) == 28
        assert _generate_well(service) == good
        service.wait_until_idle()
