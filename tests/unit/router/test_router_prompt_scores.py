"""The log-probabilities of a long prompt: each call gets all, in messages of a bounded size."""

import asyncio

import pytest
from keyed_router import plain_settings, running
from router_fake_scheduler import LENGTH

from contract.codec.outputs import event_to_proto
from contract.outputs import PromptScores, TokenLogprob
from contract.sampling import MAX_LOGPROBS
from quire.openengine import openengine_pb2, openengine_pb2_grpc
from quire.v1 import common_pb2, inference_pb2
from quire.vllm_engine import vllm_engine_pb2, vllm_engine_pb2_grpc
from router.live import live_request
from router.live.output import MAX_EVENT_TOKENS

GRPC_DEFAULT_BYTES = 4 << 20
PROMPT = [5, 6, 7, 8, 9, 10]
SCORES = [-1.0, -2.0, -3.0, -4.0, -5.0]
REQUEST = inference_pb2.GenerateRequest(
    token_ids=inference_pb2.TokenIds(ids=PROMPT),
    sampling=common_pb2.SamplingParams(prompt_logprobs=0, max_tokens=1),
)


@pytest.fixture
async def router(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(live_request, "MAX_EVENT_TOKENS", 2)
    settings = plain_settings(model_dir, tmp_path, openengine=True, vllm_engine=True)
    async with running(settings, tmp_path) as router:
        yield router


async def compute(router):
    """Answers the next request with one token."""
    submit = await router.scheduler.submits.get()
    key = submit.first_seq_key
    await router.scheduler.step({key: [70]}, prompt_logprobs={key: SCORES})
    await router.scheduler.step(finished={key: LENGTH})


def values(logprobs):
    return [each.logprob for each in logprobs]


def test_the_largest_message_is_one_that_every_client_accepts():
    entry = TokenLogprob(-1.5, tuple((150_000 + i, -1.5) for i in range(MAX_LOGPROBS)))
    scores = PromptScores((entry,) * MAX_EVENT_TOKENS, has_more=True)
    assert event_to_proto("r", scores).ByteSize() < GRPC_DEFAULT_BYTES / 4


async def test_a_stream_has_them_in_several_messages_before_the_first_token(router):
    call = router.stub.Generate(REQUEST)
    await compute(router)
    events = [event async for event in call]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["prompt", "prompt", "prompt", "delta", "finished", "usage"]
    assert [values(event.prompt.logprobs) for event in events[:3]] == [
        SCORES[:2],
        SCORES[2:4],
        SCORES[4:],
    ]
    assert [event.prompt.has_more for event in events[:3]] == [True, True, False]


async def test_the_last_part_of_an_even_number_says_so(router):
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(REQUEST)
    request.token_ids.ids.pop()
    call = router.stub.Generate(request)
    key = (await router.scheduler.submits.get()).first_seq_key
    await router.scheduler.step({key: [70]}, prompt_logprobs={key: SCORES[:4]})
    assert [(await call.read()).prompt.has_more for _ in range(2)] == [True, False]
    assert (await call.read()).HasField("delta")


async def test_many_requests_on_one_call(router):
    call = router.stub.GenerateMany()
    await call.write(inference_pb2.GenerateManyRequest(number=3, generate=REQUEST))
    await call.done_writing()
    await compute(router)
    events = [event for message in [m async for m in call] for event in message.events]
    prompts = [event.prompt for event in events if event.HasField("prompt")]
    assert [prompt.has_more for prompt in prompts] == [True, True, False]
    assert values(each for prompt in prompts for each in prompt.logprobs) == SCORES


async def test_calls_with_one_message_for_the_prompt(router):
    once = router.stub.GenerateOnce(inference_pb2.GenerateOnceRequest(request=REQUEST))
    await compute(router)
    prompt = (await once).prompt
    assert (values(prompt.logprobs), prompt.has_more) == (SCORES, False)
    call = openengine_pb2_grpc.InferenceStub(router.channel).Generate(
        openengine_pb2.GenerateRequest(
            token_ids=openengine_pb2.TokenIds(ids=PROMPT),
            response=openengine_pb2.ResponseOptions(return_prompt_logprobs=True),
        )
    )
    await compute(router)
    prompts = [event.prompt for event in [e async for e in call] if event.HasField("prompt")]
    (tokens,) = [prompt.tokens for prompt in prompts]
    assert [token.token_id for token in tokens] == PROMPT
    assert values(tokens[1:]) == SCORES
    call = vllm_engine_pb2_grpc.VllmEngineStub(router.channel).Generate(
        vllm_engine_pb2.GenerateRequest(
            tokenized=vllm_engine_pb2.TokenizedInput(input_ids=PROMPT),
            stream=True,
            sampling_params=vllm_engine_pb2.SamplingParams(prompt_logprobs=0),
        )
    )
    await compute(router)
    scores = (await call.read()).chunk.input_logprobs
    assert [each.value for each in scores.token_logprobs[1:]] == SCORES


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_http(router, is_streamed):
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0, "stream": is_streamed}
    asking = asyncio.create_task(router.http.post("/v1/completions", json=body))
    await compute(router)
    async with await asking as response:
        text = await response.text()
    assert text.count('"prompt_logprobs"') == 1
    assert [f'"logprob":{score}' in text for score in SCORES] == [True] * len(SCORES)
