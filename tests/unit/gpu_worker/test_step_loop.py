import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from contract.errors import InvalidArgumentError, UnavailableError
from contract.state import Holdings
from contract.step import Plan, Result
from gpu_worker.step_loop import StepLoop

pytestmark = pytest.mark.timeout(120)

IDLE = 77
"""The executor below treats a step with this number as one that only waits for the disk."""


class FakeLaunched:
    def __init__(self, step_id, *, is_idle=False):
        self.step_id = step_id
        self.is_idle = is_idle
        self.finished = threading.Event()
        self.error = None

    def is_done(self):
        if self.error is not None:
            raise self.error
        return self.finished.is_set()

    def fail(self, error):
        self.error = error
        self.finished.set()


class FakeExecutor:
    """A device that finishes a step on demand, and records all calls."""

    def __init__(self, max_in_flight=2):
        self.max_in_flight = max_in_flight
        self.rows = SimpleNamespace(num_used=0)
        self.log = []
        self.head_start_s = 0.0
        self.launched = {}
        self.bind_error = self.reset_error = None
        self._changed = threading.Condition()

    def bind_thread(self):
        if self.bind_error is not None:
            raise self.bind_error

    def launch(self, step):
        if step.num_decodes == 13:
            raise InvalidArgumentError("num_decodes", "is 13")
        launched = FakeLaunched(step.step_id, is_idle=step.num_decodes == IDLE)
        self._write(("launch", step.step_id))
        self.launched[step.step_id] = launched
        return launched

    def collect(self, launched):
        if not launched.is_idle:
            launched.finished.wait()
        if launched.error is not None:
            raise launched.error
        self._write(("collect", launched.step_id))
        return Result(
            launched.step_id, num_computed_tokens=1, execute_s=0.5, head_start_s=self.head_start_s
        )

    def reset(self):
        if self.reset_error is not None:
            raise self.reset_error
        self._write("reset")
        return Holdings()

    def distrust(self):
        self._write("distrust")

    def close(self):
        self._write("close")

    async def wait_for(self, entry):
        """Wait until `entry` is in the log."""

        def wait():
            with self._changed:
                return self._changed.wait_for(lambda: entry in self.log, timeout=10)

        assert await asyncio.to_thread(wait), self.log

    def _write(self, entry):
        with self._changed:
            self.log.append(entry)
            self._changed.notify_all()


@pytest.fixture
def executor():
    return FakeExecutor()


@pytest.fixture
async def loop(executor):
    loop = StepLoop(executor, asyncio.get_running_loop())
    await loop.attach(0)
    yield loop
    for launched in executor.launched.values():
        launched.finished.set()
    await loop.stop()


async def test_a_gpu_gets_the_next_step_before_the_one_before_is_done(executor, loop):
    first = loop.submit(0, Plan(1, 0))
    await executor.wait_for(("launch", 1))
    second = loop.submit(0, Plan(2, 0))
    await executor.wait_for(("launch", 2))
    third = loop.submit(0, Plan(3, 0))
    assert not first.done()
    executor.launched[1].finished.set()
    assert (await first).step_id == 1
    await executor.wait_for(("launch", 3))
    assert not second.done()
    executor.launched[2].finished.set()
    executor.launched[3].finished.set()
    assert [(await second).step_id, (await third).step_id] == [2, 3]
    assert executor.log.index(("collect", 1)) < executor.log.index(("launch", 3))


async def test_a_result_does_not_wait_for_the_next_step(executor, loop):
    only = loop.submit(0, Plan(1, 0))
    await executor.wait_for(("launch", 1))
    executor.launched[1].finished.set()
    assert (await only).step_id == 1


async def test_a_result_that_gets_a_head_start_is_there_before_the_next_step_begins(
    executor, loop, monkeypatch
):
    naps, is_over = [], threading.Event()

    def nap(seconds):
        naps.append(seconds)
        is_over.wait()

    monkeypatch.setattr("gpu_worker.step_loop.time.sleep", nap)
    executor.max_in_flight, executor.head_start_s = 1, 0.5
    first, second = loop.submit(0, Plan(1, 0)), loop.submit(0, Plan(2, 0))
    await executor.wait_for(("launch", 1))
    executor.launched[1].finished.set()
    await first
    assert ("launch", 2) not in executor.log
    is_over.set()
    await executor.wait_for(("launch", 2))
    executor.launched[2].finished.set()
    assert (await second).step_id == 2
    assert 0.5 in naps


async def test_attaching_waits_for_the_device_and_drops_the_steps_of_the_one_before(executor, loop):
    first = loop.submit(0, Plan(1, 0))
    await executor.wait_for(("launch", 1))
    attached = asyncio.ensure_future(loop.attach(1))
    await asyncio.sleep(0)  # starts it before the step below
    late = loop.submit(0, Plan(2, 0))
    executor.launched[1].finished.set()
    await attached
    assert (await first).step_id == 1
    with pytest.raises(UnavailableError):
        await late
    assert executor.log == ["reset", ("launch", 1), ("collect", 1), "reset"]


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_an_idle_step_is_answered_when_the_disk_has_done_something(
    executor, loop, max_in_flight
):
    executor.max_in_flight = max_in_flight
    idle, behind = loop.submit(0, Plan(1, IDLE)), loop.submit(0, Plan(2, IDLE))
    await executor.wait_for(("launch", 2))
    assert not idle.done()
    executor.launched[1].finished.set()
    await idle
    assert not behind.done()
    executor.launched[2].finished.set()
    await behind


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_an_idle_step_is_answered_when_one_behind_it_computes(executor, loop, max_in_flight):
    executor.max_in_flight = max_in_flight
    idle = loop.submit(0, Plan(1, IDLE))
    await executor.wait_for(("launch", 1))
    computing = loop.submit(0, Plan(2, 0))
    await idle
    executor.launched[2].finished.set()
    await computing


async def test_attaching_does_not_wait_for_an_idle_step(executor, loop):
    idle = loop.submit(0, Plan(1, IDLE))
    await executor.wait_for(("launch", 1))
    await loop.attach(1)
    assert idle.done()


async def test_stopping_does_not_wait_for_an_idle_step(executor, loop):
    loop.submit(0, Plan(1, IDLE))
    await executor.wait_for(("launch", 1))
    assert await loop.stop()
    assert executor.log[-1] == "close"


async def test_a_step_that_fails_ends_its_attachment(executor, loop):
    bad = loop.submit(0, Plan(1, 13))
    behind = loop.submit(0, Plan(2, 0))
    with pytest.raises(InvalidArgumentError):
        await bad
    with pytest.raises(UnavailableError, match="attach again"):
        await behind
    await loop.attach(1)
    good = loop.submit(1, Plan(3, 0))
    await executor.wait_for(("launch", 3))
    executor.launched[3].finished.set()
    assert (await good).step_id == 3
    assert loop.problem() is None


async def test_a_loop_that_has_ended_is_a_problem():
    loop = StepLoop(FakeExecutor(), asyncio.get_running_loop())
    assert loop.problem() is None
    await loop.stop()
    assert loop.problem() == "the step loop has ended"


async def test_a_step_that_takes_too_long_is_a_problem(executor, loop, monkeypatch):
    monkeypatch.setattr("gpu_worker.step_loop._STUCK_S", 0.0)
    step = loop.submit(0, Plan(1, 0))
    await executor.wait_for(("launch", 1))
    assert "a step has taken" in loop.problem()
    executor.launched[1].finished.set()
    await step


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("device-side assert"),
        RuntimeError("Triton Error [CUDA]: device-side assert"),
    ],
)
async def test_a_device_that_fails_between_two_looks_at_it_fails_the_step(executor, loop, error):
    step = loop.submit(0, Plan(1, 0))
    await executor.wait_for(("launch", 1))
    executor.launched[1].fail(error)
    with pytest.raises(type(error)):
        await step
    await loop.wait_failed()
    assert loop.problem() == loop.failure == f"the device failed: {error}"


async def test_a_device_failure_at_attach_is_reported(executor, loop):
    executor.reset_error = torch.AcceleratorError("an illegal memory access")
    with pytest.raises(torch.AcceleratorError):
        await loop.attach(1)
    await loop.wait_failed()
    with pytest.raises(UnavailableError):
        await loop.submit(1, Plan(1, 0))


async def test_a_step_that_fails_by_itself_is_no_failure_of_the_loop(executor, loop):
    step = loop.submit(0, Plan(1, 0))
    await executor.wait_for(("launch", 1))
    executor.launched[1].fail(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        await step
    assert loop.failure is None


async def test_callers_of_a_failed_loop_get_an_error():
    executor = FakeExecutor()
    executor.bind_error = RuntimeError("no such device")
    loop = StepLoop(executor, asyncio.get_running_loop())
    with pytest.raises(RuntimeError, match="no such device"):
        await loop.attach(0)
    with pytest.raises(RuntimeError, match="no such device"):
        await loop.submit(0, Plan(1, 0))
    assert loop.problem() == "the step loop failed: no such device"
    await loop.stop()


async def test_stopping_does_not_wait_for_a_device_that_hangs(executor, monkeypatch):
    monkeypatch.setattr("gpu_worker.step_loop._STOP_S", 0.05)
    executor.max_in_flight = 1  # so that the loop collects the step at once
    loop = StepLoop(executor, asyncio.get_running_loop())
    await loop.attach(0)
    step = loop.submit(0, Plan(1, 0))
    await executor.wait_for(("launch", 1))
    assert not await loop.stop()
    assert not await loop.stop()  # as before
    assert not step.done()
    executor.launched[1].finished.set()
    await step
