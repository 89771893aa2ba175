"""A request's tokens do not depend on other requests, on the batch, or on `n`."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.generation import generate_request, read, read_aio
from tests.e2e.service import Service

NUM_REQUESTS = 64
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
PENALTIES: tuple[dict[str, float], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"min_p": 0.02},
)


def _requests(*, is_sampled: bool) -> list[inference_pb2.GenerateRequest]:
    draw = random.Random(is_sampled)
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = [draw.randrange(5, 500) for _ in range(draw.randint(1, 120))]
        options: dict[str, Any] = PENALTIES[i % len(PENALTIES)] if is_sampled else {}
        if is_sampled:
            options = options | SAMPLED | {"seed": draw.getrandbits(64)}
        # Some may end at the model's end token, so they end at different times.
        options = {"ignore_eos": i % 2 == 0, "max_tokens": draw.randint(16, 64), **options}
        requests.append(generate_request(prompt, **options))
    return requests


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
async def test_64_streams_at_once_give_what_each_gives_alone(service: Service, is_sampled: bool):
    requests = _requests(is_sampled=is_sampled)
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        alone = [(await read_aio(stub.Generate(request))).outputs for request in requests]
        results = await asyncio.gather(*(read_aio(stub.Generate(r)) for r in requests))
        together = [result.outputs for result in results]
    differing = [i for i in range(NUM_REQUESTS) if together[i] != alone[i]]
    assert not differing
    assert len({tuple(output) for (output,) in alone}) == NUM_REQUESTS  # the outputs differ


async def test_text_at_once_is_the_text_alone(service: Service):
    prompts = [f"The quick brown fox number {i}: naïve café 🙂 " * (1 + i % 3) for i in range(16)]
    requests = [generate_request(prompt, max_tokens=48, ignore_eos=True) for prompt in prompts]
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        alone = [(await read_aio(stub.Generate(request))).text[0] for request in requests]
        results = await asyncio.gather(*(read_aio(stub.Generate(r)) for r in requests))
    assert [result.text[0] for result in results] == alone


def test_output_i_of_n_is_that_of_seed_plus_i(service: Service):
    prompt = list(range(100, 137))
    options = {"max_tokens": 48, "ignore_eos": True, **SAMPLED}
    seed = 2**64 - 3  # so that seed + i wraps around
    several = read(service.stub.Generate(generate_request(prompt, n=6, seed=seed, **options)))
    ones = [
        read(service.stub.Generate(generate_request(prompt, seed=(seed + i) % 2**64, **options)))
        for i in range(6)
    ]
    assert several.outputs == [one.outputs[0] for one in ones]
    assert len({tuple(output) for output in several.outputs}) == 6


def test_a_seed_repeats_and_another_does_not(service: Service):
    def tokens(seed: int | None) -> list[int]:
        request = generate_request([7, 8, 9], max_tokens=32, seed=seed, **SAMPLED)
        return read(service.stub.Generate(request)).outputs[0]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(None) != tokens(None)


@pytest.fixture(scope="module")
def cramped(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service with room for only a few of the sequences."""
    with Service(run_dir(), long_llama, worker=["--num-blocks=48"]) as service:
        yield service


async def test_survivors_of_preemptions_and_cancellations_are_exact(
    service: Service, cramped: Service
):
    draw = random.Random(7)
    shared = [draw.randrange(5, 500) for _ in range(100)]
    requests = []
    for request in _requests(is_sampled=True):
        request.n = draw.randint(1, 3)
        if draw.random() < 0.5:  # shares a prefix with others
            start = shared[: draw.randrange(100)]
            request.token_ids.ids[:] = [*start, *request.token_ids.ids[:20]]
        requests.append(request)
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        expected = await asyncio.gather(*(read_aio(stub.Generate(r)) for r in requests))

    async def disturb(stub: InferenceServiceStub, i: int) -> None:
        stream = stub.Generate(requests[i])
        for _ in range(i % 12):
            await stream.read()
        stream.cancel()

    async with cramped.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        survivors = asyncio.gather(*(read_aio(stub.Generate(r)) for r in requests))
        await asyncio.gather(*(disturb(stub, i) for i in range(NUM_REQUESTS)))
        results = await survivors
    wrong = [i for i in range(NUM_REQUESTS) if results[i].outputs != expected[i].outputs]
    assert not wrong
    metrics = await asyncio.to_thread(cramped.metrics, cramped.scheduler)
    assert metrics["quire_num_preemptions_total"] > 0
    await asyncio.to_thread(cramped.wait_until_idle)
