"""A worker behind its socket, and a scheduler that sends arbitrary batches."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator

import grpc.aio
import torch
from hypothesis import strategies as st

from contract.codec.packing import unpack_int32
from contract.info import WorkerInfo
from contract.worker_limits import Limits
from gpu_worker.service.api import WorkerService
from gpu_worker.step.executor import Executor
from gpu_worker.step_loop import StepLoop
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.status import ErrorInterceptor
from rpc.transport import DEFAULT_MAX_MESSAGE_MB, channel_options
from tests.fuzz import examples
from tests.fuzz.fuzzing import Case, Target
from tests.fuzz.live import Probe, as_is, in_event_loop
from tests.fuzz.messages import wire
from tests.unit.gpu_worker.fake_model import VOCAB_SIZE, FakeModel, FakePool, continue_greedily

_LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=32,
    max_num_batched_tokens=16,
    num_blocks=12,
    block_size=4,
    vocab_size=VOCAB_SIZE,
)
_INFO = WorkerInfo("w0", "cpu", "fake", _LIMITS, (96,), 64, "float32")
_PROMPT = [5, 6, 7]
_REFUSALS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,  # a stale epoch
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,  # a batch that contradicts the steps before it
}


class LiveWorker:
    """A worker's channel; each attachment has a newer epoch."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._execute = channel.stream_stream(
            "/quire.v1.WorkerService/Execute",
            request_serializer=as_is,
            response_deserializer=lambda data: data,
        )
        self._epoch = 0

    async def say(self, case: Case) -> None:
        await self._attach()
        call = self._execute()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for data in case:
                await call.write(_of_epoch(data, self._epoch))
            await call.done_writing()
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        code = await call.code()
        assert code in _REFUSALS, (code, await call.details())

    async def check_serves(self) -> None:
        """Check that it serves a new scheduler with the right token."""
        await self._attach()
        call = self._stub.Execute()
        batch = worker_pb2.StepBatch()
        batch.CopyFrom(examples.FIRST_BATCH)
        batch.epoch = self._epoch
        await call.write(batch)
        result = await call.read()
        token_ids = unpack_int32(result.sampled_token_ids, "sampled_token_ids").tolist()
        assert token_ids == continue_greedily(_PROMPT, 1)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF

    async def _attach(self) -> None:
        self._epoch += 1
        await self._stub.Attach(worker_pb2.AttachRequest(epoch=self._epoch))


def _of_epoch(data: bytes, epoch: int) -> bytes:
    """The batch with this epoch, if it has epoch 1; appended, because the last value counts."""
    with contextlib.suppress(Exception):
        if worker_pb2.StepBatch.FromString(data).epoch == 1:
            return data + worker_pb2.StepBatch(epoch=epoch).SerializeToString()
    return data


@contextlib.asynccontextmanager
async def _worker() -> AsyncIterator[Probe]:
    pool = FakePool(_LIMITS.num_blocks, _LIMITS.block_size)
    executor = Executor(FakeModel(), pool, _LIMITS, (), torch.device("cpu"))
    step_loop = StepLoop(executor, asyncio.get_running_loop())
    service = WorkerService()
    service.open(_INFO, step_loop)
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor()], options=channel_options(DEFAULT_MAX_MESSAGE_MB)
    )
    service.service().add(server)
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        server.add_insecure_port(f"unix:{folder}/w")
        await server.start()
        async with open_channel(f"unix:{folder}/w") as channel:
            worker = LiveWorker(channel)

            async def probe(case: Case) -> None:
                await worker.say(case)
                await worker.check_serves()

            yield probe
        await server.stop(0)
        await step_loop.stop()


_CHANGED = wire(*examples.STEP_BATCHES)
_FIRST = st.just(examples.FIRST_BATCH.SerializeToString())

TARGETS = (
    Target(
        "worker-batches",
        st.builds(lambda first, rest: (*first, *rest), st.lists(_FIRST, max_size=1),
                  st.lists(_CHANGED, max_size=4)),
        lambda: in_event_loop(_worker()),
        worker_pb2.StepBatch,
        num_examples=25,
    ),
)  # fmt: skip
