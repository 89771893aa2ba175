"""A scheduler is killed and restarted at once: KV that the worker holds is not recomputed.

The device has room for half of the sequences, so some are on the host when it is killed.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from quire.v1 import common_pb2, inference_pb2
from scheduler_svc.__main__ import EXIT_STALE_EPOCH
from tests.e2e.child import START_S, Child, eventually
from tests.e2e.generation import Result, generate_request, read
from tests.e2e.service import Service
from tests.e2e.step_gate import StepGate

SHIPPED_MODEL = Path(__file__).parents[2] / "models" / "quire-tiny-python"
OPTIONS = {"max_tokens": 120, "ignore_eos": True}
FORM = common_pb2.StructuredOutput(regex="([a-z]{1,8} ){30,60}")
REQUESTS = (
    generate_request(list(range(30, 130)), **OPTIONS),
    generate_request(list(range(30, 145)), n=3, **OPTIONS),
    generate_request([8] * 40, n=2, temperature=0.9, top_p=0.95, seed=11, **OPTIONS),
    generate_request([9] * 17, temperature=1.0, seed=12, frequency_penalty=0.5, **OPTIONS),
    generate_request("def form(", temperature=1.0, seed=7, structured=FORM, max_tokens=120),
)
SCHEDULER = ["--preemption-mode=swap"]
_TIMEOUT_S = 240.0
_BENCH = Path(__file__).parents[2] / "bench"
_LINK = """
import asyncio, pathlib, sys
from faults.link import Link

async def main():
    await Link(*map(pathlib.Path, sys.argv[1:])).open()
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def gated(run_dir: Callable[[], Path]) -> Iterator[tuple[Service, StepGate]]:
    directory = run_dir()
    worker = ["--dtype=float32", "--host-kv-memory-gb=0.2", "--num-blocks=50"]
    worker += ["--max-num-batched-tokens=512"]
    uds = directory / "gate.sock"
    service = Service(
        directory,
        SHIPPED_MODEL,
        worker=worker,
        scheduler=SCHEDULER,
        router=[f"--scheduler=unix:{directory}/standby.sock"],
        worker_uds=uds,
    )
    with StepGate(uds, service.uds["worker"]) as gate, service:
        yield service, gate


@pytest.fixture(scope="module")
def cramped(gated: tuple[Service, StepGate]) -> Service:
    return gated[0]


def _read_all(
    gated: tuple[Service, StepGate], disturb: Callable[[], None] = lambda: None
) -> list[Result]:
    """Read all streams in threads; call `disturb` when all are live and one has tokens."""
    service, gate = gated
    has_begun = threading.Event()

    def read_one(request: inference_pb2.GenerateRequest) -> Result:
        result = Result()
        for response in service.stub.Generate(request, timeout=_TIMEOUT_S):
            result.add(response)
            has_begun.set()
        return result

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        results: list[Future[Result]] = [pool.submit(read_one, request) for request in REQUESTS]
        gate.close()
        eventually(  # a request that came later could be refused
            lambda: (
                service.metrics(service.router)["quire_num_requests_live"] == len(REQUESTS) or None
            ),
            "all requests are live",
        )
        gate.open()
        assert has_begun.wait(_TIMEOUT_S)
        disturb()
        return [result.result(timeout=_TIMEOUT_S) for result in results]


@pytest.fixture(scope="module")
def unfailed(gated: tuple[Service, StepGate]) -> list[Result]:
    """The requests' outputs without a failure."""
    return _read_all(gated)


def _wait_until_all_is_heard(service: Service, gate: StepGate) -> None:
    """Wait until the router has received every token that the scheduler has; the gate is closed.

    Unread messages are lost when the scheduler is killed, because gRPC drops them.
    """
    eventually(
        lambda: (
            service.metrics(service.scheduler)["quire_step_rpc_seconds_count"] == gate.num_passed
            or None
        ),
        "the scheduler has taken all results",
    )
    # the answer may arrive before the events of its step, but not before earlier events
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as caught:
            next(service.stub.Resume(inference_pb2.ResumeRequest(request_id="nobody's")))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_nothing_is_computed_again_after_the_death_of_the_scheduler(
    gated: tuple[Service, StepGate], unfailed: list[Result]
):
    """Two steps are in flight, and the scheduler does not receive their results."""
    cramped, gate = gated

    def are_swapped() -> bool | None:
        """Permits a few steps; looks when none is in flight."""
        if gate.num_permits:
            return None
        if cramped.load().num_requests_swapped:
            return True
        gate.let_through(4)
        return None

    def kill_when_some_are_swapped() -> None:
        gate.close()
        eventually(are_swapped, "some are swapped out")
        _wait_until_all_is_heard(cramped, gate)
        cramped.scheduler.kill()
        gate.open()
        cramped.start_scheduler()

    for i, result in enumerate(_read_all(gated, kill_when_some_are_swapped)):
        assert result.outputs == unfailed[i].outputs, f"request {i}"
        assert result.text == unfailed[i].text, f"request {i}"
    cramped.wait_until_ready()
    cramped.wait_until_idle()
    metrics = cramped.metrics(cramped.scheduler)
    assert metrics["quire_recomputed_tokens_total"] == 0
    assert metrics["quire_adopted_tokens_total"] > 0


def test_a_scheduler_that_stands_by_takes_over(
    gated: tuple[Service, StepGate], unfailed: list[Result], tmp_path: Path
):
    """It listens at the same address, so that routers find it; the restarted one stands by."""
    cramped, _ = gated
    first, second = cramped.scheduler, Child("scheduler_svc", tmp_path / "standby.log", {})
    second.start(cramped.scheduler_flags("--standby"))
    try:
        eventually(lambda: "standing by" in second.log or None, "it stands by", START_S)
        results = _read_all(gated, first.kill)
        assert [result.outputs for result in results] == [each.outputs for each in unfailed]
        cramped.scheduler = second
        assert cramped.metrics(second)["quire_adopted_tokens_total"] > 0
        first.start(cramped.scheduler_flags("--standby"))
        eventually(lambda: "standing by" in first.log or None, "it stands by", START_S)
        cramped.wait_until_idle()
    finally:
        first.kill()


def test_a_scheduler_that_is_stopped_is_replaced_and_writes_nothing_when_it_wakes(
    gated: tuple[Service, StepGate], unfailed: list[Result], tmp_path: Path
):
    cramped, _ = gated
    stopped, standby = cramped.scheduler, Child("scheduler_svc", tmp_path / "standby.log", {})
    flags = cramped.scheduler_flags("--standby", "--standby-silence-s=0.5")
    # On its own socket, because the stopped one keeps the other socket.
    standby.start([flag.replace("scheduler.sock", "standby.sock") for flag in flags])
    try:
        eventually(lambda: "standing by" in standby.log or None, "it stands by", START_S)

        def stop_until_it_is_replaced() -> None:
            stopped.signal(signal.SIGSTOP)
            eventually(lambda: "router connected" in standby.log or None, "it is replaced")
            stopped.signal(signal.SIGCONT)

        results = _read_all(gated, stop_until_it_is_replaced)
        assert [result.outputs for result in results] == [each.outputs for each in unfailed]
        assert [result.text for result in results] == [each.text for each in unfailed]
        assert cramped.metrics(standby)["quire_adopted_tokens_total"] > 0
        eventually(lambda: stopped.poll() is not None or None, "it finds itself fenced")
        assert stopped.poll() == EXIT_STALE_EPOCH
    finally:
        standby.kill()
        stopped.kill()
    cramped.start_scheduler()
    cramped.wait_until_ready()
    cramped.wait_until_idle()


def _stand_by(service: Service, log: Path, uds: str) -> Callable[[], Child]:
    """Start a standby; the result is a function that returns it, restarted if it was fenced."""
    child = Child("scheduler_svc", log, {})
    flags = [flag.replace("scheduler.sock", uds) for flag in service.scheduler_flags("--standby")]
    child.start(flags)
    eventually(lambda: "standing by" in child.log or None, "it stands by", START_S)

    def supervised() -> Child:
        if child.is_started and child.poll() == EXIT_STALE_EPOCH:
            child.kill()
            child.start(flags)
        return child

    return supervised


def test_of_two_that_stand_by_one_takes_over_and_the_other_takes_over_from_it(
    gated: tuple[Service, StepGate], unfailed: list[Result], tmp_path: Path
):
    """Both notice at the same time that the scheduler is gone."""
    cramped, gate = gated
    uds = ("scheduler.sock", "standby.sock")
    standbys = [_stand_by(cramped, tmp_path / f"{each}.log", each) for each in uds]

    def find_serving() -> Child | None:
        """Return the serving one if the other stands by, which may have been fenced before."""
        logs = {child: child.log for child in (standby() for standby in standbys)}
        serving = [child for child, log in logs.items() if "router connected" in log]
        waiting = [log for log in logs.values() if "standing by" in log and "taking" not in log]
        return serving[0] if len(serving) == len(waiting) == 1 else None

    def kill_twice() -> None:
        gate.close()  # no stream ends before both are dead
        cramped.scheduler.kill()
        first = eventually(find_serving, "one serves and the other waits")
        first.kill()
        (second,) = (standby for standby in standbys if standby() is not first)
        eventually(lambda: "router connected" in second().log or None, "the other serves")
        gate.open()

    try:
        results = _read_all(gated, kill_twice)
        assert [result.outputs for result in results] == [each.outputs for each in unfailed]
        assert [result.text for result in results] == [each.text for each in unfailed]
    finally:
        gate.open()
        for standby in standbys:
            standby().kill()
    cramped.start_scheduler()
    cramped.wait_until_ready()
    cramped.wait_until_idle()


def test_a_scheduler_that_no_router_reaches_is_replaced(
    gated: tuple[Service, StepGate], unfailed: list[Result], tmp_path: Path
):
    """Its process is stopped, so connections stay open and silent."""
    cramped, _ = gated
    cramped.scheduler.stop()
    cramped.wait_until_not_ready()
    own = cramped.uds["scheduler"].with_name("leader.sock")
    flags = cramped.scheduler_flags("--standby")
    leader, standby = (Child("scheduler_svc", tmp_path / f"{i}.log", {}) for i in range(2))
    leader.start([flag.replace("scheduler.sock", own.name) for flag in flags])
    link = subprocess.Popen(
        [sys.executable, "-c", _LINK, cramped.uds["scheduler"], own],
        env={**os.environ, "PYTHONPATH": str(_BENCH)},
    )
    try:
        cramped.wait_until_ready()
        standby.start([flag.replace("scheduler.sock", "standby.sock") for flag in flags])
        eventually(lambda: "standing by" in standby.log or None, "it stands by", START_S)

        def silence() -> None:
            link.send_signal(signal.SIGSTOP)
            eventually(lambda: "router connected" in standby.log or None, "it is replaced")

        results = _read_all(gated, silence)
        assert [result.outputs for result in results] == [each.outputs for each in unfailed]
        assert "all routers are silent" in leader.log
        eventually(lambda: leader.poll() is not None or None, "it finds itself fenced")
        assert leader.poll() == EXIT_STALE_EPOCH
    finally:
        link.kill()
        link.wait()
        leader.kill()
        standby.kill()
    cramped.start_scheduler()
    cramped.wait_until_ready()
    cramped.wait_until_idle()


def test_prefix_cache_and_pins_survive_the_death_of_the_scheduler(cramped: Service):
    prompt = list(range(200, 300))
    request = generate_request(prompt, max_tokens=2)
    request.cache_pin_s = 1000
    read(cramped.stub.Generate(request))
    cramped.wait_until_idle()
    cramped.scheduler.kill()
    cramped.wait_until_not_ready()
    cramped.start_scheduler()
    cramped.wait_until_ready()
    usage = read(cramped.stub.Generate(generate_request([*prompt, 7], max_tokens=2))).usage
    assert usage is not None
    assert usage.cached_tokens == 96
    assert cramped.metrics(cramped.scheduler)["quire_kv_pinned_blocks"] == 96 // 16


def test_a_beam_search_goes_on_where_it_was(gated: tuple[Service, StepGate]):
    cramped, gate = gated

    def num_steps() -> float:
        return cramped.metrics(cramped.scheduler)["quire_steps_total"]

    beam = common_pb2.BeamSearch(width=4)
    request = generate_request(list(range(30, 60)), n=2, beam=beam, max_tokens=100, ignore_eos=True)
    unfailed = read(cramped.stub.Generate(request))
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(lambda: read(cramped.stub.Generate(request, timeout=200)))
        gate.close()
        gate.let_through(40)
        eventually(lambda: not gate.num_permits or None, "it is on its way")
        cramped.scheduler.kill()
        gate.open()
        cramped.start_scheduler()
        assert failed.result(timeout=200).outputs == unfailed.outputs
    cramped.wait_until_ready()
    assert num_steps() < 90, "it did not start over"
