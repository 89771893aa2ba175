"""Greedy tokens equal those of `transformers` in fp32, under any other load."""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.generation import Result, generate_request, read, read_aio
from tests.e2e.references import NUM_TOKENS, greedy_tokens
from tests.e2e.service import Service
from tests.models_fixture import FAMILIES, ModelDirs

SHIPPED = sorted(Path(__file__).parents[2].glob("models/*/config.json"))
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 80, 96, 111, 128, 150)
CHUNK = 16
SMALL_POOL_BLOCKS = 30
"""Enough for the longest sequence (18 blocks), but not for two."""


@dataclass(frozen=True)
class Case:
    """A model, prompts, and their expected outputs."""

    model_dir: Path
    prompts: list[list[int]]
    outputs: list[list[int]]


@pytest.fixture(scope="module", params=[*FAMILIES, "shipped"])
def case(request: pytest.FixtureRequest, model_dirs: ModelDirs) -> Case:
    if request.param == "shipped":
        if not SHIPPED:
            pytest.skip("no models/*/config.json yet")
        model_dir = SHIPPED[0].parent
        prompts = _real_prompts(model_dir)
    else:
        model_dir = model_dirs.get(request.param)
        prompts = _random_prompts(request.param)
    assert len(prompts) == 32
    return Case(model_dir, prompts, greedy_tokens(model_dir, prompts))


@pytest.fixture(scope="module")
def ample(case: Case, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service whose pool has room for every prompt at once."""
    with Service(run_dir(), case.model_dir, worker=["--num-blocks=640"]) as service:
        yield service


@pytest.fixture(scope="module")
def cramped(case: Case, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service whose pool has room for only some prompts."""
    worker = [f"--num-blocks={SMALL_POOL_BLOCKS}"]
    with Service(run_dir(), case.model_dir, worker=worker) as service:
        yield service


def _random_prompts(seed: str) -> list[list[int]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, 500) for _ in range(length)] for length in LENGTHS]
    # For the prefix cache, some prompts share blocks with others, and some are repeated.
    longest = prompts[-1]
    prompts += [[*longest[:n], draw.randrange(5, 500)] for n in (15, 16, 32, 33, 100, 149)]
    return [*prompts, prompts[-1], prompts[14], prompts[15], prompts[16]]


def _real_prompts(model_dir: Path) -> list[list[int]]:
    from tokenizers import Tokenizer  # noqa: PLC0415

    source = Path(random.__file__).read_text()
    token_ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(source).ids
    return [token_ids[start : start + length] for start in (0, 500) for length in LENGTHS[:16]]


async def _all_at_once(
    service: Service, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, **options: int
) -> list[Result]:
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        streams = [
            stub.Generate(
                generate_request(prompt, max_tokens=num_tokens, ignore_eos=True, **options)
            )
            for prompt in prompts
        ]
        return await asyncio.gather(*map(read_aio, streams))


def _alone(service: Service, prompt: list[int], **options: str) -> Result:
    request = generate_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **options)
    return read(service.stub.Generate(request, timeout=60))


def _assert_equal(case: Case, results: list[Result]) -> None:
    wrong = [
        f"prompt {i} of {len(case.prompts[i])} tokens differs from token"
        f" {next(j for j, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])}"
        for i, (result, want) in enumerate(zip(results, case.outputs, strict=True))
        if (got := result.outputs[0]) != want
    ]
    assert not wrong, "; ".join(wrong)


async def test_in_a_batch_of_32(ample: Service, case: Case):
    await asyncio.to_thread(ample.use_scheduler)
    _assert_equal(case, await _all_at_once(ample, case.prompts))
    metrics = await asyncio.to_thread(ample.metrics, ample.scheduler)
    assert metrics["quire_num_preemptions_total"] == 0


async def test_with_prompts_from_the_prefix_cache(ample: Service, case: Case):
    await asyncio.to_thread(ample.use_scheduler)
    await _all_at_once(ample, case.prompts, 1)
    num_tokens = 32  # a wrong cached block would change the first tokens
    results = await _all_at_once(ample, case.prompts, num_tokens)
    # At least one token of a prompt is always computed, because its logits are needed.
    cachable = [(len(prompt) - 1) // 16 * 16 for prompt in case.prompts]
    assert [result.usage.cached_tokens for result in results] == cachable
    assert [result.outputs[0] for result in results] == [out[:num_tokens] for out in case.outputs]


async def test_without_prefix_cache(ample: Service, case: Case):
    await asyncio.to_thread(ample.use_scheduler, "--no-enable-prefix-caching")
    await _all_at_once(ample, case.prompts, 1)
    results = await _all_at_once(ample, case.prompts)
    _assert_equal(case, results)
    assert [result.usage.cached_tokens for result in results] == [0] * 32


async def test_prefill_in_chunks(ample: Service, case: Case):
    await asyncio.to_thread(ample.use_scheduler, f"--max-prefill-chunk={CHUNK}")
    i = max(range(32), key=lambda i: len(case.prompts[i]))
    steps_before = await asyncio.to_thread(_num_steps, ample)
    # The cache survives the scheduler's restart; no block was cached with this salt.
    result = await asyncio.to_thread(_alone, ample, case.prompts[i], cache_salt="in chunks")
    assert result.outputs == [case.outputs[i]]
    num_chunks = -(-len(case.prompts[i]) // CHUNK)
    assert (result.usage.cached_tokens, num_chunks > 1) == (0, True)
    num_steps = await asyncio.to_thread(_num_steps, ample) - steps_before
    assert num_steps >= num_chunks + NUM_TOKENS - 1
    _assert_equal(case, await _all_at_once(ample, case.prompts))


def test_alone(ample: Service, case: Case):
    ample.use_scheduler()
    for i in (5, 31):
        assert _alone(ample, case.prompts[i]).outputs == [case.outputs[i]]


async def test_four_outputs_are_the_same(ample: Service, case: Case):
    await asyncio.to_thread(ample.use_scheduler)
    chosen = (4, 5, 6, 13)  # of 15, 16 and 17 tokens, and longer
    results = await _all_at_once(ample, [case.prompts[i] for i in chosen], n=4)
    assert [result.outputs for result in results] == [[case.outputs[i]] * 4 for i in chosen]


async def test_preempted(cramped: Service, case: Case):
    _assert_equal(case, await _all_at_once(cramped, case.prompts))
    metrics = await asyncio.to_thread(cramped.metrics, cramped.scheduler)
    assert metrics["quire_num_preemptions_total"] > 0
    await asyncio.to_thread(cramped.wait_until_idle)


def _num_steps(service: Service) -> float:
    return service.metrics(service.scheduler)["quire_steps_total"]
