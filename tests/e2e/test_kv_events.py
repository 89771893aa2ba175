"""An index built from a router's KV events equals the truth, after kills under load."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Self

import grpc
import numpy as np
import pytest

from contract.hashing import extend_chain, root_hash
from quire.client import Client
from quire.v1 import kv_pb2, kv_pb2_grpc
from tests.e2e.child import eventually
from tests.e2e.generation import generate_request, read
from tests.e2e.service import Service
from tests.kv_index import ReaderIndex

NUM_STREAMS = 4
WORKER = ["--num-blocks=48", "--host-kv-memory-gb=0.01"]


@pytest.fixture(scope="module")
def observed(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    with Service(run_dir(), long_llama, worker=WORKER, scheduler=["--kv-events"]) as service:
        yield service


class Watch:
    """A reader of the router's stream, in a thread of its own."""

    def __init__(self, service: Service) -> None:
        stub = kv_pb2_grpc.KvEventServiceStub(service.channel)
        self._call = stub.WatchKv(kv_pb2.WatchKvRequest())
        self._lock = threading.Lock()
        self._index = ReaderIndex()
        self._thread = threading.Thread(target=self._read)
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call.cancel()
        self._thread.join()

    def blocks(self, worker: str) -> dict[int, set[bytes]]:
        """The hashes by tier; nothing while a snapshot is not complete."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if worker not in self._index.exact:
                return {}
            return {tier: set(hashes) for tier, hashes in self._index.of(worker).items()}

    def _read(self) -> None:
        try:
            for message in self._call:
                with self._lock:
                    self._index.apply(message)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                self._failure = error
        except AssertionError as error:
            self._failure = error


def cached(service: Service) -> Counter[int]:
    """By tier of the idle worker: how many blocks its prefix cache has."""
    with Client(service.target) as client:
        (worker,) = client.describe_kv(timeout_s=10)
    assert not any(tier.num_held + tier.num_shared for tier in worker.tiers)
    return +Counter({tier.tier: tier.num_cached + tier.num_pinned for tier in worker.tiers})


def wait_until_equal(service: Service, watch: Watch) -> dict[int, set[bytes]]:
    """Wait until the index has as many blocks as the idle service; return them."""
    worker = f"unix:{service.uds['worker']}"

    def look() -> dict[int, set[bytes]] | None:
        blocks = watch.blocks(worker)
        return blocks if counts(blocks) == cached(service) else None

    try:
        return eventually(look, "the index equals DescribeKv", 30)
    except AssertionError as error:
        found = counts(watch.blocks(worker))
        raise AssertionError(f"{error}: it has {found}, not {cached(service)}") from None


def counts(blocks: dict[int, set[bytes]]) -> dict[int, int]:
    return {tier: len(hashes) for tier, hashes in blocks.items()}


def test_an_index_from_a_routers_events_equals_the_truth_after_kills(observed):
    draw = Random(1)
    prefixes = [[draw.randrange(5, 495) for _ in range(draw.randrange(100))] for _ in range(5)]
    prompts = [
        draw.choice(prefixes) + [draw.randrange(5, 495) for _ in range(draw.randrange(1, 60))]
        for _ in range(40)
    ]
    is_over, num_done = threading.Event(), Counter()

    def stream(number: int) -> None:
        chosen = Random(number)
        while not is_over.is_set():
            request = generate_request(chosen.choice(prompts), max_tokens=20, ignore_eos=True)
            try:
                result = read(observed.stub.Generate(request))
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                continue  # new requests are refused while there is no scheduler
            assert len(result.outputs[0]) == 20
            num_done[number] += 1

    def wait_for(count: int) -> None:
        target = num_done.total() + count
        eventually(lambda: num_done.total() >= target or None, f"{count} more streams")

    with Watch(observed) as watch, ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, number) for number in range(NUM_STREAMS)]
        try:
            for name in ("scheduler", "worker"):
                wait_for(20)
                getattr(observed, name).kill()
                getattr(observed, f"start_{name}")()
                observed.wait_until_ready()
            wait_for(20)
        finally:
            is_over.set()
        for each in streams:
            each.result()
        observed.wait_until_idle()
        blocks = wait_until_equal(observed, watch)
        assert blocks.keys() == {kv_pb2.KV_TIER_DEVICE, kv_pb2.KV_TIER_HOST}
        size = observed.load().block_size
        for prompt in draw.sample(prompts, 8):
            predicted = num_found(prompt, set().union(*blocks.values()), size)
            request = generate_request(prompt, max_tokens=1)
            assert read(observed.stub.Generate(request)).usage.cached_tokens == predicted
            observed.wait_until_idle()
            blocks = wait_until_equal(observed, watch)


def num_found(prompt: list[int], hashes: set[bytes], block_size: int) -> int:
    """How many tokens a request finds: whole blocks, but the last token is always computed."""
    chain: list[bytes] = []
    extend_chain(chain, root_hash(""), np.array(prompt[:-1], np.int32), block_size)
    found = next((i for i, each in enumerate(chain) if each not in hashes), len(chain))
    return found * block_size
