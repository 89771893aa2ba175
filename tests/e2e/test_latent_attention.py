"""With latent attention, greedy tokens equal `transformers`, however blocks move."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.child import eventually
from tests.e2e.generation import Result, generate_request, read
from tests.e2e.references import NUM_TOKENS, greedy_tokens
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs

LENGTHS = (1, 15, 16, 33, 64, 65, 90)
NUM_FORKS = 2


@dataclass(frozen=True)
class Case:
    """A service with room for a few of the prompts, and their outputs by transformers."""

    service: Service
    prompts: list[list[int]]
    outputs: list[list[int]]

    def start(self, threads: ThreadPoolExecutor) -> Callable[[], list[Result]]:
        """Start all streams; returns a function that waits for their results."""

        def generate(prompt: list[int]) -> Result:
            request = generate_request(prompt, n=NUM_FORKS, max_tokens=NUM_TOKENS, ignore_eos=True)
            return read(self.service.stub.Generate(request, timeout=200))

        futures = [threads.submit(generate, prompt) for prompt in self.prompts]
        return lambda: [future.result() for future in futures]

    def assert_equal(self, results: list[Result]) -> None:
        for prompt, result, output in zip(self.prompts, results, self.outputs, strict=True):
            assert result.outputs == [output] * NUM_FORKS, f"prompt of {len(prompt)} tokens"


@pytest.fixture(scope="module")
def case(model_dirs: ModelDirs, run_dir: Callable[[], Path]) -> Iterator[Case]:
    model_dir = model_dirs.get("deepseek_v3")
    draw = random.Random(3)
    prompts = [[draw.randrange(5, 500) for _ in range(length)] for length in LENGTHS]
    prompts.append([*prompts[-1][:50], 7])  # shares three blocks with the one before
    worker = ["--num-blocks=40", "--host-kv-memory-gb=0.01"]
    with Service(run_dir(), model_dir, worker=worker) as service:
        yield Case(service, prompts, greedy_tokens(model_dir, prompts))


def _metric_of(case: Case, name: str) -> float:
    """Run all streams at once, compare their outputs, and return a metric of the scheduler."""
    with ThreadPoolExecutor(len(case.prompts)) as threads:
        case.assert_equal(case.start(threads)())
    return case.service.metrics(case.service.scheduler)[name]


def test_recomputed_in_chunks_and_forked(case: Case):
    flags = "--preemption-mode=recompute", "--max-prefill-chunk=16", "--no-enable-prefix-caching"
    case.service.use_scheduler(*flags)
    assert _metric_of(case, "quire_recomputed_tokens_total") > 0


def test_swapped_forked_and_with_prefix_hits(case: Case):
    service = case.service
    service.use_scheduler("--preemption-mode=swap")
    assert _metric_of(case, "quire_kv_swapped_in_blocks_total") > 0
    longest = max(range(len(case.prompts)), key=lambda i: len(case.prompts[i]))
    request = generate_request(case.prompts[longest], max_tokens=NUM_TOKENS, ignore_eos=True)
    read(service.stub.Generate(request, timeout=100))
    again = read(service.stub.Generate(request, timeout=100))
    assert again.outputs == [case.outputs[longest]]
    assert again.usage is not None
    assert again.usage.cached_tokens == 80


def test_taken_over_by_the_next_scheduler(case: Case):
    service = case.service
    service.use_scheduler("--preemption-mode=swap")
    with ThreadPoolExecutor(len(case.prompts)) as threads:
        results = case.start(threads)
        eventually(lambda: service.load().num_requests_swapped or None, "some are swapped out")
        service.scheduler.kill()
        service.start_scheduler("--preemption-mode=swap")
        case.assert_equal(results())
    assert service.metrics(service.scheduler)["quire_adopted_tokens_total"] > 0
