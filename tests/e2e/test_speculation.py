"""Guesses change no output: greedy, sampled, constrained, preempted, swapped."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import common_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.generation import Result, generate_request, read_aio
from tests.e2e.references import greedy_tokens
from tests.e2e.service import Service

NUM_TOKENS = 128
CRAMPED = ("--num-blocks=20", "--host-kv-memory-gb=0.01", "--block-size=16")
"""Device blocks for one of the longest sequences, not for two; host blocks for the others."""
_COUNTERS = ("draft_tokens", "accepted_tokens")


@pytest.fixture(scope="module")
def ngram(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service with few blocks that guesses by n-grams."""
    worker = ["--speculative=ngram", "--num-draft-tokens=5", *CRAMPED]
    with Service(run_dir(), long_llama, worker=worker) as service:
        yield service


@pytest.fixture(scope="module")
def draft(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service with few blocks whose draft model is the model itself."""
    worker = ["--speculative=draft", f"--draft-model={long_llama}", *CRAMPED]
    with Service(run_dir(), long_llama, worker=worker) as service:
        yield service


def _prompts() -> list[list[int]]:
    draw = random.Random(7)
    prompts = [[draw.randrange(5, 500) for _ in range(length)] for length in (3, 16, 33, 64, 100)]
    return [*prompts, [*prompts[-1][:64], 9]]  # some find blocks of others in the prefix cache


def _mixed() -> list[dict[str, Any]]:
    """Requests with different sampling parameters of every kind."""
    sampled = {"temperature": 0.9, "seed": 11}
    return [
        {**sampled, "top_p": 0.9, "logprobs": 2},
        {**sampled, "top_k": 3, "n": 3},
        {**sampled, "repetition_penalty": 1.3},
        {**sampled, "min_tokens": 20, "stop_token_ids": [7, 8, 9], "temperature": 0.3},
        {"logit_bias": {17: 2.5}, "logprobs": 1},
        {"structured": common_pb2.StructuredOutput(regex="[a-z ]{40}")},
        {"frequency_penalty": 0.5, "min_tokens": 5},
    ]


async def _all_at_once(service: Service, requests: list[Any]) -> list[Result]:
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        return await asyncio.gather(*(read_aio(stub.Generate(request)) for request in requests))


def _counts(service: Service) -> dict[str, float]:
    metrics = service.metrics(service.worker)
    return {name: metrics[f"quire_worker_spec_decode_num_{name}_total"] for name in _COUNTERS}


@pytest.fixture(scope="module")
def greedy(long_llama: Path) -> list[list[int]]:
    return greedy_tokens(long_llama, _prompts(), NUM_TOKENS)


@pytest.mark.parametrize("name", ["ngram", "draft"])
async def test_greedy_tokens_are_those_of_transformers(
    name: str, greedy: list[list[int]], request: pytest.FixtureRequest
):
    service = await asyncio.to_thread(request.getfixturevalue, name)
    requests = [
        generate_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in _prompts()
    ]
    before = await asyncio.to_thread(_counts, service)
    results = await _all_at_once(service, requests)
    assert [result.outputs[0] for result in results] == greedy
    after = await asyncio.to_thread(_counts, service)
    num_guessed, num_right = (after[each] - before[each] for each in _COUNTERS)
    if name == "draft":
        assert num_right == num_guessed > 0
    metrics = await asyncio.to_thread(service.metrics, service.scheduler)
    assert metrics["quire_num_preemptions_total"] > 0


@pytest.mark.parametrize("name", ["ngram", "draft"])
async def test_a_mixed_batch_gets_what_it_gets_without_guesses(
    name: str, service: Service, request: pytest.FixtureRequest
):
    guessing = await asyncio.to_thread(request.getfixturevalue, name)
    prompt = _prompts()[2]
    requests = [
        generate_request(prompt, max_tokens=60, ignore_eos="structured" not in options, **options)
        for options in _mixed()
    ]
    want = await _all_at_once(service, requests)
    got = await _all_at_once(guessing, requests)
    for expected, result in zip(want, got, strict=True):
        assert result.outputs == expected.outputs
        assert result.text == expected.text
        ends = [
            {i: (end.finish_reason, end.stop_token_id) for i, end in each.finished.items()}
            for each in (result, expected)
        ]
        assert ends[0] == ends[1]
    await asyncio.to_thread(guessing.wait_until_idle)
