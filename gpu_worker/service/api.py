"""The gRPC face of a worker: epochs, attachments, and the stream of steps."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

import grpc.aio
import structlog

from contract.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    QuireError,
    UnavailableError,
    UnimplementedError,
)
from contract.heartbeat import LOST_AFTER_S
from contract.lora import LoraAdapter
from gpu_worker import metrics
from gpu_worker.memory.level import WatchedMemory
from gpu_worker.service.attachments import Attachment, Attachments
from gpu_worker.service.description_wire import (
    holdings_to_proto,
    worker_info_to_proto,
    worker_state_to_proto,
)
from gpu_worker.service.holdings import Holdings
from gpu_worker.service.kv_exchange import HostBlocks, pull_kv, read_kv, read_request
from gpu_worker.service.step_wire import (
    host_blocks_to_pull,
    host_blocks_to_read,
    step_input_from_proto,
    step_output_to_proto,
)
from gpu_worker.service.streams import Execution, Executions
from gpu_worker.service.worker_info import WorkerInfo, WorkerState
from gpu_worker.step.messages import StepInput, StepOutput
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.grpc_server import Service, service_of
from rpc.observe import timeline
from rpc.security.tls import ClientTls

_CLOSE_S: Final = 10.0
"""How long a scheduler may take to read the results that it is owed when the model goes."""

_log = structlog.get_logger()


class Steps(HostBlocks, Protocol):
    """Called from one event loop."""

    @property
    def num_rows_used(self) -> int:
        """Rows that hold a sequence."""

    async def attach(self, attachment: int) -> Holdings:
        """Forget all rows; obey only `attachment` from then on.

        Returns:
            What there was.
        """

    def submit(self, attachment: int, step: StepInput) -> "asyncio.Future[StepOutput]":
        """Queue a step; what it produces, or raises, comes in the future."""

    def resize_pool(self, num_blocks: int) -> Awaitable[None]:
        """Let the device have `num_blocks` blocks, after the steps taken so far.

        Whoever attaches after this call finds it done.
        """


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one scheduler at a time: the newest. Until `open` and after `drain` it refuses."""

    def __init__(self, tls: ClientTls | None = None) -> None:
        """`tls` is how other workers are called; None: in the clear."""
        self._tls = tls
        self._info: WorkerInfo | None = None
        self._steps: Steps | None = None
        self._memory: WatchedMemory | None = None
        self._attachments = Attachments()
        self._executions = Executions()
        self._is_leaving = asyncio.Event()
        """It is about to end, and may be left."""
        self._num_told = 0
        """Calls that wait to hear that."""
        self._is_draining = False
        self._is_unloaded = False
        self._resizing: asyncio.Task[None] | None = None
        """The last one, which somebody must hold."""
        self._heard_s = 0.0
        """When the scheduler was heard of last, by the event loop's clock."""

    def open(self, info: WorkerInfo, steps: Steps, memory: WatchedMemory | None = None) -> None:
        """The model is there: serve it. `memory` is the device's; None: nobody watches it."""
        self._info, self._steps, self._memory = info, steps, memory
        self._is_unloaded = False
        metrics.UNLOADED.set(0)

    async def close(self) -> None:
        """The model is about to go: take no steps until `open`; return when all have ended.

        A scheduler may attach, and is told.
        """
        self._is_unloaded = True
        metrics.UNLOADED.set(1)
        await self._executions.end_all(_unloaded(), _CLOSE_S)
        self._steps = self._memory = None
        metrics.KV_BYTES.set(0)
        metrics.ROWS_USED.set(0)
        if (newest := self._attachments.newest) is not None:
            newest.holdings = None

    @property
    def model_id(self) -> str:
        """What requests call the model."""
        return self._loaded()[0].model_id

    @property
    def adapters(self) -> Mapping[LoraAdapter, int]:
        """The LoRA adapters that batches may name, and the number of each."""
        return self._loaded()[0].limits.adapters

    @adapters.setter
    def adapters(self, adapters: Mapping[LoraAdapter, int]) -> None:
        info, _ = self._loaded()
        self._info = replace(info, limits=replace(info.limits, adapters=adapters))

    def check_epoch(self, epoch: int) -> None:
        """Check that who calls is the newest scheduler.

        Raises:
            InvalidArgumentError, StaleEpochError: As `Attachments.of`.
            UnavailableError: There is no model yet, or not for long.
        """
        self._loaded()
        self._attachments.of(epoch)

    def check_claim(self, epoch: int) -> str:
        """Check that who calls is the newest scheduler, whether there is a model or not.

        Returns:
            The worker's name.

        Raises:
            InvalidArgumentError, StaleEpochError: As `Attachments.of`.
            UnavailableError: The worker drains, or its first model is not there yet.
        """
        if self._is_draining or self._info is None:
            self._loaded()  # says so
        assert self._info is not None, "it was loaded"
        self._attachments.of(epoch)
        return self._info.worker_id

    @property
    def num_live_seqs(self) -> int:
        """Rows that hold a sequence, while a scheduler is there."""
        return self._steps.num_rows_used if self._steps is not None and self._executions else 0

    async def drain(self, hand_over_s: float) -> None:
        """Refuse new steps, and wait until each stream has ended after the results it owes.

        Before that, a scheduler that wants to know has `hand_over_s` to end its stream itself.
        """
        if self._num_told:
            self._is_leaving.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(hand_over_s):
                    await self._executions.wait_ended()
        self._is_draining = True
        await self._executions.end_all(UnavailableError("the worker is draining"))

    def service(self) -> Service:
        """What `rpc.server.serve` takes."""
        return service_of(worker_pb2, worker_pb2_grpc, "WorkerService", self)

    async def Attach(  # noqa: N802 - the proto's name
        self, request: worker_pb2.AttachRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AttachResponse:
        """Put the worker under a scheduler's epoch; the rows of the one before are forgotten."""
        del context
        if self._is_unloaded and self._info is not None and not self._is_draining:
            self._attachments.begin(request.epoch)
            self._heard_s = asyncio.get_running_loop().time()
            return worker_pb2.AttachResponse(
                worker=worker_info_to_proto(self._info), is_unloaded=True
            )
        _, steps = self._loaded()
        if self._is_leaving.is_set():
            raise UnavailableError("the worker is draining")
        attachment = self._attachments.begin(request.epoch)
        self._executions.supersede(self._attachments)
        attachment.holdings = await steps.attach(attachment.number)
        _log.info(
            "attached",
            epoch=request.epoch,
            scheduler_id=request.scheduler_id,
            num_held_rows=len(attachment.holdings.rows),
        )
        info, _ = self._loaded()  # now: it may have been resized under the one before
        return worker_pb2.AttachResponse(worker=worker_info_to_proto(info))

    async def ReadHoldings(  # noqa: N802 - the proto's name
        self, request: worker_pb2.ReadHoldingsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Stream what there was when the scheduler attached."""
        self._loaded()
        attachment = self._attachments.of(request.epoch)
        if attachment.holdings is None:
            raise FailedPreconditionError(
                f"epoch {request.epoch} has sent a step, or has not finished attaching; "
                "what the worker held can be read in between"
            )
        for part in holdings_to_proto(attachment.holdings):
            self._attachments.require_newest(attachment)
            await context.write(part)

    # Writing rather than yielding: a generator that is left at a `yield` when the scheduler goes is
    # closed whenever its garbage is collected, and until then its stream would not count as ended.
    async def Execute(  # noqa: N802 - the proto's name
        self,
        request_iterator: AsyncIterator[worker_pb2.StepBatch],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Execute the batches in order and answer each with its result."""
        execution = self._executions.begin()
        reader = asyncio.create_task(self._read(request_iterator, execution))
        try:
            async for output in execution.results.results():
                assert execution.attachment is not None, "a result without a batch"
                execution.attachment.done_step_id = output.step_id
                with timeline.span("encode the result"):
                    message = step_output_to_proto(output, execution.attachment.epoch)
                await context.write(message)
        finally:
            reader.cancel()
            self._executions.end(execution)

    async def DescribeDevice(  # noqa: N802 - the proto's name
        self,
        request: worker_pb2.DescribeDeviceRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> worker_pb2.DescribeDeviceResponse:
        """Describe the device and what it holds; to its scheduler also while it drains."""
        del context
        if self._info is None:
            raise _still_loading()
        now_s = asyncio.get_running_loop().time()
        attachment = self._attachments.newest or Attachment(number=0, epoch=0)
        if request.epoch and request.epoch == attachment.epoch:
            self._heard_s = now_s
        state = WorkerState(
            epoch=attachment.epoch,
            step_id=attachment.done_step_id,
            num_rows_used=0 if self._steps is None else self._steps.num_rows_used,
            has_scheduler=(
                (self._is_unloaded or bool(self._executions))
                and now_s - self._heard_s < LOST_AFTER_S
            ),
            memory_level=None if self._memory is None else self._memory.level,
            is_unloaded=self._is_unloaded,
        )
        return worker_state_to_proto(self._info, state)

    async def ReadKv(  # noqa: N802 - the proto's name
        self, request: worker_pb2.ReadKvRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Stream the contents of host blocks."""
        info, steps = self._loaded()
        _require_whole_blocks(info)
        # First: the asking worker knows this one by an address, which may mean another worker there
        # than at the scheduler. Epoch and format are the same at all workers of a scheduler.
        if request.instance_id != info.instance_id:
            raise FailedPreconditionError(
                f"KV is wanted of worker instance {request.instance_id:#x}; "
                f"this is {info.worker_id}, instance {info.instance_id:#x}"
            )
        attachment = self._attachments.of(request.epoch)
        if request.kv_format != info.kv_format:
            raise FailedPreconditionError(
                f"KV is wanted as {request.kv_format}; this worker has {info.kv_format}"
            )
        block_ids = host_blocks_to_read(request, info.limits)
        async for piece in read_kv(steps, block_ids, info.host_block_bytes or info.block_bytes):
            self._attachments.require_newest(attachment)
            await context.write(piece)

    async def PullKv(  # noqa: N802 - the proto's name
        self, request: worker_pb2.PullKvRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PullKvResponse:
        """Fetch contents of another worker's host blocks."""
        del context
        info, steps = self._loaded()
        _require_whole_blocks(info)
        attachment = self._attachments.of(request.epoch)
        sources, block_ids = host_blocks_to_pull(request, info.limits)
        await pull_kv(
            steps,
            request.source_target,
            read_request(request.epoch, request.source_instance_id, sources, info.kv_format),
            block_ids,
            info.host_block_bytes or info.block_bytes,
            check=lambda: self._attachments.require_newest(attachment),
            tls=self._tls,
        )
        return worker_pb2.PullKvResponse()

    async def ResizePool(  # noqa: N802 - the proto's name
        self, request: worker_pb2.ResizePoolRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ResizePoolResponse:
        """Let the device have more blocks, or fewer."""
        del context
        info, steps = self._loaded()
        self._attachments.of(request.epoch)
        if (most := info.max_num_blocks) is None:
            raise UnimplementedError(f"the number of blocks of {info.worker_id} is fixed")
        if not (least := info.min_num_blocks) <= request.num_blocks <= most:
            raise InvalidArgumentError(
                "num_blocks", f"is {request.num_blocks}; it must be in [{least}, {most}]"
            )
        # It goes on if the caller is gone: what there is then must be known.
        resized = steps.resize_pool(request.num_blocks)
        self._resizing = asyncio.create_task(self._resize(resized, request.num_blocks))
        await asyncio.shield(self._resizing)
        return worker_pb2.ResizePoolResponse()

    async def _resize(self, resized: Awaitable[None], num_blocks: int) -> None:
        await resized
        assert self._info is not None, "it was loaded"
        before = self._info.limits.num_blocks
        limits = replace(self._info.limits, num_blocks=num_blocks)
        self._info = replace(self._info, limits=limits)
        metrics.KV_BYTES.set(num_blocks * self._info.block_bytes)
        _log.info("resized", num_blocks=num_blocks, num_blocks_before=before)

    async def AwaitDrain(  # noqa: N802 - the proto's name
        self, request: worker_pb2.AwaitDrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AwaitDrainResponse:
        """Wait until this worker is about to end."""
        del request, context
        self._num_told += 1
        try:
            await self._is_leaving.wait()
        finally:
            self._num_told -= 1
        return worker_pb2.AwaitDrainResponse()

    async def _read(
        self, batches: AsyncIterator[worker_pb2.StepBatch], execution: Execution
    ) -> None:
        """Take batches until there are no more, or one is refused."""
        try:
            async for batch in batches:
                await execution.results.wait_for_room()
                execution.results.owe(self._take(batch, execution))
        except Exception as error:  # noqa: BLE001 - the handler raises it, after the results
            execution.results.end(error)
        else:
            execution.results.end()

    def _take(
        self, batch: worker_pb2.StepBatch, execution: Execution
    ) -> "asyncio.Future[StepOutput]":
        """Check a batch and give it to what runs it."""
        info, steps = self._loaded()
        newest = self._attachments.of(batch.epoch)
        if execution.attachment is None:
            if newest.has_stream:
                raise AlreadyExistsError(
                    f"epoch {batch.epoch} has opened an Execute stream since it attached"
                )
            execution.attachment, newest.has_stream = newest, True
        if execution.attachment is not newest:
            raise self._attachments.superseded(execution.attachment)
        if batch.step_id <= newest.last_step_id:
            raise InvalidArgumentError(
                "step_id", f"is {batch.step_id}; it must be greater than {newest.last_step_id}"
            )
        self._heard_s = asyncio.get_running_loop().time()
        newest.last_step_id = batch.step_id
        newest.holdings = None
        with timeline.span("decode the batch"):
            step = step_input_from_proto(batch, info.limits)
        return steps.submit(newest.number, step)

    def _loaded(self) -> tuple[WorkerInfo, Steps]:
        if self._is_draining:
            raise UnavailableError("the worker is draining")
        if self._is_unloaded:
            raise _unloaded()
        if self._info is None or self._steps is None:
            raise _still_loading()
        return self._info, self._steps


def _require_whole_blocks(info: WorkerInfo) -> None:
    if not info.takes_kv:
        raise UnimplementedError(
            f"{info.worker_id} gives and takes no KV: each block is in parts on several devices"
        )


def _unloaded() -> QuireError:
    return UnavailableError("the model is unloaded")


def _still_loading() -> QuireError:
    return UnavailableError("the model is still being loaded")
