"""The worker's gRPC service: epochs, attachments, and the stream of steps."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc.aio
import structlog

from contract.codec.info import memory_level_to_proto, worker_info_to_proto
from contract.codec.state import holdings_to_parts
from contract.codec.step import result_to_proto
from contract.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    QuireError,
    UnavailableError,
    UnimplementedError,
)
from contract.info import WorkerInfo
from contract.lora import LoraAdapter
from contract.state import Holdings
from contract.step import Plan, Result
from gpu_worker import metrics
from gpu_worker.kv.nixl_engine import NixlEngine
from gpu_worker.memory.pressure_level import WatchedMemory
from gpu_worker.service.attachments import Attachment, Attachments
from gpu_worker.service.far_tier import fetch_far, store_far
from gpu_worker.service.kv_exchange import HostBlocks, pull_kv, read_kv, read_request
from gpu_worker.service.step_wire import (
    blocks_and_labels,
    host_blocks_to_pull,
    host_blocks_to_read,
    plan_of,
)
from gpu_worker.service.streams import Execution, Executions
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.grpc_server import Service, service_of
from rpc.observe import timeline
from rpc.security.tls import ClientTls

if TYPE_CHECKING:
    from gpu_worker.kv.far_store import FarStore

_CLOSE_S: Final = 10.0
"""How long a scheduler may take to read its last results before the model is unloaded."""

_log = structlog.get_logger()


class Steps(HostBlocks, Protocol):
    """Runs the steps: `step_loop.StepLoop`, a simulation or a fake. Called from one event loop.

    This is a protocol, because `StepLoop` imports torch, and the server starts before torch is
    imported.
    """

    @property
    def num_rows_used(self) -> int: ...

    async def attach(self, attachment: int) -> Holdings:
        """Forget all rows, and take only steps of `attachment` afterwards.

        Returns:
            Everything that the worker held before the call, its rows included.
        """

    def submit(self, attachment: int, plan: Plan) -> "asyncio.Future[Result]":
        """Queue a step; the future gets its result or error."""

    def resize_pool(self, num_blocks: int) -> Awaitable[None]:
        """Resize the device pool to `num_blocks`, after the steps queued so far.

        An `attach` after this call waits until the resize is done.
        """


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Serves the newest scheduler; refuses most calls before `open` and after `drain`."""

    def __init__(self, tls: ClientTls | None = None) -> None:
        """`tls` is for calls to other workers; None: plaintext."""
        self._tls = tls
        self._worker_id = ""
        self._info: WorkerInfo | None = None
        self._steps: Steps | None = None
        self._memory: WatchedMemory | None = None
        self._transfer: NixlEngine | None = None
        self._far: FarStore | None = None
        self._attachments = Attachments()
        self._executions = Executions()
        self._is_leaving = asyncio.Event()
        """Set when the worker begins to drain while a scheduler waits in `AwaitDrain`."""
        self._num_awaiting_drain = 0
        """Calls that wait for `_is_leaving`."""
        self._is_draining = False
        self._is_unloaded = False
        self._resizing: asyncio.Task[None] | None = None
        """The last resize; this reference keeps the task from being garbage-collected."""

    def open(
        self,
        info: WorkerInfo,
        steps: Steps,
        memory: WatchedMemory | None = None,
        transfer: NixlEngine | None = None,
        far: "FarStore | None" = None,
    ) -> None:
        """Start serving a loaded model.

        `memory` is None if the device's memory is not watched. `transfer` is None if KV moves over
        gRPC. `far` is None if there is no far tier.
        """
        self._info, self._steps, self._memory = info, steps, memory
        self._transfer, self._far = transfer, far
        self._worker_id = info.worker_id
        self._is_unloaded = False
        metrics.UNLOADED.set(0)

    def begin_unloaded(self, worker_id: str) -> None:
        """Start without a model. Schedulers may attach, and learn that the model is unloaded."""
        self._worker_id = worker_id
        self._is_unloaded = True
        metrics.UNLOADED.set(1)

    async def close(self) -> None:
        """Stop serving before the model is unloaded; return when all steps have ended.

        A scheduler may still attach, and learns that the model is unloaded.
        """
        self._is_unloaded = True
        metrics.UNLOADED.set(1)
        await self._executions.end_all(_unloaded(), _CLOSE_S)
        self._steps = self._memory = self._transfer = self._far = None
        metrics.KV_BYTES.set(0)
        metrics.ROWS_USED.set(0)
        if (newest := self._attachments.newest) is not None:
            newest.holdings = None

    @property
    def model_id(self) -> str:
        """The model's name in requests."""
        return self._loaded()[0].model_id

    @property
    def adapters(self) -> Mapping[LoraAdapter, int]:
        """Maps each LoRA adapter that is loaded to the number by which batches name it."""
        return self._loaded()[0].limits.adapters

    @adapters.setter
    def adapters(self, adapters: Mapping[LoraAdapter, int]) -> None:
        info, _ = self._loaded()
        self._info = replace(info, limits=replace(info.limits, adapters=adapters))

    def check_epoch(self, epoch: int) -> None:
        """Check that the caller is the newest scheduler.

        Raises:
            InvalidArgumentError, StaleEpochError: See `Attachments.of`.
            UnavailableError: The model is not loaded, or the worker drains.
        """
        self._loaded()
        self._attachments.of(epoch)

    def check_claim(self, epoch: int) -> str:
        """Check that the caller is the newest scheduler, even while the model is unloaded.

        Returns:
            The worker's name.

        Raises:
            InvalidArgumentError, StaleEpochError: See `Attachments.of`.
            UnavailableError: The worker drains, or still loads its first model.
        """
        if self._is_draining or not (self._is_unloaded or self._info is not None):
            self._loaded()  # raises if the worker drains or loads
        self._attachments.of(epoch)
        return self._worker_id

    @property
    def num_live_seqs(self) -> int:
        """Number of rows that hold a sequence; 0 while no scheduler is connected."""
        return self._steps.num_rows_used if self._steps is not None and self._executions else 0

    async def drain(self, hand_over_s: float) -> None:
        """Give the scheduler time to end its stream; then refuse new steps, and end all streams.

        A scheduler that has called `AwaitDrain` has `hand_over_s` seconds to end its stream itself.
        Then the worker ends each open stream when the stream has sent its results.
        """
        if self._num_awaiting_drain:
            self._is_leaving.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(hand_over_s):
                    await self._executions.wait_ended()
        self._is_draining = True
        await self._executions.end_all(UnavailableError("the worker is draining"))

    def service(self) -> Service:
        """Return the service in the form that `rpc.server.serve` takes."""
        return service_of(worker_pb2, worker_pb2_grpc, "WorkerService", self)

    async def Attach(  # noqa: N802 - the proto's name
        self, request: worker_pb2.AttachRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AttachResponse:
        """Attach a scheduler, by its epoch.

        The worker forgets the rows of the previous attachment, but `ReadHoldings` still lists them.
        """
        del context
        if self._is_unloaded and not self._is_draining:
            former_epoch = self._newest_epoch
            self._attachments.begin(request.epoch)
            return worker_pb2.AttachResponse(
                worker=None if self._info is None else worker_info_to_proto(self._info),
                is_unloaded=True,
                former_epoch=former_epoch,
            )
        _, steps = self._loaded()
        if self._is_leaving.is_set():
            raise UnavailableError("the worker is draining")
        former_epoch = self._newest_epoch
        attachment = self._attachments.begin(request.epoch)
        self._executions.supersede(self._attachments)
        attachment.holdings = await steps.attach(attachment.number)
        _log.info(
            "attached",
            epoch=request.epoch,
            scheduler_id=request.scheduler_id,
            num_held_rows=len(attachment.holdings.rows),
        )
        # Read again, because the previous scheduler may have resized the pool
        info, _ = self._loaded()
        return worker_pb2.AttachResponse(
            worker=worker_info_to_proto(info), former_epoch=former_epoch
        )

    async def ReadHoldings(  # noqa: N802 - the proto's name
        self, request: worker_pb2.ReadHoldingsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Stream the rows and blocks that the worker held when the scheduler attached."""
        self._loaded()
        attachment = self._attachments.of(request.epoch)
        if attachment.holdings is None:
            raise FailedPreconditionError(
                f"epoch {request.epoch} has sent a step, or has not finished attaching;"
                " ReadHoldings must come between the two"
            )
        for part in holdings_to_parts(attachment.holdings):
            self._attachments.require_newest(attachment)
            await context.write(part)

    # This method writes instead of yielding. If the scheduler leaves while a generator waits at a
    # `yield`, the generator is closed only when it is garbage-collected; until then its stream
    # would count as open.
    async def Execute(  # noqa: N802 - the proto's name
        self,
        request_iterator: AsyncIterator[worker_pb2.StepBatch],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Execute the batches in order, and answer each with its result."""
        execution = self._executions.begin(self._attachments.newest)
        reader = asyncio.create_task(self._read(request_iterator, execution))
        try:
            async for output in execution.results.results():
                assert execution.attachment is not None, "results exist only after a batch"
                execution.attachment.done_step_id = output.step_id
                with timeline.span("encode the result"):
                    message = result_to_proto(output, execution.attachment.epoch)
                await context.write(message)
        finally:
            reader.cancel()
            self._executions.end(execution)

    async def DescribeDevice(  # noqa: N802 - the proto's name
        self,
        request: worker_pb2.DescribeDeviceRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> worker_pb2.DescribeDeviceResponse:
        """Describe the device and its state. This works while the worker drains, too."""
        del context
        if self._info is None and not self._is_unloaded:
            raise _still_loading()
        newest = self._attachments.newest
        attachment = newest or Attachment(number=0, epoch=0)
        self._attachments.on_heartbeat(request.epoch, is_cut_off=request.is_cut_off)
        return worker_pb2.DescribeDeviceResponse(
            worker=None if self._info is None else worker_info_to_proto(self._info),
            epoch=attachment.epoch,
            step_id=attachment.done_step_id,
            num_rows_used=0 if self._steps is None else self._steps.num_rows_used,
            has_scheduler=newest is not None
            and (self._is_unloaded or newest.num_open_streams != 0),
            memory_level=memory_level_to_proto(
                None if self._memory is None else self._memory.level
            ),
            is_unloaded=self._is_unloaded,
            num_heartbeats=self._attachments.num_heartbeats,
            is_cut_off=self._attachments.is_cut_off,
        )

    async def ReadKv(  # noqa: N802 - the proto's name
        self, request: worker_pb2.ReadKvRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        info, steps = self._loaded()
        _require_whole_blocks(info)
        # The instance is checked first, because another worker may run at this address by now. That
        # worker's epoch and format would match, as all workers of a scheduler have the same ones.
        if request.instance_id != info.instance_id:
            raise FailedPreconditionError(
                f"KV is requested from worker instance {request.instance_id:#x}; "
                f"this is {info.worker_id}, instance {info.instance_id:#x}"
            )
        attachment = self._attachments.of(request.epoch)
        if request.kv_format != info.kv_format:
            raise FailedPreconditionError(
                f"KV is requested as {request.kv_format}; this worker has {info.kv_format}"
            )
        block_ids = host_blocks_to_read(request, info.limits)
        transfer = self._transfer if request.transfer == worker_pb2.KV_TRANSFER_NIXL else None
        block_bytes = info.host_block_bytes or info.block_bytes
        async with contextlib.aclosing(read_kv(steps, block_ids, block_bytes, transfer)) as pieces:
            async for piece in pieces:
                self._attachments.require_newest(attachment)
                await context.write(piece)

    async def PullKv(  # noqa: N802 - the proto's name
        self, request: worker_pb2.PullKvRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PullKvResponse:
        """Fill host blocks with contents of another worker's host blocks."""
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
            transfer=self._transfer,
        )
        return worker_pb2.PullKvResponse()

    async def StoreKv(  # noqa: N802 - the proto's name
        self, request: worker_pb2.StoreKvRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.StoreKvResponse:
        """Begin to store host blocks in the far tier."""
        del context
        info, steps = self._loaded()
        far = self._far_store(info)
        attachment = self._attachments.of(request.epoch)
        block_ids, labels = blocks_and_labels(request, info.limits)
        num_blocks = await store_far(
            steps,
            far,
            block_ids,
            labels,
            check=lambda: self._attachments.require_newest(attachment),
        )
        return worker_pb2.StoreKvResponse(num_blocks=num_blocks)

    async def FetchKv(  # noqa: N802 - the proto's name
        self, request: worker_pb2.FetchKvRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.FetchKvResponse:
        """Fill host blocks from the far tier."""
        del context
        info, steps = self._loaded()
        far = self._far_store(info)
        attachment = self._attachments.of(request.epoch)
        block_ids, labels = blocks_and_labels(request, info.limits)
        num_blocks = await fetch_far(
            steps,
            far,
            block_ids,
            labels,
            info.host_block_bytes or info.block_bytes,
            check=lambda: self._attachments.require_newest(attachment),
        )
        return worker_pb2.FetchKvResponse(num_blocks=num_blocks)

    async def ResizePool(  # noqa: N802 - the proto's name
        self, request: worker_pb2.ResizePoolRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ResizePoolResponse:
        del context
        info, steps = self._loaded()
        self._attachments.of(request.epoch)
        if (most := info.max_num_blocks) is None:
            raise UnimplementedError(f"the number of blocks of {info.worker_id} is fixed")
        if not (least := info.min_num_blocks) <= request.num_blocks <= most:
            raise InvalidArgumentError(
                "num_blocks", f"is {request.num_blocks}; it must be in [{least}, {most}]"
            )
        # The resize continues if the caller leaves, because `_info` must match the pool.
        resized = steps.resize_pool(request.num_blocks)
        self._resizing = asyncio.create_task(self._resize(resized, request.num_blocks))
        await asyncio.shield(self._resizing)
        return worker_pb2.ResizePoolResponse()

    async def _resize(self, resized: Awaitable[None], num_blocks: int) -> None:
        await resized
        assert self._info is not None, "the model was loaded"
        before = self._info.limits.num_blocks
        limits = replace(self._info.limits, num_blocks=num_blocks)
        self._info = replace(self._info, limits=limits)
        metrics.KV_BYTES.set(num_blocks * self._info.block_bytes)
        _log.info("resized", num_blocks=num_blocks, num_blocks_before=before)

    async def AwaitDrain(  # noqa: N802 - the proto's name
        self, request: worker_pb2.AwaitDrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AwaitDrainResponse:
        del request, context
        self._num_awaiting_drain += 1
        try:
            await self._is_leaving.wait()
        finally:
            self._num_awaiting_drain -= 1
        return worker_pb2.AwaitDrainResponse()

    async def _read(
        self, batches: AsyncIterator[worker_pb2.StepBatch], execution: Execution
    ) -> None:
        """Read batches until the stream ends, or until a batch is refused."""
        try:
            async for batch in batches:
                await execution.results.wait_for_room()
                execution.results.owe(self._submit(batch, execution))
        except Exception as error:  # noqa: BLE001 - the handler raises it, after the results
            execution.results.end(error)
        else:
            execution.results.end()

    def _submit(
        self, batch: worker_pb2.StepBatch, execution: Execution
    ) -> "asyncio.Future[Result]":
        """Check a batch and submit it."""
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
        self._attachments.num_heartbeats += 1
        newest.last_step_id = batch.step_id
        newest.holdings = None
        with timeline.span("decode the batch"):
            plan = plan_of(batch, info.limits)
        return steps.submit(newest.number, plan)

    def _far_store(self, info: WorkerInfo) -> "FarStore":
        if self._far is None:
            raise UnimplementedError(f"{info.worker_id} has no far tier (--far-kv-url)")
        return self._far

    @property
    def _newest_epoch(self) -> int:
        newest = self._attachments.newest
        return 0 if newest is None else newest.epoch

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
            f"{info.worker_id} does not transfer KV: each block is split over several devices"
        )


def _unloaded() -> QuireError:
    return UnavailableError("the model is unloaded")


def _still_loading() -> QuireError:
    return UnavailableError("the model is still being loaded")
