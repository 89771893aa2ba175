"""Runs the executor on a thread of its own: executes steps in order, and returns results.

The event loop stays free while a step computes. An *attachment* is one scheduler's claim on the
worker, from one `Attach` to the next. A step of an earlier attachment is not run: its
future gets an UnavailableError.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import structlog
import torch

from contract.arrays import Int32Array
from contract.errors import UnavailableError, UnimplementedError
from contract.state import Holdings
from contract.step import Plan, Result
from gpu_worker import metrics
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.lora.adapter import Adapter
from gpu_worker.parallel.leading_executor import AnyExecutor
from gpu_worker.step.executor import LaunchedStep
from rpc.observe import timeline

_POLL_S = 0.0002
"""While no job is queued: seconds between two checks whether the oldest launched step is done."""
_STUCK_S = 120.0
"""Seconds after which a running step counts as stuck. Even long prefills on a CPU take less."""
_STOP_S = 5.0
"""Seconds that `stop` waits at most for a running step. There is a limit because a hung device must
not keep the process alive."""

_T = TypeVar("_T")

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Attach:
    attachment: int
    done: "asyncio.Future[Holdings]"


@dataclass(frozen=True, slots=True)
class _Step:
    attachment: int
    plan: Plan
    result: "asyncio.Future[Result]"


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[AnyExecutor], Any]
    result: "asyncio.Future[Any]"
    is_between_steps: bool = False
    """Whether all steps in flight must end before `function` runs."""


class _Stop:
    pass


_Job: TypeAlias = _Attach | _Step | _Call | _Stop


class StepLoop:
    """Owns the executor's thread, from construction to `stop`. Call its methods in `event_loop`."""

    def __init__(self, executor: AnyExecutor, event_loop: asyncio.AbstractEventLoop) -> None:
        self._executor = executor
        self._event_loop = event_loop
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._pending: deque[tuple[_Step, LaunchedStep]] = deque()
        self._attachment: int | None = None
        self._is_trusted = True
        """Whether the labels of blocks are right. A failed step may have written to any block. So
        after a failed step the labels may be wrong; the next `attach` erases them."""
        self._is_stopped = False
        self._busy_since_s: float | None = None
        self._failure: str | None = None
        self._failed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._thread.start()

    @property
    def num_rows_used(self) -> int:
        """Number of rows that hold a sequence, as of the last step."""
        return 0 if self._is_stopped else self._executor.rows.num_used

    async def attach(self, attachment: int) -> Holdings:
        """After the steps queued so far, forget all rows; then run only steps of `attachment`.

        Returns:
            What the worker held before it forgot the rows; this includes the rows' sequences.
        """
        done: asyncio.Future[Holdings] = self._event_loop.create_future()
        self._post(_Attach(attachment, done), done)
        return await done

    def submit(self, attachment: int, plan: Plan) -> "asyncio.Future[Result]":
        """Queue a step; the returned future gets the step's result or error.

        A step that fails ends its attachment: the futures of steps queued behind it get an
        UnavailableError.
        """
        result: asyncio.Future[Result] = self._event_loop.create_future()
        self._post(_Step(attachment, plan, result), result)
        return result

    async def read_host_blocks(self, block_ids: Int32Array) -> bytes:
        """See `kv_exchange.HostBlocks`."""
        return await self._queue_call(lambda executor: _read(executor, block_ids))

    async def checksum_host_blocks(self, block_ids: Int32Array) -> int:
        """See `kv_exchange.HostBlocks`."""
        return await self._queue_call(lambda executor: _checksum(executor, block_ids))

    async def write_host_blocks(
        self, block_ids: Int32Array, content: bytes | npt.NDArray[np.uint8]
    ) -> None:
        """See `kv_exchange.HostBlocks`."""
        await self._queue_call(lambda executor: _write(executor, block_ids, content))

    def resize_pool(self, num_blocks: int) -> "asyncio.Future[None]":
        """Resize the device pool to `num_blocks`, after the steps and attachments queued so far.

        Returns:
            A future. It raises a FailedPreconditionError if `Executor.resize_pool` raises one.
        """
        return self._queue_call(
            lambda executor: executor.resize_pool(num_blocks), is_between_steps=True
        )

    def add_adapter(self, number: int, adapter: Adapter) -> "asyncio.Future[None]":
        """See `Executor.add_adapter`. Steps submitted from now on may use the adapter."""
        return self._queue_call(lambda executor: executor.add_adapter(number, adapter))

    def remove_adapter(self, number: int) -> "asyncio.Future[None]":
        """See `Executor.remove_adapter`."""
        return self._queue_call(lambda executor: executor.remove_adapter(number))

    async def stop(self) -> bool:
        """End the thread and drop the executor. Launched steps get no result.

        A thread that does not end within `_STOP_S` is abandoned, and ends with the process.

        Returns:
            Whether the thread has ended. A thread that has not ended still holds the executor and
            the executor's memory.
        """
        if self._is_stopped:
            return not self._thread.is_alive()
        self._is_stopped = True
        self._jobs.put(_Stop())
        await asyncio.to_thread(self._thread.join, _STOP_S)
        if self._thread.is_alive():
            _log.warning("gave up waiting for a step: it takes too long", waited_s=_STOP_S)
            return False
        del self._executor  # others may still hold this loop, which then holds no device memory
        return True

    async def wait_failed(self) -> None:
        """Wait until no step can run any more; only a new process can then run steps."""
        await self._failed.wait()

    @property
    def failure(self) -> str | None:
        """Why no step can run any more; None if steps can run."""
        return self._failure

    def problem(self) -> str | None:
        """Return what is wrong, for a liveness check; None if nothing is wrong."""
        if self._failure is not None:
            return self._failure
        if not self._thread.is_alive():
            return "the step loop has ended"
        busy_since_s = self._busy_since_s
        if busy_since_s is not None and (busy_s := time.monotonic() - busy_since_s) > _STUCK_S:
            return f"a step has taken {busy_s:.0f} s so far; at most {_STUCK_S:.0f} s are normal"
        return None

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame
            _log.error("the step loop failed", exc_info=error)
            self._give_up(f"the step loop failed: {error}")
            self._answer_all(error)

    def _work(self) -> None:
        self._executor.bind_thread()
        while True:
            job = self._next_job() if self._pending else self._jobs.get()
            self._busy_since_s = time.monotonic()
            match job:
                case None:
                    self._collect()
                case _Step():
                    self._launch(job)
                    is_full = len(self._pending) >= self._executor.max_in_flight
                    # A step that only waits for the disk is collected later.
                    if is_full and not self._is_idle():
                        self._collect()
                case _Attach():
                    self._reset(job)
                case _Call():
                    self._do(job)
                case _Stop():
                    self._close()
                    return
            self._busy_since_s = time.monotonic() if self._pending else None

    def _close(self) -> None:
        self._pending.clear()
        try:
            self._executor.close()
        except Exception as error:  # noqa: BLE001 - the device may have failed
            _log.warning("closing the executor failed", exc_info=error)

    def _answer_all(self, error: Exception) -> None:
        """Give `error` to every launched step and every queued job, until `stop` is called."""
        for step, _ in self._pending:
            self._deliver(step.result, error)
        while not isinstance(job := self._jobs.get(), _Stop):
            match job:
                case _Attach():
                    self._deliver(job.done, error)
                case _Step() | _Call():
                    self._deliver(job.result, error)

    def _next_job(self) -> _Job | None:
        """Return the next job, or None as soon as the oldest launched step is done."""
        _, oldest = self._pending[0]
        while not _is_done(oldest):
            try:
                return self._jobs.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        return None

    def _is_idle(self) -> bool:
        """Whether all launched steps only wait for the disk."""
        return all(launched.is_idle for _, launched in self._pending)

    def _launch(self, job: _Step) -> None:
        if job.attachment != self._attachment:
            problem = UnavailableError("a step before this one failed: attach again")
            self._deliver(job.result, problem)
            return
        try:
            with timeline.span("launch a step"):
                launched = self._executor.launch(job.plan)
            self._pending.append((job, launched))
        except Exception as error:  # noqa: BLE001 - reported to the caller
            self._fail(job, error)

    def _collect(self) -> None:
        job, launched = self._pending.popleft()
        try:
            with timeline.span("collect a step"):
                output = self._executor.collect(launched)
        except Exception as error:  # noqa: BLE001 - reported to the caller
            self._fail(job, error)
            return
        metrics.STEP_SECONDS.observe(output.execute_s)
        metrics.COMPUTED_TOKENS.inc(output.num_computed_tokens)
        metrics.SAMPLED_TOKENS.inc(len(output.sampled_rows))
        metrics.FAILED_ROWS.inc(len(output.failed_rows))
        metrics.ROWS_USED.set(self.num_rows_used)
        self._deliver(job.result, output)
        if output.head_start_s:
            time.sleep(output.head_start_s)

    def _reset(self, job: _Attach) -> None:
        while self._pending:
            self._collect()
        try:
            if not self._is_trusted:
                self._executor.distrust()
                self._is_trusted = True
            holdings = self._executor.reset()
        except Exception as error:  # noqa: BLE001 - reported to the caller
            self._record_device_failure(error)
            self._attachment = None
            self._deliver(job.done, error)
            return
        metrics.ROWS_USED.set(0)
        self._attachment = job.attachment
        self._deliver(job.done, holdings)

    def _queue_call(
        self, function: Callable[[AnyExecutor], _T], *, is_between_steps: bool = False
    ) -> "asyncio.Future[_T]":
        result: asyncio.Future[_T] = self._event_loop.create_future()
        self._post(_Call(function, result, is_between_steps), result)
        return result

    def _post(self, job: _Job, result: "asyncio.Future[Any]") -> None:
        if self._is_stopped:
            result.set_exception(UnavailableError("the model has been unloaded"))
        else:
            self._jobs.put(job)

    def _do(self, job: _Call) -> None:
        while job.is_between_steps and self._pending:
            self._collect()
        try:
            self._deliver(job.result, job.function(self._executor))
        except Exception as error:  # noqa: BLE001 - reported to the caller
            self._deliver(job.result, error)
            self._record_device_failure(error)

    def _fail(self, job: _Step, error: Exception) -> None:
        _log.error("step failed", step_id=job.plan.step_id, exc_info=error)
        self._attachment = None
        self._deliver(job.result, error)
        self._record_device_failure(error)
        self._is_trusted = False

    def _record_device_failure(self, error: Exception) -> None:
        """If `error` is a device error, record that no step can run any more.

        After a device error, every call to the device fails: torch raises an AcceleratorError, and
        a Triton launch raises Triton's own RuntimeError.
        """
        if isinstance(error, torch.AcceleratorError) or "Triton Error [CUDA]" in str(error):
            self._give_up(f"the device failed: {error}")

    def _give_up(self, failure: str) -> None:
        self._failure = self._failure or failure
        self._call(self._failed.set)

    def _deliver(self, future: "asyncio.Future[_T]", outcome: _T | Exception) -> None:
        self._call(lambda: _set_outcome(future, outcome))

    def _call(self, callback: Callable[[], object]) -> None:
        # If the event loop is closed, this thread was abandoned.
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(callback)


def _read(executor: AnyExecutor, block_ids: Int32Array) -> bytes:
    return _intact(_host_pool(executor).read(block_ids))


def _checksum(executor: AnyExecutor, block_ids: Int32Array) -> int:
    return _intact(_host_pool(executor).checksum(block_ids))


def _intact(read: _T | None) -> _T:
    if read is None:
        raise UnavailableError("a host block has changed since it was swapped out")
    return read


def _write(
    executor: AnyExecutor, block_ids: Int32Array, content: bytes | npt.NDArray[np.uint8]
) -> None:
    host_pool = _host_pool(executor)
    executor.labels.host.remove(block_ids)
    host_pool.write(block_ids, content)


def _host_pool(executor: AnyExecutor) -> HostPool:
    if executor.host_pool is None:
        raise UnimplementedError("this worker has no host blocks (--host-kv-memory-gb)")
    return executor.host_pool


def _is_done(launched: LaunchedStep) -> bool:
    try:
        return launched.is_done()
    except Exception:  # noqa: BLE001 - collecting the step reports it
        return True


def _set_outcome(future: "asyncio.Future[_T]", outcome: _T | Exception) -> None:
    if future.done():  # the caller no longer waits
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
