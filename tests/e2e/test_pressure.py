"""When memory gets short, whole processes run fewer sequences, lose none, and recover."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.child import Child, eventually
from tests.e2e.generation import generate_request, read_aio
from tests.e2e.service import Service
from tests.e2e.step_gate import StepGate

GIB = 1024**3
"""The worker's memory limit, below the free memory of any test machine."""
NUM_STREAMS = 8
REQUESTS = [
    generate_request([5 + index] * 20, max_tokens=60, ignore_eos=True)
    for index in range(NUM_STREAMS)
]


class ControlGroup:
    """The files that the kernel would write."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        (directory / "memory.max").write_text(f"{GIB}\n")
        self.leave(0.5)

    def leave(self, share: float) -> None:
        """Set the share of the memory that is free."""
        new = self.directory / "new"
        new.write_text(f"{round((1 - share) * GIB)}\n")
        new.replace(self.directory / "memory.current")


class PressedService(Service):
    """A service whose steps, and whose worker's memory, the test controls."""

    def __init__(self, directory: Path, model: Path) -> None:
        directory.mkdir(parents=True)
        self.group = ControlGroup(directory / "group")
        self.gate = StepGate(directory / "gate.sock", directory / "worker.sock")
        flags = ["--num-blocks=256", "--memory-warning-share=0.2", "--memory-critical-share=0.1"]
        super().__init__(directory, model, worker=flags, worker_uds=self.gate.uds)
        env = {"CONTROL_GROUP": str(self.group.directory)}
        self.worker = Child("tests.e2e.worker_in_group", directory / "worker.log", env)

    def leave(self, share: float, level: int) -> None:
        """Set the free share of the memory, and wait until the scheduler knows the new `level`."""
        self.group.leave(share)

        def is_known() -> bool | None:
            return self.metrics(self.scheduler)["quire_memory_level"] == level or None

        eventually(is_known, f"the scheduler knows of level {level}")

    def wait_for_load(self, num_running: int, num_waiting: int) -> None:
        """Waits for this load; permits steps one by one when all requests have arrived."""

        def is_so() -> bool | None:
            load = self.load()
            seen = (load.num_requests_running, load.num_requests_waiting)
            if seen == (num_running, num_waiting):
                return True
            if sum(seen) == NUM_STREAMS and not self.gate.num_permits:
                self.gate.let_through(1)
            return None

        eventually(is_so, f"{num_running} run and {num_waiting} wait")


@pytest.fixture(scope="module")
def service(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[PressedService]:
    service = PressedService(run_dir(), long_llama)
    with service.gate, service:
        yield service


async def generate_all(
    service: PressedService, while_they_run: Callable[[], None] = lambda: None
) -> list[list[int]]:
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        streams = [asyncio.create_task(read_aio(stub.Generate(each))) for each in REQUESTS]
        try:
            await asyncio.to_thread(while_they_run)
        finally:
            service.gate.open()
        results = await asyncio.gather(*streams)
    return [result.outputs[0] for result in results]


def test_half_of_the_streams_wait_while_memory_is_critical_and_say_the_same(service):
    expected = asyncio.run(generate_all(service))

    def press_and_relieve() -> None:
        service.gate.close()
        service.wait_for_load(NUM_STREAMS, 0)
        service.leave(0.05, level=2)
        service.wait_for_load(NUM_STREAMS // 2, NUM_STREAMS // 2)
        assert service.metrics(service.worker)["quire_worker_device_memory_level"] == 2
        service.leave(0.5, level=0)
        service.wait_for_load(NUM_STREAMS, 0)

    assert asyncio.run(generate_all(service, press_and_relieve)) == expected
    metrics = service.metrics(service.scheduler)
    assert metrics["quire_memory_preemptions_total"] == NUM_STREAMS // 2
    assert "a worker's memory is short" in service.scheduler.log
    assert "a worker has enough memory again" in service.scheduler.log


def test_requests_during_a_memory_shortage_wait_and_get_the_same_tokens(service):
    expected = asyncio.run(generate_all(service))
    num_preemptions = service.metrics(service.scheduler)["quire_num_preemptions_total"]
    service.leave(0.15, level=1)  # while the worker is idle

    def relieve() -> None:
        service.gate.close()
        service.wait_for_load(1, NUM_STREAMS - 1)
        service.leave(0.5, level=0)
        service.wait_for_load(NUM_STREAMS, 0)

    assert asyncio.run(generate_all(service, relieve)) == expected
    assert service.metrics(service.scheduler)["quire_num_preemptions_total"] == num_preemptions
