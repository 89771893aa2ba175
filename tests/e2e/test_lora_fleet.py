"""Requests for LoRA adapters that move between workers get the tokens of merged weights."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from quire.v1 import adapters_pb2, inference_pb2
from quire.v1.adapters_pb2_grpc import AdapterServiceStub
from tests.e2e.child import eventually
from tests.e2e.generation import generate_request
from tests.e2e.references import greedy_tokens
from tests.e2e.two_workers import Stream, TwoWorkers
from tests.lora_fixture import make_adapter, merge

PROMPT = [5 + 3 * i % 490 for i in range(100)]
NUM_TOKENS = 500
LATE = "late"
"""An adapter that no worker is started with."""


@dataclass(frozen=True)
class Case:
    """A model, its adapters, and what the prompt is continued with under each."""

    model: Path
    adapters: dict[str, Path]
    outputs: dict[str, list[int]]


@pytest.fixture(scope="module")
def case(long_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("adapters")
    adapters = {
        name: make_adapter(root / name, long_llama, seed) for seed, name in enumerate(("sql", LATE))
    }
    merged = {"": long_llama}
    merged |= {
        name: merge(root / f"merged-{name}", long_llama, adapters[name]) for name in adapters
    }
    outputs = {name: greedy_tokens(merged[name], [PROMPT], NUM_TOKENS)[0] for name in merged}
    return Case(long_llama, adapters, outputs)


@pytest.fixture(scope="module")
def fleet(case: Case, run_dir: Callable[[], Path]) -> Iterator[TwoWorkers]:
    worker = ("--num-blocks=256", "--host-kv-memory-gb=0.05", f"--lora=sql={case.adapters['sql']}")
    with TwoWorkers(run_dir(), case.model, worker=worker) as fleet:
        fleet.wait_until_both_are_attached()
        yield fleet


def start(fleet: TwoWorkers, adapter: str, request_id: str) -> Stream:
    """A request of which some tokens have come."""
    request: inference_pb2.GenerateRequest = generate_request(
        PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    request.model, request.request_id = adapter, request_id
    stream = Stream(fleet, request)
    stream.read_until(20)
    return stream


def move(fleet: TwoWorkers, request_id: str) -> str:
    """Has a request move to the other worker, which is returned."""
    source = fleet.where_is(request_id)
    assert source is not None
    target = fleet.other_than(source)
    moved = fleet.migrate(request_id, target)
    assert (moved.from_worker, moved.num_sequences) == (source, 1)
    assert moved.num_blocks >= (len(PROMPT) + 20) // 16
    assert fleet.where_is(request_id) == target
    return target


def num_recomputed(fleet: TwoWorkers) -> float:
    return fleet.metrics(fleet.scheduler).get("quire_recomputed_tokens_total", 0)


def test_requests_of_one_prompt_pass_each_other_and_none_takes_anothers_kv(fleet, case):
    before = num_recomputed(fleet)
    streams = {name: start(fleet, name, f"one-{name}") for name in ("", "sql")}
    for num_tokens in (60, 120, 180):
        for name, stream in streams.items():
            stream.read_until(num_tokens)
            move(fleet, f"one-{name}")
    assert [stream.read_to_end() for stream in streams.values()] == [
        [case.outputs[name]] for name in streams
    ]
    assert num_recomputed(fleet) == before


def test_an_adapter_that_leaves_while_a_request_moves_stays_until_that_has_ended(fleet, case):
    assert fleet.run("lora", "load", f"{LATE}={case.adapters[LATE]}") == 0
    stream = start(fleet, LATE, "last")
    with ThreadPoolExecutor(1) as pool:
        unloaded = pool.submit(fleet.run, "lora", "unload", LATE)
        eventually(lambda: is_leaving(fleet), "it is being unloaded")
        for num_tokens in (60, 120):
            stream.read_until(num_tokens)
            move(fleet, "last")
        assert not unloaded.done()
        assert stream.read_to_end() == [case.outputs[LATE]]
        assert unloaded.result(30) == 0
    assert loaded_at(fleet) == [["sql"]] * 2


def test_a_worker_that_ends_gives_it_away_and_returns_with_the_adapter(fleet, case):
    """The flags of the one that is started again do not name it."""
    assert fleet.run("lora", "load", f"{LATE}={case.adapters[LATE]}") == 0
    before = num_recomputed(fleet)
    stream = start(fleet, LATE, "given")
    if fleet.where_is("given") != fleet.targets[0]:
        move(fleet, "given")
    fleet.worker.stop()
    assert stream.read_to_end() == [case.outputs[LATE]]
    fleet.start_first_again()
    assert loaded_at(fleet) == [[LATE, "sql"]] * 2
    stream = start(fleet, LATE, "there")
    move(fleet, "there")
    assert stream.read_to_end() == [case.outputs[LATE]]
    assert num_recomputed(fleet) == before
    assert fleet.run("lora", "unload", LATE) == 0


def test_a_worker_that_is_unloaded_gives_it_away_and_takes_it_again(fleet, case):
    assert fleet.run("lora", "load", f"{LATE}={case.adapters[LATE]}") == 0
    before = num_recomputed(fleet)
    stream = start(fleet, LATE, "given")
    source = fleet.where_is("given")
    assert fleet.run("unload", source) == 0
    assert stream.read_to_end() == [case.outputs[LATE]]
    assert fleet.run("load") == 0
    assert loaded_at(fleet) == [[LATE, "sql"]] * 2
    stream = start(fleet, LATE, "there")
    move(fleet, "there")
    assert stream.read_to_end() == [case.outputs[LATE]]
    assert num_recomputed(fleet) == before
    assert fleet.run("lora", "unload", LATE) == 0


def test_a_worker_that_cannot_have_the_adapter_takes_none_of_its_requests(fleet, case):
    directory = case.adapters[LATE]
    aside = directory.with_name("aside")
    assert fleet.run("lora", "load", f"{LATE}={directory}") == 0
    fleet.worker.stop()
    directory.rename(aside)
    fleet.worker.start(fleet._flags["worker"])
    stream = eventually(lambda: started_beside_one_that_does_not_fit(fleet), "it does not fit")
    assert stream.read_to_end() == [case.outputs[LATE]]
    aside.rename(directory)
    fleet.wait_until_both_are_attached()
    stream = start(fleet, LATE, "moves")
    move(fleet, "moves")
    assert stream.read_to_end() == [case.outputs[LATE]]
    assert fleet.run("lora", "unload", LATE) == 0


def started_beside_one_that_does_not_fit(fleet: TwoWorkers) -> Stream | None:
    """A request that may not move to the first worker for want of the adapter, if that is why."""
    stream = start(fleet, LATE, "stays")
    with pytest.raises(grpc.RpcError) as refused:
        fleet.migrate("stays", fleet.targets[0])
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    if re.search(r"does not fit: .*adapter_config\.json", refused.value.details()):
        return stream
    stream.read_to_end()
    return None


def is_leaving(fleet: TwoWorkers) -> bool | None:
    listed = listed_by(f"unix:{fleet.uds['scheduler']}")
    return any(each.is_leaving for each in listed) or None


def loaded_at(fleet: TwoWorkers) -> list[list[str]]:
    """The names of the adapters that each worker has."""
    return [sorted(each.adapter.name for each in listed_by(it)) for it in fleet.targets]


def listed_by(target: str) -> Sequence[adapters_pb2.LoadedAdapter]:
    with grpc.insecure_channel(target) as channel:
        stub = AdapterServiceStub(channel)
        return stub.ListAdapters(adapters_pb2.ListAdaptersRequest(), timeout=10).adapters
