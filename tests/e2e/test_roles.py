"""A prefill and a decode worker: exact tokens, even if one of them is killed."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.child import eventually
from tests.e2e.generation import generate_request, read
from tests.e2e.service import Service
from tests.e2e.two_workers import Stream, TwoWorkers

WORKER = ("--num-blocks=256", "--host-kv-memory-gb=0.05")
_PROMPTS = random.Random(0)


class Apart(TwoWorkers):
    """The first worker prefills, the other one decodes."""

    def __init__(self, directory: Path, model: Path) -> None:
        super().__init__(directory, model, worker=WORKER)
        self._flags["worker"].append("--role=prefill")
        self._other_flags.append("--role=decode")
        self.prefill, self.decode = self.targets

    def start_decode_worker(self) -> None:
        self.other.start(self._other_flags)

    def wait_until_requests_move(self) -> None:
        """Wait until both are attached, and the scheduler has moved a request between them."""
        self.wait_until_both_are_attached()
        stream = Stream(self, request_of("probe", 50, 3000))
        stream.read_until(1)
        eventually(lambda: self.where_is("probe") == self.decode or None, "a request has moved")
        stream.cancel()
        self.wait_until_idle()


@pytest.fixture(scope="module")
def apart(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Apart]:
    with Apart(run_dir(), long_llama) as service:
        yield service


def request_of(request_id: str, length: int, num_tokens: int, n: int = 1):
    """Make a request with a new prompt, so that no worker has cached a part of it."""
    prompt = [_PROMPTS.randrange(5, 495) for _ in range(length)]
    request = generate_request(
        prompt, n=n, max_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=length
    )
    request.request_id = request_id
    return request


def expected_of(service: Service, requests: Sequence) -> list[list[list[int]]]:
    return [read(service.stub.Generate(each)).outputs for each in requests]


def read_all(service: Apart, requests: Sequence) -> list[list[list[int]]]:
    """Read all at once."""
    outputs: list[list[list[int]]] = [[] for _ in requests]

    def read_one(index: int) -> None:
        outputs[index] = read(service.stub.Generate(requests[index])).outputs

    threads = [threading.Thread(target=read_one, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs


def test_prompts_and_decodes_are_apart_and_tokens_exact(apart, service):
    requests = [request_of(f"r{i}", 20 + 37 * i, 600, n=1 + i % 2) for i in range(6)]
    apart.wait_until_requests_move()
    before = apart.metrics(apart.scheduler)["quire_migrations_total"]
    assert read_all(apart, requests) == expected_of(service, requests)
    assert apart.metrics(apart.scheduler)["quire_migrations_total"] == before + 6


def test_next_turn_of_a_conversation_stays_where_it_was_decoded(apart):
    first = request_of("turn-1", 64, 64)
    apart.wait_until_requests_move()
    (output,) = read(apart.stub.Generate(first)).outputs
    before = apart.metrics(apart.scheduler).get("quire_migrations_total", 0)
    prompt = [*first.token_ids.ids, *output, 7, 8, 9]
    turn = generate_request(prompt, max_tokens=8, ignore_eos=True)
    result = read(apart.stub.Generate(turn))
    assert result.usage.cached_tokens >= 112
    assert apart.metrics(apart.scheduler).get("quire_migrations_total", 0) == before


def test_killed_decode_worker_is_replaced_by_the_other_until_it_is_back(apart, service):
    requests = [request_of(f"d{i}", 60 + i, 1900) for i in range(2)]
    apart.wait_until_requests_move()
    streams = [Stream(apart, each) for each in requests]
    for stream in streams:
        stream.read_until(20)
    eventually(lambda: apart.is_at(apart.decode, "d0") or None, "it decodes there")
    apart.other.kill()
    for each in requests:
        eventually(
            lambda name=each.request_id: apart.is_at(apart.prefill, name) or None, "it is back"
        )
    apart.start_decode_worker()
    assert [stream.read_to_end() for stream in streams] == expected_of(service, requests)
    apart.wait_until_requests_move()


def test_killed_prefill_worker_is_replaced_by_the_other(apart, service):
    requests = [request_of(f"p{i}", 700 + i, 60) for i in range(4)]
    streams = [Stream(apart, each) for each in requests]
    streams[0].read_until(1)
    apart.worker.kill()
    outputs = [stream.read_to_end() for stream in streams]
    assert outputs == expected_of(service, requests)
    late = [request_of("late", 90, 30)]
    assert read_all(apart, late) == expected_of(service, late)
    apart.start_first_again()


def test_a_prefix_is_pulled_from_the_worker_that_has_it(slow_llama, run_dir):
    scheduler = ("--placement=round-robin",)
    with TwoWorkers(run_dir(), slow_llama, worker=WORKER, scheduler=scheduler) as both:
        both.wait_until_both_are_attached()

        def pull() -> bool | None:
            """Ask both workers for a new prompt; None if the second one computed it."""
            request = request_of("first", 2500, 8)
            first = read(both.stub.Generate(request))
            assert first.usage.cached_tokens == 0
            request.request_id = "second"
            second = read(both.stub.Generate(request))
            assert second.outputs == first.outputs
            return second.usage.cached_tokens == 2499 // 16 * 16 or None

        eventually(pull, "a prefix is pulled")
        both.wait_until_idle()  # a step in flight may still hold them
        used = [any(tier.num_cached for tier in both.kv(each).tiers) for each in both.targets]
        assert used == [True, True]
