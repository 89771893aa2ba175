"""A worker of two ranks acts as one worker: same tokens, and both ranks die together."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.v1 import common_pb2, inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.child import eventually
from tests.e2e.generation import Result, generate_request, read, read_aio
from tests.e2e.service import Service

OPTIONS = {"max_tokens": 64, "ignore_eos": True}
DIGITS = common_pb2.StructuredOutput(regex="[0-9]{6}")
REQUESTS = [
    *(generate_request([*range(30, 90), i], **OPTIONS) for i in range(12)),
    generate_request(list(range(60, 100)), n=3, temperature=0.9, seed=11, **OPTIONS),
    generate_request([9] * 17, temperature=1.0, seed=12, frequency_penalty=0.5, **OPTIONS),
    generate_request([7] * 20, max_tokens=20, structured=DIGITS),
    generate_request([8] * 20, logprobs=1, **OPTIONS),
    generate_request([5] * 20, beam=common_pb2.BeamSearch(width=3), **OPTIONS),
]
"""The first ones share a prefix."""


@pytest.fixture(scope="module")
def of_two(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service of two ranks with room for a third of the requests at once."""
    worker = ["--num-blocks=40", "--host-kv-memory-gb=0.05", "--kv-checksum"]
    worker += ["--tensor-parallel-size=2"]
    scheduler = ["--preemption-mode=swap"]
    with Service(run_dir(), long_llama, worker=worker, scheduler=scheduler) as service:
        yield service


async def generate(service: Service, requests: list[inference_pb2.GenerateRequest]) -> list[Result]:
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        return await asyncio.gather(*(read_aio(stub.Generate(request)) for request in requests))


def other_rank(service: Service) -> int:
    """The process of rank 1: rank 0's only child."""
    path = Path(f"/proc/{service.worker.pid}/task")
    children = [pid for task in path.iterdir() for pid in (task / "children").read_text().split()]
    assert len(children) == 1
    return int(children[0])


def listening(pid: int) -> set[str]:
    """The TCP addresses on which a process listens, in the kernel's hexadecimal form."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the socket has just been closed
            inodes.add(str(descriptor.readlink()))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                addresses.add(local.split(":")[0])
    return addresses


def test_processes_and_ranks_listen_on_the_loopback_only(of_two):
    processes = [of_two.router, of_two.scheduler, of_two.worker]
    pids = [*(process.pid for process in processes), other_rank(of_two)]
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    addresses = [listening(pid) for pid in pids]
    assert all(addresses), "each listens somewhere"
    assert set.union(*addresses) <= loopback


def test_two_ranks_give_the_tokens_of_one(service, of_two):
    expected = asyncio.run(generate(service, REQUESTS))
    results = asyncio.run(generate(of_two, REQUESTS))
    assert [result.outputs for result in results] == [result.outputs for result in expected]
    metrics = of_two.metrics(of_two.scheduler)
    assert metrics["quire_num_preemptions_total"] > 0
    assert metrics["quire_kv_swapped_in_blocks_total"] > 0
    assert metrics["quire_prefix_cache_hits_total"] > 0
    of_two.wait_until_idle()


def test_a_rank_that_dies_is_a_worker_that_is_lost(service, of_two):
    request = generate_request([5] * 30, max_tokens=400, ignore_eos=True)
    expected = read(service.stub.Generate(request)).outputs
    stream = of_two.stub.Generate(request, timeout=120)
    started = next(stream)
    rank_1 = other_rank(of_two)
    os.kill(rank_1, signal.SIGKILL)
    code = eventually(of_two.worker.poll, "rank 0 ends, too")
    assert code == 1
    assert "rank 1 is lost" in of_two.worker.log
    of_two.worker.kill()
    of_two.start_worker()
    result = Result()
    result.add(started)
    for response in stream:
        result.add(response)
    assert result.outputs == expected
