"""Accepted bodies: every field arrives, with OpenAI's defaults and vLLM's names."""

import json

import pytest

from contract.sampling import BeamSearch, EarlyStopping, SamplingParams

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]

SHARED_FIELDS = {
    "model": "org/tiny",
    "n": 2,
    "stop": ["x", "y"],
    "temperature": 0,
    "top_p": 0.9,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "seed": 5,
    "logit_bias": {"7": -100, "8": 1.5},
    "top_k": 4,
    "min_p": 0.3,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "cache_salt": "salt",
    "cache_pin_s": 30.0,
    "request_id": "mine",
    "user": "no effect",
    "safety_identifier": "no effect",
    "metadata": {"no": "effect"},
    "prompt_cache_key": "no effect",
    "service_tier": "auto",
    "store": False,
}


def expected_sampling(**own):
    return SamplingParams(
        temperature=0,
        top_k=4,
        top_p=0.9,
        min_p=0.3,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        seed=5,
        logit_bias={7: -100, 8: 1.5},
        min_tokens=2,
        stop_token_ids=(3, 4),
        ignore_eos=True,
        **own,
    )


def check_shared(request):
    assert (request.model, request.request_id, request.n) == ("org/tiny", "mine", 2)
    assert request.stop == ("x", "y")
    assert request.include_stop_str_in_output
    assert not request.skip_special_tokens
    assert request.cache_salt == "salt"
    assert request.cache_pin_s == 30.0


async def test_every_field_of_a_completion_arrives(http, inference):
    body = {
        **SHARED_FIELDS,
        "prompt": "x",
        "max_tokens": 9,
        "logprobs": 3,
        "best_of": 2,
        "echo": False,
        "add_special_tokens": False,
    }
    async with http.post(COMPLETIONS, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.headers["X-Request-Id"] == "mine"
        assert (await response.json())["id"] == "cmpl-mine"
    (request,) = inference.requests
    check_shared(request)
    assert request.sampling == expected_sampling(max_tokens=9, logprobs=3)
    assert not request.add_special_tokens


async def test_every_field_of_a_chat_arrives(http, inference):
    body = {
        **SHARED_FIELDS,
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be"}]},
            {"role": "user", "content": "Hello", "name": "Ada"},
        ],
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 3,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    async with http.post(CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())["id"] == "chatcmpl-mine"
    (request,) = inference.requests
    check_shared(request)
    assert request.sampling == expected_sampling(max_tokens=9, logprobs=3)
    assert inference.text.chats == [
        (
            [
                {"role": "system", "content": "Be"},
                {"role": "user", "content": "Hello", "name": "Ada"},
            ],
            {"enable_thinking": False},
        )
    ]


@pytest.mark.parametrize(
    ("fields", "beam"),
    [
        ({"n": 3}, BeamSearch(3)),
        ({"n": 2, "best_of": 5, "length_penalty": 0}, BeamSearch(5, 0.0)),
        ({"best_of": 4, "early_stopping": True}, BeamSearch(4, 1.0, EarlyStopping.WHEN_FULL)),
        ({"best_of": 4, "early_stopping": "never"}, BeamSearch(4, 1.0, EarlyStopping.NEVER)),
    ],
)
async def test_a_beam_search_has_vllms_names(http, inference, fields, beam):
    bodies = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": [{"role": "user", "content": "x"}]}}
    for path, body in bodies.items():
        search = {"use_beam_search": True, "temperature": 0, **fields}
        async with http.post(path, json=body | search) as response:
            assert response.status == 200, await response.text()
    assert [request.beam for request in inference.requests] == [beam, beam]
    assert [request.n for request in inference.requests] == [fields.get("n", 1)] * 2


async def test_defaults_and_nulls_are_openais(http, inference):
    nulls = dict.fromkeys(
        ["temperature", "logprobs", "stop", "seed", "suffix", "echo", "best_of", "max_tokens"]
    )
    for body in ({"prompt": "x"}, {"prompt": "x", **nulls}):
        async with http.post(COMPLETIONS, json=body) as response:
            assert response.status == 200, await response.text()
    for request in inference.requests:
        assert request.sampling == SamplingParams(max_tokens=16)
        assert (request.n, request.stop, request.model) == (1, (), "")
        assert request.add_special_tokens


async def test_the_minus_one_of_vllm_means_every_token(http, inference):
    async with http.post(COMPLETIONS, json={"prompt": "x", "top_k": -1, "stop": "."}) as response:
        assert response.status == 200
    assert inference.requests[0].sampling.top_k == 0
    assert inference.requests[0].stop == (".",)


async def test_requests_of_vllm_bench_are_understood(http, inference):
    completion = {
        "model": "org/tiny",
        "prompt": "x",
        "repetition_penalty": 1.0,
        "max_tokens": 3,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
        "top_p": 1.0,
        "min_tokens": 3,
    }
    chat = {
        "model": "org/tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "max_completion_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    for path, body in ((COMPLETIONS, completion), (CHAT, chat)):
        async with http.post(path, json=body, headers={"x-request-id": "bench-0"}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["X-Request-Id"] == "bench-0"
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        usage = json.loads(events[-3].removeprefix("data: "))
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3
    assert [request.request_id for request in inference.requests] == ["bench-0"] * 2


async def test_the_callers_trace_context_reaches_the_service(http, inference):
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with http.post(
        COMPLETIONS, json={"prompt": "x"}, headers={"traceparent": traceparent}
    ) as response:
        assert response.status == 200
    async with http.post(COMPLETIONS, json={"prompt": "x"}) as response:
        assert response.status == 200
    assert inference.traceparents == [traceparent, ""]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 2}, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5),
        ({"logprobs": 2}, None),
        ({"prompt_logprobs": 0}, 0),
    ],
)
async def test_an_echo_with_logprobs_asks_for_those_of_the_prompt(
    http, inference, fields, expected
):
    async with http.post(COMPLETIONS, json={"prompt": "x", **fields}):
        pass
    (request,) = inference.requests
    assert request.sampling.prompt_logprobs == expected


async def test_an_echo_shows_the_prompt_as_it_was_sent(http):
    async with http.post(COMPLETIONS, json={"prompt": "x", "echo": True}) as response:
        (choice,) = (await response.json())["choices"]
    assert choice["text"] == "xHi!"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
@pytest.mark.parametrize(
    ("fields", "pin_s"),
    [
        ({}, None),
        ({"prompt_cache_key": "session"}, 300.0),
        ({"prompt_cache_retention": "in_memory"}, 300.0),
        ({"prompt_cache_key": "session", "prompt_cache_retention": "24h"}, 86400.0),
    ],
)
async def test_a_session_s_prompt_is_pinned(http, inference, path, body, fields, pin_s):
    async with http.post(path, json=body | fields) as response:
        assert response.status == 200
    assert inference.requests[0].cache_pin_s == pin_s
