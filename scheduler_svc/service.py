"""The gRPC service `SchedulerService`: routers' streams, and operators' calls."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import grpc.aio
import structlog

from contract.errors import InvalidArgumentError, NotFoundError, QuireError, TooBusyError
from contract.info import ModelInfo
from contract.liveness.heartbeat import BEAT_S
from contract.request import MAX_N
from quire.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from rpc.grpc_server import Service, service_of
from scheduler_svc.core.reports.describe import describe
from scheduler_svc.domain import live_seq_keys
from scheduler_svc.operations.migration import Migrator
from scheduler_svc.operations.resizing import Resizer
from scheduler_svc.routers.fan_out import QueueRoomReporter, RouterStreams
from scheduler_svc.routers.stream import RouterStream
from scheduler_svc.wire.reports import (
    activity_to_proto,
    check_activity_query,
    kv_query_from_proto,
    kv_to_proto,
    load_to_proto,
)
from scheduler_svc.wire.request import check_keys, request_from_proto
from scheduler_svc.wire.router import refused_to_proto, welcome_to_proto
from scheduler_svc.workers.fleet import Fleet

_PROGRESS_S = 0.25
"""Seconds between two reports of the progress of a resize."""
_EXPIRE_S = 0.5
"""Seconds between two checks for resumable requests that no client has resumed in time."""

log = structlog.get_logger()


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers the calls of `quire.v1.SchedulerService`."""

    def __init__(
        self,
        fleet: Fleet,
        streams: RouterStreams,
        migrator: Migrator,
        resizer: Resizer,
        queue_room: QueueRoomReporter,
        epoch: int,
    ) -> None:
        self._fleet = fleet
        self._streams = streams
        self._resumables = streams.resumables
        self._migrator = migrator
        self._queue_room = queue_room
        self._resizer = resizer
        self._epoch = epoch

    async def expire_resumable(self) -> None:
        """Until cancelled, end each resumable request that no client has resumed in time."""
        while True:
            await asyncio.sleep(_EXPIRE_S)
            for source, seq_keys in self._resumables.expire(time.monotonic()):
                self._fleet.cancel(source, seq_keys)

    async def send_heartbeats(self) -> None:
        """Until cancelled, send heartbeats to routers.

        Also send the model's `max_model_len` and `Roster.is_unloaded` whenever they have changed.
        """
        while True:
            await asyncio.sleep(BEAT_S)
            if (model := self._fleet.model_now()) is not None:
                self._streams.publish_max_model_len(model.max_model_len)
            self._streams.publish_unloaded(is_unloaded=self._fleet.roster.is_unloaded)
            self._streams.send_heartbeats()

    # This method writes instead of yielding. If the router leaves while a generator waits at a
    # `yield`, the generator is closed only when it is garbage-collected; its sequences would run
    # until then.
    async def Connect(  # noqa: N802
        self,
        requests: AsyncIterator[scheduler_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        """Serve one router until its stream ends."""
        router_id = await _read_hello(requests)
        model = await self._fleet.model()
        stream = self._streams.open(router_id, model.max_model_len)
        log.info("router connected", router_id=router_id, source=stream.source)
        reader = asyncio.create_task(self._read(requests, stream, model))
        try:
            await context.write(
                welcome_to_proto(
                    self._epoch,
                    model,
                    self._resumables.grace_s,
                    self._fleet.superseded_epochs - {0, self._epoch},
                    self._fleet.max_waiting,
                )
            )
            while (message := await stream.next_message()) is not None:
                await context.write(message)
        finally:
            reader.cancel()
            self._streams.close(stream)
            self._drop(stream)
            self._fleet.on_router_left()
            log.info("router disconnected", router_id=router_id, source=stream.source)

    async def GetSchedulerLoad(  # noqa: N802
        self,
        request: scheduler_pb2.GetSchedulerLoadRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> scheduler_pb2.GetSchedulerLoadResponse:
        """Return the sum of the workers' loads."""
        roster = self._fleet.roster
        loads = [load for load in roster.loads().values() if load is not None]
        return scheduler_pb2.GetSchedulerLoadResponse(
            load=load_to_proto(
                loads,
                self._fleet.num_unplaced_seqs,
                roster.spaces().values(),
                num_unloaded_workers=len(roster.unloaded()),
            )
        )

    async def Defragment(  # noqa: N802
        self,
        request: scheduler_pb2.DefragmentRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> scheduler_pb2.DefragmentResponse:
        """Defragment the blocks of every worker."""
        return scheduler_pb2.DefragmentResponse(
            workers=[
                scheduler_pb2.WorkerDefragmentation(
                    worker=worker,
                    rate_before=report.before.rate,
                    rate_after=report.after.rate,
                    num_moved_blocks=report.num_moved_blocks,
                )
                for worker, report in (await self._fleet.defragment()).items()
            ]
        )

    async def DescribeSchedulerKv(  # noqa: N802
        self,
        request: scheduler_pb2.DescribeSchedulerKvRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> scheduler_pb2.DescribeSchedulerKvResponse:
        """Describe which sequences hold which blocks, worker by worker."""
        query = kv_query_from_proto(request.query)
        sessions = self._fleet.roster.attached(request.query.worker)
        return scheduler_pb2.DescribeSchedulerKvResponse(
            workers=[
                kv_to_proto(worker, session.call(lambda core: describe(core, query)))
                for worker, session in sessions.items()
            ]
        )

    async def DescribeSchedulerActivity(  # noqa: N802
        self,
        request: scheduler_pb2.DescribeSchedulerActivityRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> scheduler_pb2.DescribeSchedulerActivityResponse:
        """Describe what each worker is doing."""
        check_activity_query(request.query)
        roster, wanted = self._fleet.roster, request.query.worker
        unloaded = roster.unloaded(wanted)
        sessions = roster.attached(wanted) if not (wanted and unloaded) else {}
        busy = [
            activity_to_proto(worker, it.step_log, it.load(), it.space(), request.query)
            for worker, it in sessions.items()
        ]
        idle = (common_pb2.WorkerActivity(worker=each, is_unloaded=True) for each in unloaded)
        return scheduler_pb2.DescribeSchedulerActivityResponse(workers=[*busy, *idle])

    async def Migrate(  # noqa: N802
        self,
        request: scheduler_pb2.MigrateRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> scheduler_pb2.MigrateResponse:
        """Move a live request with its KV to another worker."""
        for field in ("request_id", "worker"):
            if not getattr(request, field):
                raise InvalidArgumentError(field, "is empty")
        moved = await self._migrator.migrate(request.request_id, request.worker)
        return scheduler_pb2.MigrateResponse(
            from_worker=moved.from_worker,
            num_sequences=moved.num_seqs,
            num_blocks=moved.num_blocks,
            was_there=moved.was_there,
        )

    async def ResizeKv(  # noqa: N802
        self,
        request: scheduler_pb2.ResizeKvRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        """Resize a worker's KV pool, and stream the progress."""
        resize = self._resizer.begin(request)
        while not resize.task.done():
            await context.write(resize.progress())
            await asyncio.wait([resize.task], timeout=_PROGRESS_S)
        await resize.task
        await context.write(resize.progress())

    async def _read(
        self,
        requests: AsyncIterator[scheduler_pb2.ConnectRequest],
        stream: RouterStream,
        model: ModelInfo,
    ) -> None:
        """Handle the router's messages until no more come; then end `stream`."""
        try:
            async for message in requests:
                if stream.has_ended:  # later messages may refer to a former model
                    return
                stream.on_message()
                self._handle(message, stream, model)
        except Exception as error:  # noqa: BLE001 - `Connect` raises it again, for the log
            stream.end(error)
        finally:
            stream.end()

    def _handle(
        self, message: scheduler_pb2.ConnectRequest, stream: RouterStream, model: ModelInfo
    ) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submit(message.submit, stream, model)
            case "cancel":
                self._cancel(message.cancel.seq_keys, stream)
            case "resume":
                self._resume(message.resume, stream)
            case "heartbeat":
                stream.on_heartbeat()
            case "leave":
                if not message.leave.seq_keys:
                    raise InvalidArgumentError("leave.seq_keys", "is empty; it must have 1 or more")
                if not self._resumables.leave(stream, message.leave.seq_keys[0], time.monotonic()):
                    self._cancel(message.leave.seq_keys, stream)
            case "unpin":
                self._fleet.unpin(message.unpin.tenant, message.unpin.request_id)
            case "hello":
                raise InvalidArgumentError("hello", "came twice; it must come once")
            case _:
                raise InvalidArgumentError("message", "is not set")

    def _submit(
        self, message: scheduler_pb2.Submit, stream: RouterStream, model: ModelInfo
    ) -> None:
        if message.sampling.HasField("adapter"):
            adapters = self._fleet.adapters
            # A request that was accepted before may continue with an adapter that is leaving.
            known = adapters.held if message.is_again else adapters.offered
            model = replace(model, adapters=known)
        try:
            request = request_from_proto(message, stream.source, model, time.monotonic())
            stream.claim(live_seq_keys(request))
        except (InvalidArgumentError, NotFoundError) as error:
            stream.refuse(refused_to_proto(message.first_seq_key, error))
            return
        try:
            if message.HasField("resume_record"):
                stale = self._resumables.add(request, message, stream)
                if stale is not None:
                    self._fleet.cancel(*stale)
            self._fleet.submit(request)
        except QuireError as error:
            self._streams.refuse(request, error)
            if isinstance(error, TooBusyError):
                self._queue_room.on_refusal()

    def _cancel(self, seq_keys: Iterable[int], stream: RouterStream) -> None:
        for source, keys in self._resumables.by_source(stream, seq_keys).items():
            self._fleet.cancel(source, keys)

    def _resume(self, message: scheduler_pb2.Resume, stream: RouterStream) -> None:
        try:
            check_keys(message.first_seq_key, MAX_N)
            self._resumables.resume(message, stream, time.monotonic())
        except QuireError as error:
            stream.refuse(refused_to_proto(message.first_seq_key, error))

    def _drop(self, stream: RouterStream) -> None:
        """Cancel the requests of a stream that has ended, except resumable ones."""
        seq_keys = self._resumables.leave_all(stream, time.monotonic())
        if seq_keys is None:
            self._fleet.drop_source(stream.source)
        elif seq_keys:
            self._fleet.cancel(stream.source, sorted(seq_keys))


def scheduler_service(servicer: SchedulerServicer) -> Service:
    return service_of(scheduler_pb2, scheduler_pb2_grpc, "SchedulerService", servicer)


async def _read_hello(requests: AsyncIterator[scheduler_pb2.ConnectRequest]) -> str:
    async for message in requests:
        if message.WhichOneof("message") != "hello":
            break
        return message.hello.router_id
    raise InvalidArgumentError("hello", "is missing; it must be the first message of the stream")
