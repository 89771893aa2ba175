"""When a process dies, streams pause and continue; a process that drains ends cleanly."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from contract.liveness.epoch import MAX_LEAD_NS, clock_epoch
from quire.client import SamplingParams
from quire.v1 import common_pb2, inference_pb2, worker_pb2
from quire.v1.worker_pb2_grpc import WorkerServiceStub
from tests.e2e.child import START_S, Child, eventually
from tests.e2e.generation import Result, generate_request, read
from tests.e2e.resuming_reader import ResumingReader, merged
from tests.e2e.service import Service

NUM_TOKENS = 600
NUM_BEAMS = 3
BLOCK_SIZE = 16
OPTIONS = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
REQUESTS = (
    generate_request([5], **OPTIONS),
    generate_request(list(range(30, 130)), **OPTIONS),
    generate_request(list(range(30, 145)), n=3, **OPTIONS),
    generate_request([8] * 40, n=2, temperature=0.9, top_p=0.95, seed=11, **OPTIONS),
    generate_request([9] * 17, temperature=1.0, seed=12, frequency_penalty=0.5, **OPTIONS),
    generate_request("A quire is a gathering of pages", **OPTIONS),
    generate_request(
        list(range(60, 100)),
        n=2,
        beam=common_pb2.BeamSearch(width=NUM_BEAMS),
        **OPTIONS | {"max_tokens": NUM_TOKENS // 2},
    ),
)
NUM_BEFORE = 20
"""Tokens of each stream when a process dies."""


@pytest.fixture(scope="module")
def own(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service whose processes the tests kill and start again."""
    drain = "--drain-s=200"  # longer than the streams last on a slow machine
    with Service(run_dir(), long_llama, worker=["--num-blocks=600"], router=[drain]) as service:
        yield service


@pytest.fixture(scope="module")
def unfailed(own: Service) -> list[Result]:
    """The requests' outputs without a failure."""
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(lambda request: read(own.stub.Generate(request)), REQUESTS))


class Reader:
    """Reads a stream in a thread, and signals when it has `NUM_BEFORE` tokens."""

    def __init__(self, service: Service, request: inference_pb2.GenerateRequest) -> None:
        self._stream = service.stub.Generate(request, timeout=200)
        self._pool = ThreadPoolExecutor(1)
        self._result = Result()
        self.is_under_way = threading.Event()
        if request.HasField("beam"):  # all output comes at the end
            self.is_under_way.set()
        self.result: Future[Result] = self._pool.submit(self._read)

    def _read(self) -> Result:
        for response in self._stream:
            self._result.add(response)
            if len(self._result.token_ids.get(0, ())) >= NUM_BEFORE:
                self.is_under_way.set()
        return self._result

    def close(self) -> None:
        self._stream.cancel()
        self._pool.shutdown()

    @property
    def num_tokens(self) -> int:
        return sum(len(token_ids) for token_ids in list(self._result.token_ids.values()))


@pytest.fixture
def readers(own: Service, unfailed: list[Result]) -> Iterator[list[Reader]]:
    """Running streams of all requests."""
    assert unfailed, "made before, while nothing else runs"
    with own.holding_steps(own.router, len(REQUESTS)):
        readers = [Reader(own, request) for request in REQUESTS]
    try:
        for reader in readers:
            assert reader.is_under_way.wait(START_S)
        yield readers
    finally:
        for reader in readers:
            reader.close()


def _assert_as_unfailed(readers: list[Reader], unfailed: list[Result]) -> None:
    for i, (reader, expected) in enumerate(zip(readers, unfailed, strict=True)):
        result = reader.result.result(timeout=200)
        assert result.outputs == expected.outputs, f"request {i}"
        assert result.text == expected.text, f"request {i}"
        assert result.usage is not None
        assert expected.usage is not None
        assert result.usage.completion_tokens == expected.usage.completion_tokens


def _num_live(readers: list[Reader]) -> int:
    return sum(not reader.result.done() for reader in readers)


def test_streams_survive_the_death_of_the_worker(
    own: Service, readers: list[Reader], unfailed: list[Result]
):
    own.worker.kill()
    num_live = _num_live(readers)
    own.start_worker()
    assert num_live == len(REQUESTS), "the worker died too late to matter"
    _assert_as_unfailed(readers, unfailed)
    own.wait_until_ready()
    own.wait_until_idle()


def test_streams_survive_the_death_of_the_scheduler(
    own: Service, readers: list[Reader], unfailed: list[Result]
):
    """No token is recomputed, except the last ones of a beam search's beams."""
    own.scheduler.kill()
    num_live = _num_live(readers)
    own.wait_until_not_ready()
    assert num_live == len(REQUESTS), "the scheduler died too late to matter"
    assert own.get_json(own.router, "/health")[0] == 200
    own.start_scheduler()
    _assert_as_unfailed(readers, unfailed)
    own.wait_until_ready()
    own.wait_until_idle()
    num_recomputed = own.metrics(own.scheduler)["quire_recomputed_tokens_total"]
    # for each beam, its last block and one block without a label
    assert num_recomputed <= NUM_BEAMS * 2 * BLOCK_SIZE
    assert own.metrics(own.scheduler)["quire_adopted_tokens_total"] > 0


def test_streams_survive_the_death_of_scheduler_and_worker(
    own: Service, readers: list[Reader], unfailed: list[Result]
):
    own.scheduler.kill()
    own.worker.kill()
    assert _num_live(readers) == len(REQUESTS)
    own.wait_until_not_ready()
    own.start_scheduler()
    own.start_worker()
    _assert_as_unfailed(readers, unfailed)
    own.wait_until_ready()
    own.wait_until_idle()


def test_a_request_without_a_scheduler_is_unavailable(own: Service, unfailed: list[Result]):
    own.scheduler.kill()
    own.wait_until_not_ready()
    with pytest.raises(grpc.RpcError) as caught:
        next(own.stub.Generate(REQUESTS[0], timeout=10))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert own.get_json(own.router, "/ready")[0] == 503
    own.start_scheduler()
    own.wait_until_ready()
    assert read(own.stub.Generate(REQUESTS[0])).outputs == unfailed[0].outputs


def test_a_scheduler_of_an_older_epoch_exits(own: Service, unfailed: list[Result]):
    """As if a hung scheduler continues after another one took its workers over."""
    own.scheduler.kill()
    own.start_scheduler("--epoch=1")

    def has_ended() -> bool | None:
        return None if own.scheduler.poll() is None else True

    eventually(has_ended, "the stale scheduler exits", START_S)
    assert own.scheduler.poll() == 3
    own.scheduler.kill()
    own.start_scheduler()
    own.wait_until_ready()
    assert read(own.stub.Generate(REQUESTS[0])).outputs == unfailed[0].outputs


def test_streams_survive_a_stranger_that_claims_the_worker(
    own: Service, readers: list[Reader], unfailed: list[Result]
):
    """Whatever epoch the stranger claims, the next scheduler takes a newer one."""
    with grpc.insecure_channel(f"unix:{own.uds['worker']}") as channel:
        worker = WorkerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            worker.Attach(worker_pb2.AttachRequest(epoch=2**64 - 1))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"epoch is {2**64 - 1}; it must be in [1, " in caught.value.details()
        most = clock_epoch() + MAX_LEAD_NS
        worker.Attach(worker_pb2.AttachRequest(epoch=most, scheduler_id="a stranger"))
    assert _num_live(readers) == len(REQUESTS), "it came too late to matter"
    eventually(own.scheduler.poll, "the scheduler finds itself replaced")
    own.scheduler.kill()
    own.start_scheduler()
    _assert_as_unfailed(readers, unfailed)
    own.wait_until_ready()
    own.wait_until_idle()


def test_streams_survive_a_scheduler_that_is_told_to_end(
    own: Service, readers: list[Reader], unfailed: list[Result]
):
    own.scheduler.stop()
    assert _num_live(readers) == len(REQUESTS), "it waited for them, or they were too short"
    own.start_scheduler()
    _assert_as_unfailed(readers, unfailed)
    own.wait_until_ready()
    own.wait_until_idle()


def test_streams_survive_a_worker_that_hangs(
    own: Service, readers: list[Reader], unfailed: list[Result]
):
    """The scheduler reports the worker; when it continues, nothing is recomputed."""
    before = own.metrics(own.scheduler)["quire_recomputed_tokens_total"]
    own.worker.signal(signal.SIGSTOP)
    try:
        _wait_for_status(own, own.scheduler, 503, "been silent")
    finally:
        own.worker.signal(signal.SIGCONT)
    _wait_for_status(own, own.scheduler, 200, "ready")
    _assert_as_unfailed(readers, unfailed)
    own.wait_until_idle()
    assert own.metrics(own.scheduler)["quire_recomputed_tokens_total"] == before


def test_streams_survive_a_scheduler_that_hangs(
    own: Service, readers: list[Reader], unfailed: list[Result]
):
    own.scheduler.signal(signal.SIGSTOP)
    try:
        _wait_for_status(own, own.router, 503, "been silent")
    finally:
        own.scheduler.signal(signal.SIGCONT)
    _assert_as_unfailed(readers, unfailed)
    own.wait_until_ready()
    own.wait_until_idle()


def test_a_storm_of_long_prompts_is_not_taken_for_a_hang(own: Service):
    prompts = [[2 + (i * j) % 490 for j in range(1, 3000)] for i in range(1, 17)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        reading = [
            pool.submit(read, own.stub.Generate(generate_request(prompt, max_tokens=3)))
            for prompt in prompts
        ]
        statuses = set()
        while not all(each.done() for each in reading):
            for child in (own.scheduler, own.router):
                code, body = own.get_json(child, "/ready")
                statuses.add((code, body["status"]))
        assert all(each.result().usage.prompt_tokens == 2999 for each in reading)
    assert statuses == {(200, "ready")}
    own.wait_until_idle()


def _wait_for_status(own: Service, child: Child, code: int, status: str) -> None:
    def look() -> bool | None:
        found, body = own.get_json(child, "/ready")
        return (found == code and status in body["status"]) or None

    eventually(look, f"{child.module} says {status!r}")


def test_no_request_that_comes_while_the_scheduler_is_restarted_fails_under_way(
    own: Service, readers: list[Reader], unfailed: list[Result]
):
    """Between two schedulers, new requests are refused with a hint to retry."""
    is_over = threading.Event()
    prompt = [5, 6, 7]

    def ask_again_and_again() -> list[Result]:
        results = []
        while not is_over.is_set():
            result = Result()
            try:
                for response in own.stub.Generate(generate_request(prompt, max_tokens=8)):
                    result.add(response)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or result.token_ids:
                    raise
                is_over.wait(0.02)  # like a client that retries
            else:
                results.append(result)
        return results

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask_again_and_again) for _ in range(2)]
        try:
            own.scheduler.stop()
            own.start_scheduler()
            _assert_as_unfailed(readers, unfailed)
        finally:
            is_over.set()
    results = [result for each in asking for result in each.result()]
    assert results
    assert all(result.outputs == results[0].outputs for result in results)
    own.wait_until_ready()
    own.wait_until_idle()


def test_streams_survive_a_worker_that_drains(
    own: Service, readers: list[Reader], unfailed: list[Result]
):
    own.worker.stop()
    assert _num_live(readers) == len(REQUESTS), "the streams were too short to matter"
    own.start_worker()
    _assert_as_unfailed(readers, unfailed)
    own.wait_until_ready()
    own.wait_until_idle()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_resumable_stream_survives_the_death_of_router_and_scheduler(own: Service, at_once: bool):
    """If both die at once, the client repeats its request and skips the output that it has."""
    sampling = SamplingParams(
        temperature=0.9, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1
    )
    request = [8] * 40, sampling, {"n": 2}
    expected = merged(ResumingReader([own.target], *request).events.result(120))
    reader = ResumingReader([own.target], *request)
    assert reader.is_under_way.wait(START_S)
    own.scheduler.kill()
    if not at_once:
        own.start_scheduler()
        before = reader.num_tokens
        eventually(lambda: reader.num_tokens > before or None, "the stream goes on", START_S)
    own.router.kill()
    assert not reader.events.done(), "it was too short to matter"
    if at_once:
        own.start_scheduler()
    own.start_router()
    assert merged(reader.events.result(120)) == expected
    own.wait_until_ready()
    own.wait_until_idle()


def test_a_router_that_ends_lets_live_streams_end_first(
    own: Service, readers: list[Reader], unfailed: list[Result]
):
    own.worker.signal(signal.SIGSTOP)  # so that they last
    try:
        own.router.signal(signal.SIGTERM)
        _wait_for_status(own, own.router, 503, "draining")
        with pytest.raises(grpc.RpcError) as caught:
            next(own.stub.Generate(REQUESTS[0], timeout=10))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "draining" in caught.value.details()
        assert _num_live(readers) == len(REQUESTS), "the streams were too short to matter"
    finally:
        own.worker.signal(signal.SIGCONT)
    _assert_as_unfailed(readers, unfailed)
    own.router.wait()
    own.start_router()
    own.wait_until_ready()
    own.wait_until_idle()
    assert read(own.stub.Generate(REQUESTS[0])).outputs == unfailed[0].outputs
