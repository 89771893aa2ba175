"""The link to one attached worker: sends steps, receives results, and notices its loss."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from contract.codec.info import adapter_from_worker, memory_level_from_proto
from contract.codec.packing import pack_int32
from contract.codec.step import plan_to_proto, result_from_proto
from contract.errors import InvalidArgumentError, UnavailableError
from contract.hashing import BlockHash
from contract.info import MemoryLevel, WorkerInfo
from contract.liveness.heartbeat import BEAT_S, TICK_S, Heartbeat
from contract.lora import LoadedAdapter, LoraAdapter
from contract.state import Holdings
from contract.step import Plan, Result
from quire.v1 import adapters_pb2, adapters_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.observe import timeline
from rpc.security.tls import ClientTls, explain
from rpc.status import calling
from scheduler_svc.workers.result_checker import ResultChecker

ADAPTER_TIMEOUT_S = 300.0
"""The timeout of loading an adapter, which may come from a slow disk."""


@dataclass(frozen=True, slots=True)
class WorkerClientConfig:
    """Parameters that all attachments of one worker share."""

    target: str
    """A gRPC target such as "127.0.0.1:50053" or "unix:/run/worker.sock"."""
    epoch: int
    scheduler_id: str
    step_timeout_s: float
    """How long a step may be in flight before the worker counts as lost."""
    max_message_mb: int
    tls: ClientTls | None = None
    lost_after_s: float | None = None
    """How long the worker may be silent before it counts as lost; None: `LOST_AFTER_S`."""
    is_cut_off: Callable[[], bool] = lambda: False
    """Returns whether all routers are silent. If so, this scheduler may be cut off from them, and a
    standby should take over."""


@dataclass(frozen=True, slots=True, eq=False)
class TimedResult:
    """A step's result, with the time that the step was in flight."""

    step_id: int
    """The step's id on the wire."""
    result: Result
    message: worker_pb2.StepResult
    """The result as received; the log-probabilities in it are passed on to the routers."""
    rpc_s: float
    """How long the step was in flight."""


@dataclass(frozen=True, slots=True)
class _SentStep:
    step_id: int
    sent_at: float


class WorkerLink:
    """The connection to a worker during one attachment, until the worker is lost.

    `send` and `take_results` never wait. `wake` is set when there is a result to take, when the
    worker's memory level has changed, and when the worker is lost.
    """

    def __init__(
        self,
        config: WorkerClientConfig,
        channel: grpc.aio.Channel,
        info: WorkerInfo,
        holdings: Holdings,
        wake: asyncio.Event,
        step_id_base: int,
        former_epoch: int = 0,
    ) -> None:
        """Open the Execute stream on `channel`, which the link then owns; see `attach`."""
        self.info = info
        self.holdings = holdings
        """The rows and blocks that the worker held when it was attached."""
        self.former_epoch = former_epoch
        """The epoch of the worker's former scheduler, which may be this scheduler itself; 0: the
        worker had none."""
        self.lost: UnavailableError | None = None
        """Why the worker is lost; None: it is not lost."""
        self.heartbeat = Heartbeat(config.lost_after_s)
        """How long the worker has been silent."""
        self.memory_level = MemoryLevel.OK
        """The worker's memory level, as of its last heartbeat."""
        self.draining = asyncio.create_task(self._await_drain(), name=f"drain of {config.target}")
        """Done as soon as the worker is about to end and its sequences should move elsewhere."""
        self._config = config
        self._channel = channel
        self._wake = wake
        self._step_id_base = step_id_base
        self._loop = asyncio.get_running_loop()
        self._in_flight: deque[_SentStep] = deque()
        self._results: deque[TimedResult] = deque()
        self._batches: asyncio.Queue[worker_pb2.StepBatch | None] = asyncio.Queue()
        self._checker = ResultChecker(info)
        self._watchdog: asyncio.TimerHandle | None = None
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        self._adapters = adapters_pb2_grpc.AdapterServiceStub(channel)  # type: ignore[no-untyped-call]
        self._call = self._stub.Execute(self._sent_batches())
        self._since_result = Heartbeat()
        """Measures the time since the worker could begin to compute the oldest step in flight."""
        self._tasks = [
            asyncio.create_task(work, name=f"{name} {config.target}")
            for work, name in (
                (self._read(), "results of"),
                (self._poll(), "heartbeats of"),
                (self._watch_heartbeat(), "silence of"),
            )
        ]

    def send(self, plan: Plan) -> int:
        """Queue the batch for `plan`; the queue is short, since at most two steps are in flight.

        Returns:
            The step's id on the wire.
        """
        if not self._in_flight:
            self._since_result.on_message()  # an idle worker owes no results
        batch = plan_to_proto(plan, self._config.epoch, self._step_id_base)
        self._in_flight.append(_SentStep(batch.step_id, self._loop.time()))
        self._checker.on_sent(plan)
        self._batches.put_nowait(batch)
        if self._watchdog is None:
            self._arm_watchdog()
        return batch.step_id

    def take_results(self) -> list[TimedResult]:
        """Take the results received since the last call, in the order of their steps."""
        results = list(self._results)
        self._results.clear()
        return results

    def oldest_step_age_s(self) -> float:
        """Return how long the oldest step has been in flight; 0 if none is."""
        return self._loop.time() - self._in_flight[0].sent_at if self._in_flight else 0.0

    def oldest_step_runs_s(self) -> float:
        """Return how long the worker may have been computing the oldest step; 0 if there is none.

        The worker may have begun when the previous result arrived or, if no step was in flight,
        when the step was sent. Time in which this process was stopped does not count.
        """
        return self._since_result.silent_s if self._in_flight else 0.0

    async def pull_kv(
        self,
        source_target: str,
        source_instance_id: int,
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """Make the worker copy another worker's host blocks to its own; wait for the copy to end.

        Args:
            source_target: The other worker's address, as this scheduler knows it.
            source_instance_id: The other worker's `WorkerInfo.instance_id`. If the address leads
                this worker to a different process, the copy fails.
            sources: Host blocks of the other worker.
            targets: Host blocks of this worker, one for each of `sources`.

        Raises:
            QuireError: The copy failed. Unless the worker is lost, nothing writes to `targets` any
                more. This call has no deadline, because the deadline could pass while the worker
                still writes. The worker limits the time of the copy.
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

    async def store_kv(self, labels: Sequence[BlockHash], host_block_ids: Sequence[int]) -> int:
        """Make the worker store host blocks in the far tier; see `WorkerService.StoreKv`.

        Returns:
            How many blocks the far tier takes. These are the first ones of `host_block_ids`; the
            far tier has no room for the others.

        Raises:
            QuireError: The worker refused, or is lost.
        """
        request = worker_pb2.StoreKvRequest(
            epoch=self._config.epoch,
            host_block_ids=pack_int32(host_block_ids),
            labels=b"".join(labels),
        )
        with calling():
            stored: worker_pb2.StoreKvResponse = await self._stub.StoreKv(request)
        return min(int(stored.num_blocks), len(labels))

    async def fetch_kv(self, labels: Sequence[BlockHash], host_block_ids: Sequence[int]) -> int:
        """Make the worker fetch blocks from the far tier; see `WorkerService.FetchKv`.

        Returns:
            How many blocks have arrived. These are the first ones of `host_block_ids`.

        Raises:
            QuireError: The fetch failed. Unless the worker is lost, nothing writes to the blocks
                any more.
        """
        request = worker_pb2.FetchKvRequest(
            epoch=self._config.epoch,
            host_block_ids=pack_int32(host_block_ids),
            labels=b"".join(labels),
        )
        with calling():
            fetched: worker_pb2.FetchKvResponse = await self._stub.FetchKv(request)
        return min(int(fetched.num_blocks), len(labels))

    async def resize_pool(self, num_blocks: int) -> None:
        """Resize the worker's device pool; see `WorkerService.ResizePool`.

        Raises:
            QuireError: The resize failed. Unless the worker is lost, the pool keeps its size.
        """
        request = worker_pb2.ResizePoolRequest(epoch=self._config.epoch, num_blocks=num_blocks)
        with calling():
            await self._stub.ResizePool(request)

    async def load_adapter(self, name: str, directory: str) -> LoadedAdapter:
        """Load a LoRA adapter at the worker; see `AdapterService.LoadAdapter`.

        Raises:
            QuireError: The worker refused, or is lost.
        """
        request = adapters_pb2.LoadAdapterRequest(
            name=name, directory=directory, epoch=self._config.epoch
        )
        with calling():
            loaded = await self._adapters.LoadAdapter(request, timeout=ADAPTER_TIMEOUT_S)
        return LoadedAdapter(adapter_from_worker(loaded.adapter, "adapter"), loaded.was_there)

    async def unload_adapter(self, adapter: LoraAdapter) -> None:
        """Unload an adapter at the worker; see `AdapterService.UnloadAdapter`.

        Raises:
            QuireError: The worker refused, or is lost.
        """
        request = adapters_pb2.UnloadAdapterRequest(
            name=adapter.name, digest=adapter.digest, epoch=self._config.epoch
        )
        with calling():
            await self._adapters.UnloadAdapter(request, timeout=ADAPTER_TIMEOUT_S)

    def let_go(self) -> None:
        """Treat the worker as lost, because it is about to end."""
        self._lose(UnavailableError("it is draining"))

    async def close(self) -> None:
        """Close the streams and the channel."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        tasks = [*self._tasks, self.draining]
        for task in tasks:
            task.cancel()
        self._call.cancel()
        self._batches.put_nowait(None)  # a failed call still waits for its next batch
        await asyncio.wait(tasks)
        await self._channel.close(None)

    async def _sent_batches(self) -> AsyncIterator[worker_pb2.StepBatch]:
        """Yield the queued batches; a None in the queue ends the stream."""
        while (batch := await self._batches.get()) is not None:
            yield batch

    async def _await_drain(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.AwaitDrain(worker_pb2.AwaitDrainRequest())
            return
        await asyncio.Event().wait()  # wait for ever, because the failed call cannot report a drain

    async def _poll(self) -> None:
        """Poll the worker's state; both sides count each other's messages as heartbeats."""
        while True:
            request = worker_pb2.DescribeDeviceRequest(
                epoch=self._config.epoch, is_cut_off=self._config.is_cut_off()
            )
            try:
                state = await self._stub.DescribeDevice(request)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    self.heartbeat.on_message()  # an error also proves that the worker is alive
            else:
                self.heartbeat.on_message()
                # The worker does not end a stream that was opened after another scheduler attached
                # and has sent no batch yet.
                if state.epoch > self._config.epoch:
                    self._lose(UnavailableError(f"it obeys epoch {state.epoch}"))
                level = memory_level_from_proto(state.memory_level)
                if level is not self.memory_level:
                    self.memory_level = level
                    self._wake.set()
            await asyncio.sleep(BEAT_S)

    async def _watch_heartbeat(self) -> None:
        while not self.heartbeat.is_lost:
            await asyncio.sleep(TICK_S)
            self.heartbeat.on_tick()
            self._since_result.on_tick()
        self._lose(UnavailableError(f"it has been silent for {self.heartbeat.silent_s:g} s"))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.heartbeat.on_message()
                self._receive(message)
        except InvalidArgumentError as error:
            self._lose(UnavailableError(f"it sent a wrong result: {error}"))
        except grpc.aio.AioRpcError as error:
            # The error may be "stale epoch", which a restarted worker may report, too. The next
            # attempt to attach shows whether the epoch is really stale.
            self._lose(unavailable(error))
        finally:
            self._lose(UnavailableError("it ended the Execute stream"))

    def _receive(self, message: worker_pb2.StepResult | None) -> None:
        if message is None:  # gRPC yields None for bytes that it cannot parse
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
            result = result_from_proto(message, self._step_id_base, self.info.limits.max_num_seqs)
            self._checker.check(result, message)
        sent = self._in_flight.popleft()
        self._since_result.on_message()
        if timeline.is_on():
            timeline.add(
                "a step, from sending to result",
                f"in flight {sent.step_id % 2}",
                int(sent.sent_at * 1e9),
                step_id=sent.step_id,
                execute_ms=message.execute_s * 1e3,
            )
        rpc_s = self._loop.time() - sent.sent_at
        self._results.append(TimedResult(sent.step_id, result, message, rpc_s))
        self._wake.set()

    def _arm_watchdog(self) -> None:
        """Arm the watchdog for the oldest step in flight, if there is one.

        Results do not re-arm the watchdog. When the watchdog fires, it checks the step that is the
        oldest at that time.
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
        self._watchdog = self._loop.call_at(
            self._in_flight[0].sent_at + timeout_s, self._arm_watchdog
        )

    def _lose(self, why: UnavailableError) -> None:
        """Record why the worker is lost; keep the first reason, because others follow from it."""
        if self.lost is None:
            self.lost = why
            self._wake.set()


def unavailable(error: grpc.aio.AioRpcError) -> UnavailableError:
    """Convert the failure of a call to a worker to an UnavailableError."""
    return UnavailableError(f"{error.code().name}: {explain(error.details() or '')}")
