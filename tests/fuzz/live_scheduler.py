"""A scheduler with a router and a worker that send arbitrary input, and a good one of each."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import grpc.aio
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st

from quire.v1 import kv_pb2, scheduler_pb2, worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.transport import DEFAULT_MAX_MESSAGE_MB, channel_options
from tests.fuzz import examples
from tests.fuzz.fuzzing import Case, Target
from tests.fuzz.live import Probe, as_is, in_event_loop, status_of
from tests.fuzz.messages import wire
from tests.unit.scheduler_svc.scheduler_fake_worker import FakeWorker, expected_tokens
from tests.unit.scheduler_svc.scheduler_harness import (
    FakeRouter,
    RunningScheduler,
    running_scheduler,
)

_PROMPT, _NUM_TOKENS = [3, 1, 4], 4


class HonestRouter:
    """A well-behaved router, on a stream of its own."""

    def __init__(self, scheduler: RunningScheduler) -> None:
        self._scheduler = scheduler
        self._router = FakeRouter(scheduler.target)
        self._next_key = 1

    async def __aenter__(self) -> Self:
        await self._router.connect("honest")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._router.disconnect()

    async def check_served(self) -> None:
        """Check that a request gets its tokens."""
        key = await self.check_answered()
        assert key not in self._router.refused, self._router.refused[key]
        assert self._router.tokens[key] == expected_tokens(_PROMPT, _NUM_TOKENS)

    async def check_answered(self) -> int:
        """Check that a request ends or is refused, with any tokens; return the sequence's key."""
        if self._scheduler.task.done():
            self._scheduler.task.result()
        key, self._next_key = self._next_key, self._next_key + 1
        await self._router.submit(key, _PROMPT, max_tokens=_NUM_TOKENS)
        await self._router.read_until(
            lambda: key in self._router.finished or key in self._router.refused
        )
        return key


@contextlib.asynccontextmanager
async def _routers() -> AsyncIterator[Probe]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        folder = Path(name)
        worker = await FakeWorker(f"unix:{folder}/w0").start()
        async with (
            running_scheduler(folder, [worker.target], drain_s=0, resume_grace_s=1) as scheduler,
            open_channel(scheduler.target) as channel,
            HonestRouter(scheduler) as honest,
        ):
            path = "/quire.v1.SchedulerService/Connect"

            async def probe(case: Case) -> None:
                call = channel.stream_stream(
                    path, request_serializer=as_is, response_deserializer=lambda data: data
                )()
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    for data in case:
                        await call.write(data)
                    await call.done_writing()
                await status_of(call)
                await honest.check_served()

            yield probe
        await worker.die()


class ScriptedWorker(FakeWorker):
    """A worker; its script replaces the next results."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.script: list[bytes] = []

    async def start(self) -> "ScriptedWorker":
        self._server = grpc.aio.server(options=channel_options(DEFAULT_MAX_MESSAGE_MB))
        execute = grpc.stream_stream_rpc_method_handler(
            self.Execute, worker_pb2.StepBatch.FromString, as_is
        )
        handler = grpc.method_handlers_generic_handler(
            "quire.v1.WorkerService", {"Execute": execute}
        )
        # gRPC finds this handler before the servicer's
        self._server.add_generic_rpc_handlers([handler])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.target)
        await self._server.start()
        return self

    def execute(self, batch: worker_pb2.StepBatch) -> Any:
        result = super().execute(batch)
        return _merged(self.script.pop(0), result) if self.script else result


def _merged(data: bytes, result: worker_pb2.StepResult) -> bytes | Message:
    """The result of the current step, with the fields that the case sets."""
    try:
        said = worker_pb2.StepResult.FromString(data)
    except DecodeError:
        return data
    for field, value in said.ListFields():
        if field.name in ("epoch", "step_id") and value == 1:
            continue
        result.ClearField(field.name)
        if field.is_repeated:
            getattr(result, field.name).extend(value)
        else:
            setattr(result, field.name, value)
    return result


@contextlib.asynccontextmanager
async def _results() -> AsyncIterator[Probe]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        folder = Path(name)
        worker = await ScriptedWorker(f"unix:{folder}/w0").start()
        async with (
            running_scheduler(folder, [worker.target], drain_s=0, step_timeout_s=5) as scheduler,
            HonestRouter(scheduler) as honest,
        ):

            async def probe(case: Case) -> None:
                worker.script = list(case)
                await honest.check_answered()
                worker.script = []
                await honest.check_served()

            yield probe
        await worker.die()


@contextlib.asynccontextmanager
async def _method(name: str) -> AsyncIterator[Probe]:
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        worker = await FakeWorker(f"unix:{folder}/w0").start()
        async with (
            running_scheduler(Path(folder), [worker.target], drain_s=0) as scheduler,
            open_channel(scheduler.target) as channel,
            HonestRouter(scheduler) as honest,
        ):
            call = channel.unary_unary(
                f"/quire.v1.SchedulerService/{name}", request_serializer=as_is
            )

            async def probe(case: Case) -> None:
                for data in case:
                    await status_of(call(data, timeout=5))
                await honest.check_served()

            yield probe
        await worker.die()


_HELLO = scheduler_pb2.ConnectRequest(hello=scheduler_pb2.RouterHello(router_id="r"))
_REQUESTS = wire(*examples.CONNECT_REQUESTS)
_STREAMS = st.builds(
    lambda first, rest: (first, *rest),
    st.just(_HELLO.SerializeToString()) | st.just(_HELLO.SerializeToString()) | _REQUESTS,
    st.lists(_REQUESTS, max_size=5),
)

TARGETS = (
    Target(
        "scheduler-stream",
        _STREAMS,
        lambda: in_event_loop(_routers()),
        scheduler_pb2.ConnectRequest,
        num_examples=25,
    ),
    Target(
        "scheduler-results",
        st.lists(wire(*examples.STEP_RESULTS), min_size=1, max_size=3).map(tuple),
        lambda: in_event_loop(_results()),
        worker_pb2.StepResult,
        num_examples=4,  # a lost link takes a tenth of a second to reconnect
    ),
    Target(
        "scheduler-kv",
        st.tuples(
            wire(scheduler_pb2.DescribeSchedulerKvRequest(query=kv_pb2.KvQuery(block_tables=True)))
        ),
        lambda: in_event_loop(_method("DescribeSchedulerKv")),
        scheduler_pb2.DescribeSchedulerKvRequest,
        num_examples=15,
    ),
    Target(
        "scheduler-migrate",
        st.tuples(wire(scheduler_pb2.MigrateRequest(request_id="request-1", worker="w"))),
        lambda: in_event_loop(_method("Migrate")),
        scheduler_pb2.MigrateRequest,
        num_examples=15,
    ),
)
