"""Defragmentation, pins and resizing while whole processes generate."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from quire.cli.__main__ import main
from quire.v1 import inference_pb2, scheduler_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests.e2e.generation import generate_request, read, read_aio
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs

NUM_STREAMS = 16
BLOCK_SIZE = 16
NUM_BLOCKS = 200


@pytest.fixture(scope="module")
def service(model_dirs: ModelDirs, run_dir: Callable[[], Path]) -> Iterator[Service]:
    worker = ["--max-num-seqs=8", f"--num-blocks={NUM_BLOCKS}", f"--block-size={BLOCK_SIZE}"]
    with Service(run_dir(), model_dirs.get("qwen3"), worker=worker) as service:
        yield service


async def generate_all(service: Service) -> list[list[int]]:
    """Run streams of many lengths, so that those which end leave holes between the others."""
    draw = random.Random(0)
    requests = [
        generate_request(
            [draw.randrange(5, 500) for _ in range(draw.randrange(20, 80))],
            max_tokens=20 + 10 * (i % 7),
            ignore_eos=True,
        )
        for i in range(NUM_STREAMS)
    ]
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        results = await asyncio.gather(*(read_aio(stub.Generate(r)) for r in requests))
    return [result.outputs[0] for result in results]


def test_tokens_are_the_same_while_blocks_move_under_the_streams(service):
    flags = ["--defragment-interval-s=0.001", "--defragment-threshold=0"]
    service.use_scheduler(*flags)
    outputs = asyncio.run(generate_all(service))
    metrics = service.metrics(service.scheduler)
    assert metrics["quire_kv_moved_blocks_total"] > 0
    assert metrics["quire_kv_defragmentations_total"] > 0
    assert "blocks were defragmented" in service.scheduler.log
    service.wait_until_idle()
    service.use_scheduler()
    assert asyncio.run(generate_all(service)) == outputs
    assert service.metrics(service.scheduler)["quire_kv_moved_blocks_total"] == 0


def resize_over_and_over(service: Service) -> None:
    """Resize the pool again and again, below the blocks in use and above its first size."""
    for size in (40, 300, 70, 120, NUM_BLOCKS):
        argv = ["resize", f"--scheduler=unix:{service.uds['scheduler']}", f"--blocks={size}"]
        assert main(argv) == 0


async def generate_while_resizing(service: Service) -> list[list[list[int]]]:
    resizing = asyncio.create_task(asyncio.to_thread(resize_over_and_over, service))
    rounds = [await generate_all(service)]
    while not resizing.done():
        rounds.append(await generate_all(service))
    await resizing
    return rounds


def test_tokens_are_the_same_while_the_pool_is_resized_under_the_streams(service, capsys):
    service.use_scheduler("--no-enable-prefix-caching")
    expected = asyncio.run(generate_all(service))
    rounds = asyncio.run(generate_while_resizing(service))
    assert all(outputs == expected for outputs in rounds)
    assert service.metrics(service.scheduler)["quire_kv_blocks"] == NUM_BLOCKS
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"{NUM_BLOCKS} blocks (")


def test_blocks_are_moved_together_on_demand(service):
    service.use_scheduler("--max-pinned-share=1")
    pinned = []
    for start in range(5, 245, 40):  # cached, pinned, cached, ...
        request = generate_request([start + i for i in range(32)], max_tokens=1)
        if start % 80 == 45:
            request.cache_pin_s = 1000
            pinned.append(request)
        read(service.stub.Generate(request))
    before = service.metrics(service.scheduler)
    assert before["quire_kv_fragmentation_rate"] > 0
    with grpc.insecure_channel(f"unix:{service.uds['scheduler']}") as channel:
        stub = SchedulerServiceStub(channel)
        (worker,) = stub.Defragment(scheduler_pb2.DefragmentRequest(), timeout=30).workers
    assert worker.rate_before > worker.rate_after == 0
    assert worker.num_moved_blocks > 0
    for request in pinned:
        request.ClearField("cache_pin_s")
        request.token_ids.ids.append(300)
        assert read(service.stub.Generate(request)).usage.cached_tokens == 32


def test_a_pinned_prompt_is_still_there_after_more_than_the_pool_holds(service):
    service.use_scheduler()
    num_pinned = service.load().num_pinned_blocks
    # Cache and pins survive the scheduler's restart; no block was cached with this salt.
    pinned = generate_request(range(5, 45), max_tokens=2, cache_salt="pinned")
    pinned.cache_pin_s = 1000
    first = read(service.stub.Generate(pinned)).usage
    assert (first.cached_tokens, first.pinned_tokens) == (0, 32), "two full blocks of 40 tokens"
    other = generate_request(range(5, 45), max_tokens=2, cache_salt="other")
    read(service.stub.Generate(other))
    for i in range(NUM_BLOCKS // 4):
        read(service.stub.Generate(generate_request([400 - i, *range(60, 124)], max_tokens=1)))
    assert read(service.stub.Generate(pinned)).usage.cached_tokens == 32
    assert read(service.stub.Generate(other)).usage.cached_tokens == 0
    assert service.load().num_pinned_blocks == num_pinned + 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, 86401.0, float("nan")])
def test_a_pin_out_of_range_is_refused(service, seconds):
    request = generate_request([5, 6], max_tokens=1)
    request.cache_pin_s = seconds
    with pytest.raises(grpc.RpcError) as caught:
        read(service.stub.Generate(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("cache_pin_s is ")


def test_without_prefix_cache_nothing_is_pinned(service):
    service.use_scheduler("--no-enable-prefix-caching")
    request = generate_request([5] * 40, max_tokens=1)
    request.cache_pin_s = 5
    answer = service.stub.GenerateOnce(inference_pb2.GenerateOnceRequest(request=request))
    assert (answer.usage.completion_tokens, answer.usage.pinned_tokens) == (1, 0)
