"""Fields for evaluation and reinforcement learning: token ids, echoes, bans, truncation."""

import json
from itertools import chain

import pytest
from openai_fakes import delta, play, spell

from contract.outputs import (
    FinishReason,
    OutputDelta,
    OutputFinished,
    PromptScores,
    TokenLogprob,
    Usage,
)

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCORES = (
    PromptScores((TokenLogprob(-1.0, ((72, -0.5),)),), has_more=True),
    PromptScores((TokenLogprob(-2.0, ((72, -0.5),)),)),
)


async def post(http, path, body):
    async with http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def chunks(http, path, body):
    async with http.post(path, json={**body, "stream": True}) as response:
        lines = (await response.text()).split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


async def test_completions_return_token_ids(http):
    body = {"prompt": "x", "return_token_ids": True}
    (choice,) = (await post(http, COMPLETIONS, body))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [*map(ord, "Hi!")])
    first, *others = [chunk["choices"][0] for chunk in await chunks(http, COMPLETIONS, body)]
    assert (first["prompt_token_ids"], first["token_ids"]) == ([1, 2, 3], [ord("H")])
    assert [choice.get("token_ids") for choice in others] == [[ord("i")], [ord("!")], None]


async def test_chats_return_token_ids(http):
    body = {"messages": HELLO, "return_token_ids": True}
    answer = await post(http, CHATS, body)
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert answer["choices"][0]["token_ids"] == [*map(ord, "Hi!")]
    first, *others = await chunks(http, CHATS, body)
    assert first["prompt_token_ids"] == [1, 2, 3]
    assert not any("prompt_token_ids" in chunk for chunk in others)
    ids = [chunk["choices"][0].get("token_ids", []) for chunk in (first, *others)]
    assert [*chain(*ids)] == [*map(ord, "Hi!")]


async def test_tokens_are_named_by_their_ids(http):
    body = {"prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = (await post(http, COMPLETIONS, body))["choices"]
    assert choice["logprobs"]["tokens"][0] == f"token_id:{ord('H')}"


async def test_chats_show_the_prompts_logprobs(http, inference):
    inference.script = play(
        [*SCORES, delta("Hi"), OutputFinished(0, FinishReason.STOP), Usage(3, 2, 0, 0)]
    )
    answer = await post(http, CHATS, {"messages": HELLO, "prompt_logprobs": 1})
    assert inference.requests[0].sampling.prompt_logprobs == 1
    first, second, third = answer["prompt_logprobs"]
    assert first is None
    assert {token_id: entry["logprob"] for token_id, entry in second.items()} == {
        "2": -1.0,
        "72": -0.5,
    }
    assert third["3"]["logprob"] == -2.0


# The request of lm-eval's local-completions for a log-likelihood, in both of its forms.
LIKELIHOOD = {"model": "org/tiny", "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", [[[1, 2, 3]], "abc"])
async def test_an_evaluation_gets_the_logprobs_of_its_prompt(http, inference, prompt, max_tokens):
    drawn = OutputDelta(0, 0, (100,), "d", (TokenLogprob(-3.0, ((100, -3.0),)),))
    inference.script = play(
        [*SCORES, drawn, OutputFinished(0, FinishReason.LENGTH), Usage(3, 1, 0, 0)]
    )
    answer = await post(
        http, COMPLETIONS, {**LIKELIHOOD, "prompt": prompt, "max_tokens": max_tokens}
    )
    (request,) = inference.requests
    assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (1, 1)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0][: 3 + max_tokens]
    assert len(logprobs["top_logprobs"]) == len(logprobs["tokens"]) == 3 + max_tokens
    assert answer["usage"]["completion_tokens"] == max_tokens


async def test_the_last_message_is_continued(http, inference):
    messages = [*HELLO, {"role": "assistant", "content": "Well"}]
    body = {"messages": messages, "continue_final_message": True}
    await post(http, CHATS, {**body, "add_generation_prompt": False})
    await post(http, CHATS, {"messages": HELLO, "add_generation_prompt": False})
    assert [kwargs for _, kwargs in inference.text.chats] == [
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": False},
    ]


async def test_a_middle_is_filled_in(http, inference):
    inference.script = spell("x")
    inference.text.marker_ids = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3}
    await post(http, COMPLETIONS, {"prompt": "a", "suffix": "b"})
    assert inference.requests[0].prompt == "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    inference.text.marker_ids = {"[PREFIX]": 1, "[SUFFIX]": 2}
    await post(http, COMPLETIONS, {"prompt": "a", "suffix": "b"})
    assert inference.requests[1].prompt == "[SUFFIX]b[PREFIX]a"


async def test_what_limits_outputs_and_prompts_is_part_of_the_request(http, inference):
    limits = {"allowed_token_ids": [5, 7], "bad_words": ["no"], "truncate_prompt_tokens": 3}
    await post(http, COMPLETIONS, {"prompt": "x", **limits})
    (request,) = inference.requests
    assert request.sampling.allowed_token_ids == (5, 7)
    assert (request.bad_words, request.truncate_prompt_tokens) == (("no",), 3)


async def test_a_stream_says_how_many_tokens_go_out_together(http, inference):
    inference.script = spell("x")
    body = {"prompt": "a", "stream": True, "stream_interval": 8}
    async with http.post(COMPLETIONS, json=body) as response:
        assert response.status == 200
        await response.read()
    await post(http, COMPLETIONS, {"prompt": "a"})
    assert [request.stream_interval for request in inference.requests] == [8, 1024]
