"""A scheduler is killed and started again at once: what the worker holds is not computed again."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.v1 import common_pb2, inference_pb2
from tests.e2e.child import eventually
from tests.e2e.generation import Result, generate_request, read
from tests.e2e.service import Service

SHIPPED_MODEL = Path(__file__).parents[2] / "models" / "quire-tiny-python"
OPTIONS = {"max_tokens": 200, "ignore_eos": True}
FORM = common_pb2.StructuredOutput(regex="([a-z]{1,8} ){30,60}")
REQUESTS = (
    generate_request(list(range(30, 130)), **OPTIONS),
    generate_request(list(range(30, 145)), n=3, **OPTIONS),
    generate_request([8] * 40, n=2, temperature=0.9, top_p=0.95, seed=11, **OPTIONS),
    generate_request([9] * 17, temperature=1.0, seed=12, frequency_penalty=0.5, **OPTIONS),
    generate_request([11] * 9, temperature=1.0, seed=13, max_tokens=200),
    generate_request("def form(", temperature=1.0, seed=7, structured=FORM, max_tokens=200),
)
NUM_BEFORE = 20
"""So many tokens each stream has got when the scheduler dies."""
WORKER = ["--dtype=float32", "--host-kv-memory-gb=0.2", "--max-num-batched-tokens=512"]
SCHEDULER = ["--preemption-mode=swap"]


@pytest.fixture(scope="module")
def unfailed(run_dir: Callable[[], Path]) -> list[Result]:
    """What the requests give when nothing dies."""
    with Service(run_dir(), SHIPPED_MODEL, worker=WORKER) as service:
        return _read_all(service, lambda: None)


def _read_all(
    service: Service, disturb: Callable[[], None], num_before: int = NUM_BEFORE
) -> list[Result]:
    """Read all streams in threads; `disturb` as soon as each has got some tokens."""
    under_way = [threading.Event() for _ in REQUESTS]

    def read_one(request: inference_pb2.GenerateRequest, has_begun: threading.Event) -> Result:
        result = Result()
        for response in service.stub.Generate(request, timeout=120):
            result.add(response)
            if len(result.token_ids.get(0, ())) >= num_before:
                has_begun.set()
        return result

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        results: list[Future[Result]] = [
            pool.submit(read_one, request, begun)
            for request, begun in zip(REQUESTS, under_way, strict=True)
        ]
        for begun in under_way:
            assert begun.wait(60)
        assert not any(result.done() for result in results), "too late to matter"
        disturb()
        return [result.result(timeout=90) for result in results]


def _num_to_compute(results: Sequence[Result]) -> int:
    """The fewest tokens that can be computed for these results, as their usage tells."""
    num_tokens = 0
    for request, result in zip(REQUESTS, results, strict=True):
        assert result.usage is not None
        num_prompt = result.usage.prompt_tokens - result.usage.cached_tokens
        num_forks = max(1, request.n) - 1  # each computes the prompt's last token again
        num_tokens += num_prompt + num_forks + sum(len(ids) - 1 for ids in result.outputs)
    return num_tokens


def _restart(service: Service) -> None:
    service.scheduler.kill()
    service.start_scheduler(*SCHEDULER)


def _assert_as_unfailed(results: list[Result], unfailed: list[Result]) -> None:
    for i, (result, expected) in enumerate(zip(results, unfailed, strict=True)):
        assert result.outputs == expected.outputs, f"request {i}"
        assert result.text == expected.text, f"request {i}"


def test_nothing_is_computed_again_after_the_death_of_the_scheduler(
    run_dir: Callable[[], Path], unfailed: list[Result]
):
    with Service(run_dir(), SHIPPED_MODEL, worker=WORKER) as service:
        results = _read_all(service, lambda: _restart(service))
        _assert_as_unfailed(results, unfailed)
        service.wait_until_ready()
        service.wait_until_idle(within_s=20)
        scheduler, worker = service.metrics(service.scheduler), service.metrics(service.worker)
        assert scheduler["quire_recomputed_tokens_total"] == 0
        assert scheduler["quire_adopted_tokens_total"] > NUM_BEFORE * len(REQUESTS)
        num_wasted = len(REQUESTS)  # one that stops is computed once more
        num_least = _num_to_compute(results)
        assert num_least <= worker["quire_worker_computed_tokens_total"] <= num_least + num_wasted

        prompt = [*range(30, 130), 7, 7, 7]
        usage = read(service.stub.Generate(generate_request(prompt, max_tokens=2))).usage
        assert usage is not None
        assert usage.cached_tokens == 96, "the prefix cache is as it was"


def test_nothing_is_computed_again_of_what_was_swapped_out(
    run_dir: Callable[[], Path], unfailed: list[Result]
):
    worker = [*WORKER, "--num-blocks=100"]
    with Service(run_dir(), SHIPPED_MODEL, worker=worker, scheduler=SCHEDULER) as service:

        def kill_when_some_are_swapped() -> None:
            eventually(lambda: service.load().num_requests_swapped or None, "some are swapped out")
            _restart(service)

        results = _read_all(service, kill_when_some_are_swapped, num_before=1)
        _assert_as_unfailed(results, unfailed)
        service.wait_until_ready()
        service.wait_until_idle(within_s=20)
        metrics = service.metrics(service.scheduler)
        assert metrics["quire_kv_swapped_in_blocks_total"] > 0
        assert metrics["quire_recomputed_tokens_total"] == 0
