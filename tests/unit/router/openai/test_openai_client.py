"""The `openai` package, unmodified, uses the OpenAI API."""

import openai
import pytest
from openai_fakes import delta, play, spell

from contract.errors import InvalidArgumentError, TooBusyError, UnavailableError
from contract.outputs import (
    FinishReason,
    OutputDelta,
    OutputError,
    OutputFinished,
    TokenLogprob,
    Usage,
)

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def client(server):
    host, port = server
    async with openai.AsyncOpenAI(
        base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0, timeout=None
    ) as client:
        yield client


async def test_completion_in_one_piece(client):
    completion = await client.completions.create(model="org/tiny", prompt="Say")
    assert completion.object == "text_completion"
    assert completion.id.startswith("cmpl-")
    assert (completion.model, completion.created) == ("org/tiny", 1_700_000_000)
    (choice,) = completion.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "Hi!", "stop")
    assert choice.logprobs is None
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 3, 6)
    assert usage.prompt_tokens_details.cached_tokens == 1
    assert usage.prompt_tokens_details.pinned_tokens == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "cde"], ["ab", "cde"]),
        ([7, 8], [(7, 8)]),
        ([[7, 8], [9]], [(7, 8), (9,)]),
    ],
)
async def test_each_kind_of_prompt_becomes_requests(client, inference, prompt, expected):
    await client.completions.create(model="org/tiny", prompt=prompt)
    assert [request.prompt for request in inference.requests] == expected


async def test_choices_are_numbered_over_prompts_and_outputs(client, inference):
    inference.script = lambda request: spell(request.prompt.upper())(request)
    completion = await client.completions.create(model="org/tiny", prompt=["a", "b", "c"], n=2)
    texts = {choice.index: choice.text for choice in completion.choices}
    assert texts == {0: "A", 1: "A", 2: "B", 3: "B", 4: "C", 5: "C"}
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 6)
    assert len({request.request_id for request in inference.requests}) == 3


async def test_completion_stream_of_several_prompts(client, inference):
    inference.script = lambda request: spell(request.prompt.upper())(request)
    stream = await client.completions.create(
        model="org/tiny",
        prompt=["ab", "cd"],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = dict.fromkeys(range(4), "")
    reasons = {}
    usage = None
    async for chunk in stream:
        assert usage is None, "nothing follows the usage"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "AB", 1: "AB", 2: "CD", 3: "CD"}
    assert reasons == dict.fromkeys(range(4), "stop")
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 8)


async def test_usage_is_in_every_event_if_asked_for(client, inference):
    inference.script = lambda request: spell(request.prompt.upper())(request)
    stream = await client.completions.create(
        model="org/tiny",
        prompt=["ab", "cde"],
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    usages = [chunk.usage async for chunk in stream]
    assert {usage.prompt_tokens for usage in usages[:-1]} == {6}  # the fake's, of two prompts
    num_tokens = [usage.completion_tokens for usage in usages]
    assert num_tokens == sorted(num_tokens)
    assert set(num_tokens) == {1, 2, 3, 4, 5}
    assert num_tokens[-2:] == [5, 5]


async def test_legacy_logprobs_have_offsets_and_the_drawn_token(client):
    completion = await client.completions.create(model="org/tiny", prompt="x", logprobs=2)
    logprobs = completion.choices[0].logprobs
    assert logprobs.tokens == ["H", "i", "!"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[1] == {"A": -2.0, "B": -3.0, "i": -0.5}


async def test_streamed_legacy_logprobs_continue_their_offsets(client):
    stream = await client.completions.create(
        model="org/tiny", prompt="x", logprobs=0, n=2, stream=True
    )
    index_to_offsets = {0: [], 1: []}
    async for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs:
                index_to_offsets[choice.index] += choice.logprobs.text_offset
                assert choice.logprobs.top_logprobs == [{choice.text: -0.5}]
    assert index_to_offsets == {0: [0, 1, 2], 1: [0, 1, 2]}


async def test_of_tokens_with_the_same_text_the_likeliest_is_shown(client, inference):
    inference.script = spell("x")
    inference.text.token_text = lambda _token_id: "same"
    completion = await client.completions.create(model="org/tiny", prompt="x", logprobs=2)
    assert completion.choices[0].logprobs.top_logprobs == [{"same": -2.0}]


async def test_a_logprob_of_minus_infinity_is_a_number(client, inference):
    entry = TokenLogprob(float("-inf"), ((ord("b"), float("-inf")),))
    finished = OutputFinished(0, FinishReason.STOP)
    inference.script = play([OutputDelta(0, 0, (97,), "a", (entry,)), finished, Usage(1, 1, 0)])
    completion = await client.completions.create(model="org/tiny", prompt="x", logprobs=1)
    logprobs = completion.choices[0].logprobs
    assert logprobs.token_logprobs == [-9999.0]
    assert logprobs.top_logprobs == [{"a": -9999.0, "b": -9999.0}]


async def test_headers_set_priority_and_tenant(client, inference):
    headers = {"X-Quire-Priority": "3", "X-Quire-Tenant": "a"}
    await client.completions.create(model="org/tiny", prompt=["a", "b"], extra_headers=headers)
    await client.chat.completions.create(model="org/tiny", messages=HELLO, extra_headers=headers)
    assert [(r.priority, r.tenant) for r in inference.requests] == [(3, "a")] * 3


async def test_a_header_makes_a_call_resumable(client, inference):
    for value in ("true", "false"):
        headers = {"X-Quire-Resumable": value}
        await client.completions.create(model="org/tiny", prompt="a", extra_headers=headers)
    await client.completions.create(model="org/tiny", prompt="a")
    assert [r.resumable for r in inference.requests] == [True, False, False]
    with pytest.raises(openai.BadRequestError, match='X-Quire-Resumable is "yes"'):
        await client.completions.create(
            model="org/tiny", prompt="a", extra_headers={"X-Quire-Resumable": "yes"}
        )


async def test_chat_in_one_piece(client, inference):
    inference.script = spell("Hi!", FinishReason.LENGTH)
    completion = await client.chat.completions.create(model="org/tiny", messages=HELLO, n=2)
    assert completion.object == "chat.completion"
    assert completion.id.startswith("chatcmpl-")
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice in completion.choices:
        assert (choice.message.role, choice.message.content) == ("assistant", "Hi!")
        assert choice.finish_reason == "length"
    (request,) = inference.requests
    assert request.prompt == "<user>Hello<assistant>"
    assert not request.add_special_tokens
    assert request.sampling.max_tokens is None


async def test_chat_stream_introduces_each_choice_once(client):
    stream = await client.chat.completions.create(
        model="org/tiny", messages=HELLO, n=2, stream=True
    )
    chunks = [chunk async for chunk in stream]
    for index in (0, 1):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in choices] == ["assistant", None, None, None]
        assert "".join(choice.delta.content or "" for choice in choices) == "Hi!"
        assert [choice.finish_reason for choice in choices] == [None, None, None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)


async def test_chat_logprobs_have_bytes(client, inference):
    inference.script = spell("é")
    completion = await client.chat.completions.create(
        model="org/tiny", messages=HELLO, logprobs=True, top_logprobs=1
    )
    (entry,) = completion.choices[0].logprobs.content
    assert (entry.token, entry.logprob, entry.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("A", -2.0)]


async def test_a_conversation_can_be_sent_back(client, inference):
    first = await client.chat.completions.create(model="org/tiny", messages=HELLO)
    answered = first.choices[0].message.model_dump()  # absent fields are null
    await client.chat.completions.create(model="org/tiny", messages=[*HELLO, answered, *HELLO])
    assert inference.requests[-1].prompt == "<user>Hello<assistant>Hi!<user>Hello<assistant>"


async def test_models_are_listed_and_found(client):
    (model,) = [model async for model in await client.models.list()]
    assert (model.id, model.object, model.owned_by) == ("org/tiny", "model", "quire")
    assert (model.root, model.max_model_len) == ("org/tiny", 64)
    assert (await client.models.retrieve("org/tiny")).id == "org/tiny"
    with pytest.raises(openai.NotFoundError, match="nonesuch"):
        await client.models.retrieve("nonesuch")


async def test_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="nonesuch"):
        await client.completions.create(model="nonesuch", prompt="x")


async def test_invalid_argument_names_its_field(client, inference):
    inference.refusal = InvalidArgumentError("top_p", "is 2; it must be in (0, 1]")
    with pytest.raises(openai.BadRequestError, match=r"top_p is 2; it must be in \(0, 1\]") as info:
        await client.chat.completions.create(model="org/tiny", messages=HELLO, top_p=2)
    assert (info.value.param, info.value.type) == ("top_p", "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_by_the_scheduler_is_a_status(client, inference, stream):
    inference.script = play([TooBusyError("the queue is full", retry_after_s=2.6)])
    with pytest.raises(openai.RateLimitError, match="the queue is full") as info:
        await client.completions.create(model="org/tiny", prompt="x", stream=stream)
    assert info.value.response.headers["Retry-After"] == "3"
    assert all(live.closed.is_set() for live in inference.lives)


async def test_unavailable_is_503(client, inference):
    inference.refusal = UnavailableError("the model is loading")
    with pytest.raises(openai.InternalServerError, match="loading") as info:
        await client.completions.create(model="org/tiny", prompt="x")
    assert info.value.status_code == 503


FAILED = OutputFinished(0, FinishReason.ERROR, error=OutputError(14, "the worker is lost", True))


async def test_failure_of_an_output_is_the_status_of_an_answer_in_one_piece(client, inference):
    inference.script = play([delta("a"), FAILED, Usage(1, 1, 0)])
    with pytest.raises(openai.InternalServerError, match="the worker is lost") as info:
        await client.completions.create(model="org/tiny", prompt="x")
    assert info.value.status_code == 503


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (FAILED, "the worker is lost"),
        (OutputFinished(0, FinishReason.CANCELLED), "cancelled"),
        (OutputFinished(0, FinishReason.DEADLINE), "deadline"),
        (RuntimeError("a secret"), "internal error"),
    ],
)
async def test_failure_within_a_stream_is_an_event(client, inference, last, message):
    inference.script = play([delta("a"), last])
    stream = await client.completions.create(model="org/tiny", prompt="x", stream=True)
    assert (await anext(stream)).choices[0].text == "a"
    with pytest.raises(openai.APIError, match=message):
        await anext(stream)
    assert inference.lives[0].closed.is_set()
