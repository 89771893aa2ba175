"""Two workers under one scheduler: reports of blocks, and requests that move with their KV."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from contract.codec.packing import unpack_int32
from quire.v1 import kv_pb2
from tests.e2e.child import eventually
from tests.e2e.generation import generate_request, read
from tests.e2e.two_workers import Stream, TwoWorkers

PROMPT = [5 + i % 490 for i in range(100)]
NUM_TOKENS = 600
"""The number of tokens that are compared."""
MAX_TOKENS = 1900
"""Long enough that a request still runs when the test looks; two of them fit a worker."""
HOST = "--host-kv-memory-gb=0.05"


@pytest.fixture(scope="module")
def fleet(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[TwoWorkers]:
    with TwoWorkers(run_dir(), long_llama, worker=("--num-blocks=256", HOST)) as service:
        service.wait_until_both_are_attached()
        yield service


def long_request(
    request_id: str, n: int = 1, prompt: Sequence[int] = PROMPT, num_tokens: int = MAX_TOKENS
):
    request = generate_request(
        prompt, n=n, max_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=7
    )
    request.request_id = request_id
    return request


@pytest.fixture(scope="module")
def expected(fleet: TwoWorkers) -> list[list[int]]:
    """Two outputs without a move."""
    request = long_request("unmoved", n=2, num_tokens=NUM_TOKENS)
    return read(fleet.stub.Generate(request)).outputs


def wait_until_free(service: TwoWorkers, target: str) -> None:
    def free() -> bool | None:
        tiers = service.kv(target).tiers
        return all(t.num_held == t.num_shared == 0 for t in tiers) or None

    eventually(free, f"{target} holds no block")


@pytest.mark.parametrize("n", [1, 2])
def test_request_that_moves_goes_on_bit_for_bit(fleet, expected, n):
    before = fleet.metrics(fleet.scheduler)
    request_id = f"moved-{n}"
    stream = Stream(fleet, long_request(request_id, n))
    stream.read_until(50)
    source = fleet.where_is(request_id)
    target = fleet.other_than(source)
    moved = fleet.migrate(request_id, target)
    assert moved.from_worker == source
    assert moved.num_sequences == n
    assert moved.num_blocks >= n * (len(PROMPT) + 50) // 16
    assert fleet.where_is(request_id) == target
    wait_until_free(fleet, source)
    assert fleet.migrate(request_id, target).was_there
    assert stream.read_first(NUM_TOKENS) == expected[:n]
    after = fleet.metrics(fleet.scheduler)
    assert after["quire_recomputed_tokens_total"] == before["quire_recomputed_tokens_total"]
    assert after["quire_migrations_total"] == before.get("quire_migrations_total", 0) + 1
    wait_until_free(fleet, target)


def test_request_may_move_there_and_back_again(fleet, expected):
    stream = Stream(fleet, long_request("wanderer"))
    for num_tokens in (20, 60, 100, 140):
        stream.read_until(num_tokens)
        fleet.migrate("wanderer", fleet.other_than(fleet.where_is("wanderer")))
    assert stream.read_first(NUM_TOKENS) == expected[:1]


def test_impossible_moves_are_refused_by_name(fleet):
    with pytest.raises(grpc.RpcError) as refused:
        fleet.migrate("nobody", fleet.targets[0])
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "nobody" in refused.value.details()
    with pytest.raises(grpc.RpcError) as refused:
        fleet.migrate("nobody", "unix:/nowhere")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "/nowhere" in refused.value.details()


def test_two_requests_with_one_prefix_share_its_blocks(fleet):
    fleet.wait_until_idle()
    prompt = PROMPT[::-1]  # not cached by another test
    streams = [Stream(fleet, long_request("twin-0", prompt=prompt))]
    streams[0].read_until(5)
    worker = fleet.where_is("twin-0")
    streams.append(Stream(fleet, long_request("twin-1", prompt=prompt)))
    streams[1].read_until(5)
    assert fleet.where_is("twin-1") == worker, "it goes where its prompt is cached"
    kv = fleet.kv(worker, block_tables=True, ref_counts=True)
    twins = {seq.request_id: seq for seq in kv.sequences}
    first, second = twins["twin-0"], twins["twin-1"]
    assert first.status == second.status == kv_pb2.SEQUENCE_STATUS_DECODE
    num_shared = len(PROMPT) // 16
    assert second.num_cached_tokens == num_shared * 16
    assert first.num_shared_blocks == second.num_shared_blocks >= num_shared
    shared = unpack_int32(first.device_block_ids, "ids")[:num_shared].tolist()
    assert unpack_int32(second.device_block_ids, "ids")[:num_shared].tolist() == shared
    device, host = kv.tiers
    assert (device.tier, host.tier) == (kv_pb2.KV_TIER_DEVICE, kv_pb2.KV_TIER_HOST)
    assert {device.states[block] for block in shared} == {kv_pb2.KV_BLOCK_STATE_SHARED}
    ref_counts = unpack_int32(device.ref_counts, "ref_counts")
    assert {ref_counts[block] for block in shared} == {2}
    assert len(device.states) == device.num_blocks == 256
    assert device.num_shared >= num_shared
    for stream in streams:
        stream.cancel()
    fleet.wait_until_idle()


def test_source_that_dies_during_a_move_loses_nothing(
    long_llama: Path, run_dir: Callable[[], Path], expected
):
    with TwoWorkers(run_dir(), long_llama, worker=("--num-blocks=256", HOST)) as service:
        service.wait_until_both_are_attached()
        stream = Stream(service, long_request("survivor", n=2))
        stream.read_until(50)
        source = service.where_is("survivor")
        target = service.other_than(source)

        def is_moving() -> bool | None:
            statuses = {seq.status for seq in service.kv(source).sequences}
            return statuses == {kv_pb2.SEQUENCE_STATUS_MIGRATING} or None

        service.child(source).signal(signal.SIGSTOP)  # the worker dies before the swap-out's result
        with ThreadPoolExecutor(1) as threads:
            moving = threads.submit(service.migrate, "survivor", target)
            eventually(is_moving, "it is being moved")
            service.child(source).kill()
            error = moving.exception(timeout=30)
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert stream.read_first(NUM_TOKENS) == expected
        wait_until_free(service, target)


def test_worker_without_host_memory_takes_nothing(long_llama, run_dir):
    with TwoWorkers(run_dir(), long_llama, worker=("--num-blocks=128",)) as service:
        service.wait_until_both_are_attached()
        stream = Stream(service, long_request("stays"))
        stream.read_until(3)
        target = service.other_than(service.where_is("stays"))
        with pytest.raises(grpc.RpcError) as refused:
            service.migrate("stays", target)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "--host-kv-memory-gb" in refused.value.details()
        stream.cancel()
        service.wait_until_idle()


def test_swapped_sequences_go_where_there_is_room(fleet, long_llama, run_dir):
    """Two long requests arrive at one worker, and one of them must wait; the other worker is
    idle."""
    prompts = [[5 + i * k % 490 for i in range(100)] for k in (3, 7)]
    requests = [long_request(f"long-{k}", 1, prompts[k], num_tokens=1600) for k in range(2)]
    expected = [read(fleet.stub.Generate(request)).outputs for request in requests]
    worker = ("--num-blocks=110", HOST)  # one has 107 at its end
    scheduler = ("--preemption-mode=swap", "--placement=round-robin")
    with TwoWorkers(run_dir(), long_llama, worker=worker, scheduler=scheduler) as service:
        service.wait_until_both_are_attached()
        first = Stream(service, requests[0])
        first.read_until(1)
        read(service.stub.Generate(generate_request([5, 6], max_tokens=1)))
        second = Stream(service, requests[1])
        second.read_until(1)
        assert service.where_is("long-0") == service.where_is("long-1")
        assert [first.read_to_end(), second.read_to_end()] == expected
        metrics = service.metrics(service.scheduler)
        assert metrics["quire_num_preemptions_total"] > 0
        assert metrics["quire_migrations_total"] > 0
        assert metrics["quire_recomputed_tokens_total"] == 0
        load = service.wait_until_idle()
        assert load.num_free_host_blocks + load.num_cached_host_blocks == load.num_host_blocks


def test_a_worker_that_ends_gives_its_sequences_away_with_their_kv(fleet, expected):
    stream = Stream(fleet, long_request("leaving", n=2))
    stream.read_until(50)
    fleet.migrate("leaving", fleet.targets[0])
    before = fleet.metrics(fleet.scheduler)
    fleet.worker.stop()
    assert stream.read_first(NUM_TOKENS) == expected
    after = fleet.metrics(fleet.scheduler)
    assert after["quire_recomputed_tokens_total"] == before["quire_recomputed_tokens_total"]
    fleet.start_first_again()
    assert after["quire_migrations_total"] == before.get("quire_migrations_total", 0) + 1
