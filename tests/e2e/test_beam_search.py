"""Beam search equals `transformers` in fp32, under any other load."""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.v1 import common_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.generation import Result, generate_request, read_aio
from tests.e2e.references import Search, greedy_tokens, searched_tokens
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs

NUM_TOKENS = 40
BLOCK_SIZE = 16
SMALL_POOL_BLOCKS = 40
"""Enough for the widest search alone: 2 blocks of prompt, then 8 times 4."""
ENDS = tuple(range(30, 500, 40))
"""One token in forty ends an output: often enough that searches end in the middle."""
STOPPING = {
    False: common_pb2.EARLY_STOPPING_HEURISTIC,
    True: common_pb2.EARLY_STOPPING_WHEN_FULL,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}


@dataclass(frozen=True)
class Case:
    """Searches, plain prompts beside them, and their expected outputs."""

    model_dir: Path
    searches: list[Search]
    found: list[list[list[int]]]
    prompts: list[list[int]]
    outputs: list[list[int]]


def _searches() -> list[Search]:
    draw = random.Random(0)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(5, 500) for _ in range(length))

    # Prompts that end before, at and after a block's border.
    searches = [
        Search(prompt(length), width, n, NUM_TOKENS)
        for width, n, length in ((2, 1, 15), (4, 2, 16), (8, 8, 17), (8, 3, 32))
    ]
    searches += [
        Search(prompt(20), 4, 4, NUM_TOKENS, ENDS, penalty, stopping)
        for stopping in STOPPING
        for penalty in (0.0, 1.0, 2.0, -0.5)
    ]
    searches.append(Search(searches[2].prompt, 8, 2, NUM_TOKENS, ENDS))
    searches.append(Search(prompt(33), 2, 2, NUM_TOKENS, ENDS, 0.7, early_stopping=True))
    searches.append(Search(prompt(5), 4, 4, NUM_TOKENS, ENDS, min_tokens=20))
    searches.append(Search(prompt(31), 4, 3, 1))
    return searches


@pytest.fixture(scope="module")
def case(model_dirs: ModelDirs) -> Case:
    model_dir, searches = model_dirs.get("llama"), _searches()
    draw = random.Random(1)
    prompts = [[draw.randrange(5, 500) for _ in range(length)] for length in (9, 40, 70)]
    found = searched_tokens(model_dir, searches)
    ended = [output for outputs in found for output in outputs if 1 < len(output) < NUM_TOKENS]
    assert len(ended) > len(searches) // 2, "too few searches end in the middle"
    return Case(model_dir, searches, found, prompts, greedy_tokens(model_dir, prompts, NUM_TOKENS))


@pytest.fixture(scope="module")
def ample(case: Case, run_dir: Callable[[], Path]) -> Iterator[Service]:
    with Service(run_dir(), case.model_dir, worker=["--num-blocks=1200"]) as service:
        yield service


@pytest.fixture(scope="module")
def cramped(case: Case, run_dir: Callable[[], Path]) -> Iterator[Service]:
    worker = [f"--num-blocks={SMALL_POOL_BLOCKS}", "--host-kv-memory-gb=0.01"]
    with Service(run_dir(), case.model_dir, worker=worker) as service:
        yield service


async def _generate(service: Service, case: Case) -> tuple[list[Result], list[Result]]:
    """The results of all searches and all plain requests; some of the plain ones sample."""
    requests = [
        generate_request(
            search.prompt,
            n=search.n,
            max_tokens=search.num_tokens,
            min_tokens=search.min_tokens,
            ignore_eos=True,
            stop_token_ids=search.ends,
            beam=common_pb2.BeamSearch(
                width=search.width,
                length_penalty=search.length_penalty,
                early_stopping=STOPPING[search.early_stopping],
            ),
        )
        for search in case.searches
    ]
    requests += [
        generate_request(p, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
        for p in case.prompts
    ]
    requests += [
        generate_request(p, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=7, n=2)
        for p in case.prompts
    ]
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        results = await asyncio.gather(*(read_aio(stub.Generate(r)) for r in requests))
    return results[: len(case.searches)], results[len(case.searches) :]


async def _check(service: Service, case: Case) -> dict[str, float]:
    results, plain = await _generate(service, case)
    for search, result, found in zip(case.searches, results, case.found, strict=True):
        assert result.outputs == found, search
        scores = [
            result.finished[i].cumulative_logprob / len(output) ** search.length_penalty
            for i, output in enumerate(found)
        ]
        assert scores == sorted(scores, reverse=True)
        for i, output in enumerate(found):
            ended = output[-1] in search.ends
            assert result.finished[i].HasField("stop_token_id") == ended
    greedy = [result.outputs[0] for result in plain[: len(case.prompts)]]
    assert greedy == case.outputs
    assert not plain[0].finished[0].HasField("cumulative_logprob")
    await asyncio.to_thread(service.wait_until_idle)
    return await asyncio.to_thread(service.metrics, service.scheduler)


async def test_all_at_once(ample: Service, case: Case):
    await asyncio.to_thread(ample.use_scheduler)
    metrics = await _check(ample, case)
    assert metrics["quire_num_preemptions_total"] == 0


async def test_without_prefix_cache(ample: Service, case: Case):
    await asyncio.to_thread(ample.use_scheduler, "--no-enable-prefix-caching")
    await _check(ample, case)


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-enable-prefix-caching"],
        ["--preemption-mode=recompute"],
        ["--preemption-mode=swap", "--max-swap-blocks=3"],
    ],
    ids=["no-cache", "recompute", "swap"],
)
async def test_with_room_for_one(cramped: Service, case: Case, flags: list[str]):
    await asyncio.to_thread(cramped.use_scheduler, *flags)
    metrics = await _check(cramped, case)
    assert metrics["quire_num_preemptions_total"] > 0
