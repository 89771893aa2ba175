"""The link to one worker: send steps, take results, notice when it is lost."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc.aio

from contract.errors import InvalidArgumentError, UnavailableError
from contract.heartbeat import BEAT_S, TICK_S, Silence
from contract.lora import LoadedAdapter, LoraAdapter
from contract.packing import pack_int32
from quire.v1 import adapters_pb2, adapters_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.observe import timeline
from rpc.security.tls import ClientTls, explain
from rpc.status import calling
from scheduler_svc.core.handover.holdings import Holdings
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.pressure import MemoryLevel
from scheduler_svc.domain import WorkerInfo
from scheduler_svc.wire.adapters import adapter_from_proto
from scheduler_svc.wire.memory_level import memory_level_from_proto
from scheduler_svc.wire.worker import (
    WorkerResult,
    plan_to_proto,
    result_from_proto,
)
from scheduler_svc.workers.ledger import WorkerLedger

ADAPTER_TIMEOUT_S = 300.0
"""Of an adapter, from a slow disk."""


@dataclass(frozen=True, slots=True)
class WorkerClientConfig:
    """What every attachment to one worker has in common."""

    target: str
    """A gRPC target such as "127.0.0.1:50053" or "unix:/run/worker.sock"."""
    epoch: int
    scheduler_id: str
    step_timeout_s: float
    """How long a step may be in flight before the worker counts as lost."""
    max_message_mb: int
    tls: ClientTls | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TimedResult:
    """A step's result, and how long the step was in flight."""

    step_id: int
    """As on the wire."""
    result: WorkerResult
    rpc_s: float


@dataclass(frozen=True, slots=True)
class _SentStep:
    step_id: int
    sent_at: float


class WorkerLink:
    """An attached worker, until it is lost; then a new link is made.

    Nothing here waits: `send` queues, results are collected as they come, and `wake` is set
    whenever there is a result to take, its memory's level has changed, or the worker is lost.
    """

    def __init__(
        self,
        config: WorkerClientConfig,
        channel: grpc.aio.Channel,
        info: WorkerInfo,
        holdings: Holdings,
        wake: asyncio.Event,
        step_id_base: int,
    ) -> None:
        """Open the Execute stream on `channel`, which the link then owns. See `worker_attach`."""
        self.info = info
        self.holdings = holdings
        """What the worker held when it was attached."""
        self.lost: UnavailableError | None = None
        """Why the worker is lost; None: it is not."""
        self.memory_level = MemoryLevel.OK
        """How short its memory is, as of its last beat."""
        self.draining = asyncio.create_task(self._await_drain(), name=f"drain of {config.target}")
        """Done when the worker is about to end, and its sequences should be elsewhere."""
        self._config = config
        self._channel = channel
        self._wake = wake
        self._step_id_base = step_id_base
        self._loop = asyncio.get_running_loop()
        self._in_flight: deque[_SentStep] = deque()
        self._results: deque[TimedResult] = deque()
        self._batches: asyncio.Queue[worker_pb2.StepBatch | None] = asyncio.Queue()
        self._ledger = WorkerLedger(info)
        self._watchdog: asyncio.TimerHandle | None = None
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        self._adapters = adapters_pb2_grpc.AdapterServiceStub(channel)  # type: ignore[no-untyped-call]
        self._call = self._stub.Execute(self._sent_batches())
        self._silence = Silence()
        self._since_result = Silence()
        self._tasks = [
            asyncio.create_task(work, name=f"{name} {config.target}")
            for work, name in (
                (self._read(), "results of"),
                (self._listen(), "beats of"),
                (self._watch_silence(), "silence of"),
            )
        ]

    def send(self, plan: StepPlan) -> int:
        """Send the batch for `plan`; at most two steps are in flight, so the queue is short.

        Returns:
            The step's id on the wire.
        """
        if not self._in_flight:
            self._since_result.heard()  # there was nothing to say
        batch = plan_to_proto(plan, self._config.epoch, self._step_id_base)
        self._in_flight.append(_SentStep(batch.step_id, self._loop.time()))
        self._ledger.sent(plan)
        self._batches.put_nowait(batch)
        if self._watchdog is None:
            self._watch()
        return batch.step_id

    def take_results(self) -> list[TimedResult]:
        """Take the results that came since the last call, in the order of their steps."""
        results = list(self._results)
        self._results.clear()
        return results

    def oldest_step_age_s(self) -> float:
        """Say how long the oldest step has been in flight; 0 if none is."""
        return self._loop.time() - self._in_flight[0].sent_at if self._in_flight else 0.0

    def oldest_step_runs_s(self) -> float:
        """Say how long the oldest step may have been computing: it waits for those before it.

        As `Silence` counts: not the time that this process was stopped.
        """
        return self._since_result.seconds if self._in_flight else 0.0

    @property
    def silence(self) -> Silence:
        """How long the worker has said nothing."""
        return self._silence

    async def pull_kv(
        self,
        source_target: str,
        source_instance_id: int,
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """Have the worker fill its host blocks with another worker's; returns when it has.

        Args:
            source_target: The other worker, as this scheduler calls it.
            source_instance_id: Who must answer there: the worker may know another by that name.
            sources: Host blocks of that one.
            targets: Host blocks of this one, as many.

        Raises:
            QuireError: It could not. Either nothing writes the blocks any more, or the worker is
                lost; so there is no deadline, but the worker's own.
        """
        request = worker_pb2.PullKvRequest(
            epoch=self._config.epoch,
            source_target=source_target,
            source_instance_id=source_instance_id,
            source_host_block_ids=pack_int32(sources),
            host_block_ids=pack_int32(targets),
        )
        with calling():
            await self._stub.PullKv(request)

    async def resize_pool(self, num_blocks: int) -> None:
        """Have the worker's device have so many blocks; see `WorkerService.ResizePool`.

        Raises:
            QuireError: It has as many as before, or the worker is lost.
        """
        request = worker_pb2.ResizePoolRequest(epoch=self._config.epoch, num_blocks=num_blocks)
        with calling():
            await self._stub.ResizePool(request)

    async def load_adapter(self, name: str, directory: str) -> LoadedAdapter:
        """Have the worker load a LoRA adapter; see `AdapterService.LoadAdapter`.

        Raises:
            QuireError: It has not, or the worker is lost.
        """
        request = adapters_pb2.LoadAdapterRequest(
            name=name, directory=directory, epoch=self._config.epoch
        )
        with calling():
            loaded = await self._adapters.LoadAdapter(request, timeout=ADAPTER_TIMEOUT_S)
        return LoadedAdapter(adapter_from_proto(loaded.adapter, "adapter"), loaded.was_there)

    async def unload_adapter(self, adapter: LoraAdapter) -> None:
        """Have the worker unload one; see `AdapterService.UnloadAdapter`.

        Raises:
            QuireError: It has not, or the worker is lost.
        """
        request = adapters_pb2.UnloadAdapterRequest(
            name=adapter.name, digest=adapter.digest, epoch=self._config.epoch
        )
        with calling():
            await self._adapters.UnloadAdapter(request, timeout=ADAPTER_TIMEOUT_S)

    def let_go(self) -> None:
        """Take the worker for lost: it is about to end."""
        self._lose(UnavailableError("it is draining"))

    async def close(self) -> None:
        """Let the worker go."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        tasks = [*self._tasks, self.draining]
        for task in tasks:
            task.cancel()
        self._call.cancel()
        self._batches.put_nowait(None)  # a call that has failed goes on waiting for the next one
        await asyncio.wait(tasks)
        await self._channel.close(None)

    async def _sent_batches(self) -> AsyncIterator[worker_pb2.StepBatch]:
        """Yield what is to be sent; a None in the queue is the end."""
        while (batch := await self._batches.get()) is not None:
            yield batch

    async def _await_drain(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.AwaitDrain(worker_pb2.AwaitDrainRequest())
            return
        await asyncio.Event().wait()  # it does not tell, or is lost, as its other stream will say

    async def _listen(self) -> None:
        """Ask for a sign of life again and again, which also is one."""
        request = worker_pb2.DescribeDeviceRequest(epoch=self._config.epoch)
        while True:
            try:
                state = await self._stub.DescribeDevice(request)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    self._silence.heard()  # whatever it says, it answers
            else:
                self._silence.heard()
                level = memory_level_from_proto(state.memory_level)
                if level is not self.memory_level:
                    self.memory_level = level
                    self._wake.set()
            await asyncio.sleep(BEAT_S)

    async def _watch_silence(self) -> None:
        while not self._silence.is_loss:
            await asyncio.sleep(TICK_S)
            self._silence.tick()
            self._since_result.tick()
        self._lose(UnavailableError(f"it has said nothing for {self._silence.seconds:g} s"))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._silence.heard()
                self._receive(message)
        except InvalidArgumentError as error:
            self._lose(UnavailableError(f"it sent a wrong result: {error}"))
        except grpc.aio.AioRpcError as error:
            # Even if it says that our epoch is stale: a worker that restarted since it was attached
            # may say so too. Attaching again tells.
            self._lose(unavailable(error))
        finally:
            self._lose(UnavailableError("it ended the Execute stream"))

    def _receive(self, message: worker_pb2.StepResult | None) -> None:
        if message is None:  # so gRPC says that the bytes are no message
            raise InvalidArgumentError("result", "cannot be parsed")
        expected = self._in_flight[0].step_id if self._in_flight else None
        if message.epoch != self._config.epoch:
            raise InvalidArgumentError(
                "epoch", f"is {message.epoch}; it must be {self._config.epoch}"
            )
        if message.step_id != expected:
            raise InvalidArgumentError(
                "step_id", f"is {message.step_id}; the oldest step in flight is {expected}"
            )
        with timeline.span("decode the result"):
            result = result_from_proto(message, self._step_id_base, self.info.max_num_seqs)
            self._ledger.check(result)
        sent = self._in_flight.popleft()
        self._since_result.heard()
        if timeline.is_on():
            timeline.add(
                "a step, from sending to result",
                f"in flight {sent.step_id % 2}",
                int(sent.sent_at * 1e9),
                step_id=sent.step_id,
                execute_ms=message.execute_s * 1e3,
            )
        self._results.append(TimedResult(sent.step_id, result, self._loop.time() - sent.sent_at))
        self._wake.set()

    def _watch(self) -> None:
        """Arm the watchdog for the oldest step in flight; nothing in flight, nothing to watch.

        It is not re-armed at each result: when it fires, it looks what is in flight by then.
        """
        self._watchdog = None
        if not self._in_flight or self.lost is not None:
            return
        timeout_s = self._config.step_timeout_s
        if self.oldest_step_age_s() >= timeout_s:
            self._lose(
                UnavailableError(
                    f"step {self._in_flight[0].step_id} has no result after {timeout_s:g} s"
                )
            )
            return
        self._watchdog = self._loop.call_at(self._in_flight[0].sent_at + timeout_s, self._watch)

    def _lose(self, why: UnavailableError) -> None:
        """Take the first reason for the loss; the others follow from it."""
        if self.lost is None:
            self.lost = why
            self._wake.set()


def unavailable(error: grpc.aio.AioRpcError) -> UnavailableError:
    """Say why a call of a worker did not go through."""
    return UnavailableError(f"{error.code().name}: {explain(error.details() or '')}")
