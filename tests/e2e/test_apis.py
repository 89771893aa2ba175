"""Clients call a running service, over gRPC and with OpenAI's client."""

import json
import urllib.request
from collections.abc import Iterator

import openai
import pytest

from quire.v1 import common_pb2, inference_pb2
from tests.e2e.generation import generate_request, read
from tests.e2e.service import JSON_TYPE, Service
from tests.models_fixture import BOS_TOKEN_ID, EOS_TOKEN_ID

TEXT = "The quick brown fox jumps over the lazy dog. Grüße 🙂"
GREEDY = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(traced: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{traced.url}/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        yield client


def _text(service: Service, request: inference_pb2.GenerateRequest) -> str:
    return read(service.stub.Generate(request, timeout=30)).text[0]


# --- OpenAI's HTTP, by OpenAI's package -----------------------------------------------------------


def test_openai_completion(traced: Service, client: openai.OpenAI):
    extra = {"ignore_eos": True}
    answer = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=24, temperature=0, extra_body=extra
    )
    assert answer.choices[0].text == _text(traced, generate_request(TEXT, **GREEDY))
    assert answer.choices[0].finish_reason == "length"
    tokens = traced.stub.Tokenize(inference_pb2.TokenizeRequest(text=TEXT)).token_ids
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), 24)


def test_openai_completion_streamed_with_usage(client: openai.OpenAI):
    options = {"model": "tiny", "prompt": TEXT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}


def test_openai_chat(traced: Service, client: openai.OpenAI):
    messages = [{"role": "user", "content": "What is a quire?"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=3)
    first, second = whole.choices
    assert first.message.role == "assistant"
    assert first.message.content == second.message.content
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    assert whole.usage is not None
    assert all(len(token.top_logprobs) == 3 for token in first.logprobs.content)
    assert all(token.logprob <= 0 for token in first.logprobs.content)

    streamed = client.chat.completions.create(**options, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == first.message.content

    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**messages[0])])
    tokenized = traced.stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
    assert whole.usage.prompt_tokens == len(tokenized.token_ids)
    request = generate_request(list(tokenized.token_ids), max_tokens=24)
    assert _text(traced, request) == first.message.content


ENUM = {"type": "string", "enum": ["red", "green"]}
PAINT = {
    "name": "paint",
    "parameters": {
        "type": "object",
        "properties": {"colour": ENUM},
        "required": ["colour"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("functions", [["paint"], ["paint", "wash"]], ids=["one", "of two"])
def test_openai_required_tool_call(client: openai.OpenAI, functions: list[str]):
    options = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Paint it."}],
        "tools": [{"type": "function", "function": {**PAINT, "name": f}} for f in functions],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 160,
    }
    (choice,) = client.chat.completions.create(**options).choices
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls"
    assert call.function.name in functions
    assert json.loads(call.function.arguments)["colour"] in ("red", "green")
    options["messages"] += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    pieces = [piece.function for c in chunks for piece in c.delta.tool_calls or ()]
    assert pieces[0].name in functions
    assert json.loads("".join(p.arguments for p in pieces))["colour"] in ("red", "green")
    assert chunks[-1].finish_reason == "tool_calls"


def test_openai_auto_tool_choice_leaves_the_output_free(traced: Service, client: openai.OpenAI):
    options = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Paint it."}],
        "tools": [{"type": "function", "function": PAINT}],
    }
    answer = client.chat.completions.create(**options, max_tokens=24, temperature=0)
    tokens = traced.post_json("/tokenize", options)["tokens"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.choices[0].message.content == _text(
        traced, generate_request(tokens, max_tokens=24)
    )


def test_openai_stop_string(traced: Service, client: openai.OpenAI):
    text = _text(traced, generate_request(TEXT, **GREEDY))
    stop = text[len(text) // 2 :][:4]
    extra = {"ignore_eos": True}
    answer = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=24, temperature=0, stop=stop, extra_body=extra
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_openai_models_and_errors(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        client.completions.create(model="gpt-17", prompt="a")
    with pytest.raises(openai.BadRequestError, match=r"top_p.*2.*\(0, 1\]"):
        client.completions.create(model="tiny", prompt="a", top_p=2)


def test_events_end_with_done(traced: Service):
    body = {"prompt": [5, 6], "max_tokens": 3, "temperature": 0, "stream": True}
    url = f"{traced.url}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), JSON_TYPE)
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_vllms_routes(traced: Service):
    tokenized = traced.post_json("/tokenize", {"prompt": TEXT, "return_token_strs": True})
    assert (
        tokenized["tokens"]
        == traced.stub.Tokenize(inference_pb2.TokenizeRequest(text=TEXT)).token_ids
    )
    assert (tokenized["count"], tokenized["max_model_len"]) == (len(tokenized["tokens"]), 4096)
    assert len(tokenized["token_strs"]) == tokenized["count"]
    text = traced.post_json("/detokenize", {"tokens": tokenized["tokens"]})
    assert text == {"prompt": "<s>" + TEXT}
    status, load = traced.get_json(traced.router, "/load")
    assert (status, load["num_blocks"]) == (200, 256)
    assert traced.get_json(traced.router, "/version")[0] == 200


# --- gRPC -----------------------------------------------------------------------------------------


def test_generate_and_generate_once_agree(traced: Service):
    request = generate_request(TEXT, n=2, logprobs=2, **GREEDY)
    streamed = read(traced.stub.Generate(request))
    once = traced.stub.GenerateOnce(inference_pb2.GenerateOnceRequest(request=request))
    assert [list(output.token_ids) for output in once.outputs] == streamed.outputs
    assert [output.text for output in once.outputs] == [streamed.text[0], streamed.text[1]]
    assert once.usage.completion_tokens == 48
    for output in once.outputs:
        assert output.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert [logprob.top_token_ids[0] for logprob in output.logprobs] == list(output.token_ids)
        assert all(len(logprob.top_token_ids) == 2 for logprob in output.logprobs)


def test_tokenize_and_detokenize(traced: Service):
    tokenized = traced.stub.Tokenize(inference_pb2.TokenizeRequest(text=TEXT))
    assert tokenized.token_ids[0] == BOS_TOKEN_ID
    assert tokenized.max_model_len == 4096
    plain = traced.stub.Tokenize(inference_pb2.TokenizeRequest(text=TEXT, add_special_tokens=False))
    assert list(plain.token_ids) == list(tokenized.token_ids[1:])
    detokenize = inference_pb2.DetokenizeRequest(token_ids=tokenized.token_ids)
    assert traced.stub.Detokenize(detokenize).text == TEXT
    detokenize.skip_special_tokens = False
    assert traced.stub.Detokenize(detokenize).text == "<s>" + TEXT


def test_list_models(traced: Service):
    (model,) = traced.stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert (model.id, model.max_model_len, model.vocab_size) == ("tiny", 4096, 500)
    assert list(model.eos_token_ids) == [EOS_TOKEN_ID]


def test_load(traced: Service):
    load = traced.wait_until_idle()
    assert (load.num_blocks, load.block_size, load.num_workers) == (256, 16, 1)
    stream = traced.stub.Generate(generate_request(TEXT, max_tokens=4000, ignore_eos=True))
    next(stream)
    busy = traced.load()
    assert busy.num_requests_running == 1
    assert busy.num_free_blocks + busy.num_cached_blocks < 256
    stream.cancel()
    traced.wait_until_idle()


def test_stop_token_and_stop_string_say_which(traced: Service):
    token_ids = read(traced.stub.Generate(generate_request(TEXT, **GREEDY))).outputs[0]
    token = next(t for i, t in enumerate(token_ids) if i > 4 and t not in token_ids[:i])
    request = generate_request(TEXT, stop_token_ids=[token], **GREEDY)
    result = read(traced.stub.Generate(request))
    assert result.outputs[0] == token_ids[: token_ids.index(token) + 1]
    assert result.finished[0].finish_reason == common_pb2.FINISH_REASON_STOP
    assert result.finished[0].stop_token_id == token
