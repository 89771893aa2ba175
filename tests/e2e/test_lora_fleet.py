"""Requests for LoRA adapters that move between workers get the tokens of merged weights."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from quire.client import Client
from quire.v1 import adapters_pb2, inference_pb2
from quire.v1.adapters_pb2_grpc import AdapterServiceStub
from tests.e2e.child import eventually
from tests.e2e.generation import generate_request
from tests.e2e.references import greedy_tokens
from tests.e2e.two_workers import Stream, TwoWorkers
from tests.lora_fixture import make_adapter, merge

PROMPT = [5 + 3 * i % 490 for i in range(100)]
NUM_TOKENS = 500
"""The number of tokens that are compared."""
MAX_TOKENS = 3900
"""Enough to keep a request running for seconds."""
LATE = "late"
"""An adapter that no worker is started with."""


@dataclass(frozen=True)
class Case:
    """A model, its adapters, and the prompt's output with each."""

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
    worker = ("--num-blocks=1024", "--host-kv-memory-gb=0.05", f"--lora=sql={case.adapters['sql']}")
    with TwoWorkers(run_dir(), case.model, worker=worker) as fleet:
        fleet.wait_until_both_are_attached()
        yield fleet


@pytest.fixture
def late(fleet: TwoWorkers, case: Case) -> Iterator[None]:
    """Loads the adapter at both workers, and restores the previous state after the test."""
    assert fleet.run("lora", "load", f"{LATE}={case.adapters[LATE]}") == 0
    # The scheduler was asked, not the router, which learns of it from the scheduler's stream.
    eventually(lambda: is_offered(fleet) or None, "the router offers the adapter")
    yield
    if not fleet.worker.is_started:
        fleet.start_first_again()
    # The call is refused until the starting worker is attached.
    eventually(lambda: fleet.run("load") == 0 or None, "both workers have their model")
    if any(LATE in names for names in loaded_at(fleet)):
        assert fleet.run("lora", "unload", LATE) == 0
    eventually(lambda: not is_offered(fleet) or None, "the router no longer offers the adapter")


def is_offered(fleet: TwoWorkers) -> bool:
    """Whether the router offers the adapter to clients."""
    with Client(fleet.target) as client:
        return LATE in [model.id for model in client.models()]


@contextlib.contextmanager
def running(fleet: TwoWorkers, adapter: str, request_id: str) -> Iterator[Stream]:
    """A request that has some tokens, and runs during the block."""
    request: inference_pb2.GenerateRequest = generate_request(
        PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True
    )
    request.model, request.request_id = adapter, request_id
    stream = Stream(fleet, request)
    try:
        stream.read_until(20)
        yield stream
    finally:
        stream.cancel()


def compared(stream: Stream) -> list[int]:
    """Reads the first `NUM_TOKENS` tokens of a stream, for the comparison."""
    stream.read_until(NUM_TOKENS)
    return stream.result.token_ids[0][:NUM_TOKENS]


def move(fleet: TwoWorkers, request_id: str) -> str:
    """Moves a request to the other worker, and returns that worker."""
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
    with running(fleet, "", "one-") as plain, running(fleet, "sql", "one-sql") as adapted:
        streams = {"": plain, "sql": adapted}
        for num_tokens in (60, 120, 180):
            for name, stream in streams.items():
                stream.read_until(num_tokens)
                move(fleet, f"one-{name}")
        for name, stream in streams.items():
            assert compared(stream) == case.outputs[name]
    assert num_recomputed(fleet) == before


@pytest.mark.usefixtures("late")
def test_an_adapter_that_leaves_while_a_request_moves_stays_until_that_has_ended(fleet, case):
    with ThreadPoolExecutor(1) as pool:
        with running(fleet, LATE, "last") as stream:
            unloaded = pool.submit(fleet.run, "lora", "unload", LATE)
            eventually(lambda: is_leaving(fleet), "it is being unloaded")
            for num_tokens in (60, 120):
                stream.read_until(num_tokens)
                move(fleet, "last")
            assert compared(stream) == case.outputs[LATE]
            assert not unloaded.done()
        assert unloaded.result(30) == 0
    assert loaded_at(fleet) == [["sql"]] * 2


@pytest.mark.usefixtures("late")
def test_a_worker_that_ends_gives_it_away_and_returns_with_the_adapter(fleet, case):
    """The flags of the restarted worker do not name the adapter."""
    before = num_recomputed(fleet)
    with running(fleet, LATE, "given") as stream:
        if fleet.where_is("given") != fleet.targets[0]:
            move(fleet, "given")
        fleet.worker.stop()
        assert compared(stream) == case.outputs[LATE]
    fleet.start_first_again()
    expect_both_have_it(fleet, case)
    assert num_recomputed(fleet) == before


@pytest.mark.usefixtures("late")
def test_a_worker_that_is_unloaded_gives_it_away_and_takes_it_again(fleet, case):
    before = num_recomputed(fleet)
    with running(fleet, LATE, "given") as stream:
        assert fleet.run("unload", fleet.where_is("given")) == 0
        assert compared(stream) == case.outputs[LATE]
    assert fleet.run("load") == 0
    expect_both_have_it(fleet, case)
    assert num_recomputed(fleet) == before


@pytest.mark.usefixtures("late")
def test_a_worker_that_cannot_have_the_adapter_takes_none_of_its_requests(fleet, case):
    directory = case.adapters[LATE]
    aside = directory.with_name("aside")
    fleet.worker.stop()
    directory.rename(aside)
    try:
        fleet.worker.start(fleet._flags["worker"])
        numbers = itertools.count()
        eventually(
            lambda: goes_on_beside_one_that_does_not_fit(fleet, case, f"stays-{next(numbers)}"),
            "it does not fit",
        )
    finally:
        aside.rename(directory)
    fleet.wait_until_both_are_attached()
    expect_both_have_it(fleet, case)


def expect_both_have_it(fleet: TwoWorkers, case: Case) -> None:
    assert loaded_at(fleet) == [[LATE, "sql"]] * 2
    with running(fleet, LATE, "there") as stream:
        move(fleet, "there")
        assert compared(stream) == case.outputs[LATE]


def goes_on_beside_one_that_does_not_fit(
    fleet: TwoWorkers, case: Case, request_id: str
) -> bool | None:
    """Whether a move to the first worker is refused because it lacks the adapter."""
    with running(fleet, LATE, request_id) as stream:
        with pytest.raises(grpc.RpcError) as refused:
            fleet.migrate(request_id, fleet.targets[0])
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        if not re.search(r"cannot join: .*adapter_config\.json", refused.value.details()):
            return None
        assert compared(stream) == case.outputs[LATE]
        return True


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
