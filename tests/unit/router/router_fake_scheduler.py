"""A fake scheduler: a real server of `SchedulerService` that a test controls."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import grpc
import grpc.aio
import numpy as np

from contract.codec.packing import pack_int32, pack_uint64
from contract.liveness.heartbeat import BEAT_S
from quire.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    common_pb2,
    kv_pb2,
    kv_pb2_grpc,
    loading_pb2,
    loading_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from rpc.transport import DEFAULT_MAX_MESSAGE_MB, channel_options

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
ERROR = common_pb2.FINISH_REASON_ERROR

VOCAB_SIZE = 500
MAX_MODEL_LEN = 64
EOS = 1


def adapter(name):
    return common_pb2.LoraAdapter(name=name, digest=(name.encode() * 32)[:32])


class FakeLoading(loading_pb2_grpc.LoadingServiceServicer):
    """A fake `LoadingService` for the scheduler's worker, "w"."""

    def __init__(self):
        self.is_unloaded = False
        self.directory = ""
        self.may_unload = asyncio.Event()
        self.may_unload.set()

    async def Unload(self, request, context):  # noqa: N802
        if request.worker not in ("", "w"):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"worker {request.worker!r} is unknown")
        await self.may_unload.wait()
        was_unloaded, self.is_unloaded = self.is_unloaded, True
        unloaded = loading_pb2.UnloadedWorker(worker="w", was_unloaded=was_unloaded)
        return loading_pb2.UnloadResponse(workers=[unloaded])

    async def Load(self, request, context):  # noqa: N802
        if request.worker not in ("", "w"):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"worker {request.worker!r} is unknown")
        yield loading_pb2.LoadResponse(worker="w", status="loading weights", progress=0.5)
        if request.directory == "/nothing":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "there is no memory")
        was_loaded, self.is_unloaded = not self.is_unloaded, False
        self.directory = request.directory
        yield loading_pb2.LoadResponse(worker="w", is_done=True, was_loaded=was_loaded)


class FakeKvEvents(kv_pb2_grpc.KvEventServiceServicer):
    """Sends the messages that a test puts into `messages`."""

    def __init__(self):
        self.messages = asyncio.Queue()

    async def WatchKv(self, request, context):  # noqa: N802, ARG002
        while (message := await self.messages.get()) is not None:
            await context.write(message)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler has ended")


class _Stream:
    """A router's stream. It writes one message at a time, as gRPC demands."""

    def __init__(self, context):
        self._context = context
        self._lock = asyncio.Lock()

    async def write(self, message):
        async with self._lock:
            await self._context.write(message)


_EPOCHS = itertools.count(1)


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Records the router's messages, and sends the messages that a test asks for."""

    model_fields: Mapping[str, object] = {}
    """More fields of its `ModelInfo`."""

    def __init__(self, path):
        self.target = f"unix:{path}"
        self.submits = asyncio.Queue()
        self.cancels = asyncio.Queue()
        self.resumes = asyncio.Queue()
        self.leaves = asyncio.Queue()
        self.unpins = asyncio.Queue()
        self.routers = asyncio.Queue()
        self.model_id = "weights"
        self.vocab_size = VOCAB_SIZE
        self.adapters = ()
        """Names of adapters; a digest repeats the name."""
        self.model_directory = ""
        """The directory of a model that an operator has loaded."""
        self.loading = FakeLoading()
        self.kv_events = None
        """A `FakeKvEvents`; None: the scheduler has no such service."""
        self.bad_directory = None
        """A directory without an adapter."""
        self.changes = asyncio.Queue()
        """Changes of `adapters`."""
        self.may_announce = asyncio.Event()
        """Whether an unloaded adapter is announced; set at the start."""
        self.may_announce.set()
        self.unloaded = asyncio.Event()
        """Set when an adapter has been unloaded."""
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.resume_grace_s = 60.0
        self.wants_heartbeats = True
        self.heartbeats = asyncio.Queue()
        """One entry for each heartbeat of a router."""
        self.epoch = 0
        """The epoch of the last welcome."""
        self.superseded_epochs = ()
        self.max_waiting = 0
        """Adapters that the scheduler does not know."""
        self.load = common_pb2.Load(num_blocks=7, num_workers=1)
        self._step_ids = itertools.count(1)
        self._stream = None
        self._server = None
        self.knows_model = asyncio.Event()
        self.knows_model.set()
        self.num_load_calls = 0
        self.asked = asyncio.Event()
        """Set when a caller has asked for the load."""
        self.lives = asyncio.Event()
        self.lives.set()

    async def start(self):
        # The same options as a scheduler's: with gRPC's defaults, pings would end a connection.
        self._server = grpc.aio.server(options=channel_options(DEFAULT_MAX_MESSAGE_MB))
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(self, self._server)
        loading_pb2_grpc.add_LoadingServiceServicer_to_server(self.loading, self._server)
        if self.kv_events is not None:
            kv_pb2_grpc.add_KvEventServiceServicer_to_server(self.kv_events, self._server)
        self._server.add_insecure_port(self.target)
        await self._server.start()

    async def stop(self):
        """Breaks all streams, as if the scheduler were killed."""
        await self._server.stop(0)

    async def Connect(self, request_iterator, context):  # noqa: N802
        stream = _Stream(context)
        beats = asyncio.create_task(self._beat(stream))
        try:
            await self._obey(request_iterator, stream)
        finally:
            beats.cancel()

    async def _beat(self, stream):
        while True:
            await asyncio.sleep(BEAT_S)
            await self.lives.wait()
            if self._stream is stream:
                await stream.write(scheduler_pb2.ConnectResponse(step=scheduler_pb2.StepOutput()))

    async def _obey(self, request_iterator, stream):
        async for request in request_iterator:
            match request.WhichOneof("message"):
                case "hello":
                    await self.knows_model.wait()
                    await stream.write(self._welcome())
                    self._stream = stream
                    self.routers.put_nowait(request.hello.router_id)
                case "submit":
                    self.submits.put_nowait(request.submit)
                case "resume":
                    self.resumes.put_nowait(request.resume)
                case "leave":
                    self.leaves.put_nowait(list(request.leave.seq_keys))
                case "unpin":
                    self.unpins.put_nowait((request.unpin.tenant, request.unpin.request_id))
                case "cancel":
                    self.cancels.put_nowait(list(request.cancel.seq_keys))
                case "heartbeat":
                    self.heartbeats.put_nowait(None)

    async def GetSchedulerLoad(self, request, context):  # noqa: N802, ARG002
        await self.lives.wait()
        self.num_load_calls += 1
        self.asked.set()
        return scheduler_pb2.GetSchedulerLoadResponse(load=self.load)

    async def DescribeSchedulerKv(self, request, context):  # noqa: N802
        if request.query.worker == "nowhere":
            await context.abort(grpc.StatusCode.NOT_FOUND, "worker 'nowhere' is not one of mine")
        worker = kv_pb2.WorkerKv(worker="w", block_size=request.query.first_block)
        return scheduler_pb2.DescribeSchedulerKvResponse(workers=[worker])

    async def DescribeSchedulerActivity(self, request, context):  # noqa: N802, ARG002
        step = common_pb2.StepRecord(step_id=request.query.after_step_id + 1, num_decode_tokens=2)
        worker = common_pb2.WorkerActivity(worker="w", num_steps=9, load=self.load, steps=[step])
        return scheduler_pb2.DescribeSchedulerActivityResponse(workers=[worker])

    def _welcome(self):
        model = common_pb2.ModelInfo(
            id=self.model_id,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=self.vocab_size,
            eos_token_ids=[EOS],
            adapters=map(adapter, self.adapters),
            directory=self.model_directory,
            **self.model_fields,
        )
        self.epoch = next(_EPOCHS)
        welcome = scheduler_pb2.SchedulerWelcome(
            epoch=self.epoch,
            model=model,
            resume_grace_s=self.resume_grace_s,
            superseded_epochs=self.superseded_epochs,
            max_waiting=self.max_waiting,
            wants_heartbeats=self.wants_heartbeats,
        )
        return scheduler_pb2.ConnectResponse(welcome=welcome)

    async def step(
        self,
        tokens: Mapping[int, Sequence[int]] | None = None,
        *,
        finished: Mapping[int, int] | None = None,
        stop_token_id: int | None = None,
        error: common_pb2.OutputError | None = None,
        admitted: Mapping[int, int] | None = None,
        pinned: Mapping[int, int] | None = None,
        logprobs: Sequence[common_pb2.TokenLogprob] = (),
        cumulative_logprob: float | None = None,
        vectors: Mapping[int, Sequence[float]] | None = None,
        prompt_logprobs: Mapping[int, Sequence[float]] | None = None,
    ):
        """Sends the events of one step: new tokens, ends and cached tokens, by sequence key."""
        pairs = [(key, token) for key, ids in (tokens or {}).items() for token in ids]
        step = scheduler_pb2.StepOutput(
            step_id=next(self._step_ids),
            seq_keys=pack_uint64([key for key, _ in pairs]),
            token_ids=pack_int32([token for _, token in pairs]),
            logprobs=[
                scheduler_pb2.IndexedLogprob(index=i, logprob=logprob)
                for i, logprob in enumerate(logprobs)
            ],
            prompt_logprobs=[
                scheduler_pb2.SequencePromptLogprobs(
                    seq_key=key,
                    position=1,
                    logprobs=[common_pb2.TokenLogprob(logprob=value) for value in values],
                )
                for key, values in (prompt_logprobs or {}).items()
            ],
            admitted=[
                scheduler_pb2.SequenceAdmitted(seq_key=key, num_cached_tokens=cached)
                for key, cached in (admitted or {}).items()
            ],
            pooled=[
                scheduler_pb2.SequencePooled(seq_key=key, vector=np.array(v, "<f4").tobytes())
                for key, v in (vectors or {}).items()
            ],
            pinned=[
                scheduler_pb2.SequencePinned(seq_key=key, num_pinned_tokens=count)
                for key, count in (pinned or {}).items()
            ],
            finished=[
                scheduler_pb2.SequenceFinished(
                    seq_key=key,
                    finish_reason=reason,
                    stop_token_id=stop_token_id,
                    error=error,
                    cumulative_logprob=cumulative_logprob,
                )
                for key, reason in (finished or {}).items()
            ],
        )
        await self._stream.write(scheduler_pb2.ConnectResponse(step=step))

    async def send_room(self, num_sequences=None):
        """Sends the room of the queues, in sequences; None: the router need not count."""
        room = scheduler_pb2.QueueRoom(num_sequences=num_sequences)
        step = scheduler_pb2.StepOutput(room=room)
        await self._stream.write(scheduler_pb2.ConnectResponse(step=step))

    async def send_max_model_len(self, max_model_len):
        """Sends the most tokens that a request may have from now on."""
        step = scheduler_pb2.StepOutput(max_model_len=max_model_len)
        await self._stream.write(scheduler_pb2.ConnectResponse(step=step))

    async def send_unloaded(self, is_unloaded):
        """Sends whether all workers are unloaded."""
        step = scheduler_pb2.StepOutput(is_unloaded=is_unloaded)
        await self._stream.write(scheduler_pb2.ConnectResponse(step=step))

    async def send_adapters(self, *names):
        """Sends the adapters that requests may use from now on."""
        self.adapters = names
        self.changes.put_nowait(names)
        served = scheduler_pb2.ServedAdapters(adapters=map(adapter, names))
        step = scheduler_pb2.StepOutput(adapters=served)
        await self._stream.write(scheduler_pb2.ConnectResponse(step=step))

    async def LoadAdapter(self, request, context):  # noqa: N802
        await self.may_load.wait()
        if request.directory == self.bad_directory:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "directory is bad")
        was_there = request.name in self.adapters
        if not was_there:
            await self.send_adapters(*self.adapters, request.name)
        return adapters_pb2.LoadAdapterResponse(adapter=adapter(request.name), was_there=was_there)

    async def UnloadAdapter(self, request, context):  # noqa: N802
        if request.name not in self.adapters:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.name!r} is not loaded")
        self.adapters = tuple(name for name in self.adapters if name != request.name)
        self.unloaded.set()
        self._announcing = asyncio.create_task(self._announce())
        return adapters_pb2.UnloadAdapterResponse()

    async def _announce(self):
        await self.may_announce.wait()
        await self.send_adapters(*self.adapters)

    async def ListAdapters(self, request, context):  # noqa: N802, ARG002
        return adapters_pb2.ListAdaptersResponse(
            adapters=[adapters_pb2.LoadedAdapter(adapter=adapter(name)) for name in self.adapters]
        )

    async def resumed(self, submit, first_seq_key, so_far=None):
        """Sends `resumed` for a request that was submitted before; `so_far` is a StepOutput."""
        resumed = scheduler_pb2.Resumed(submit=submit, so_far=so_far)
        resumed.submit.first_seq_key = first_seq_key
        await self._stream.write(scheduler_pb2.ConnectResponse(resumed=resumed))

    async def refuse(self, first_seq_key, code, message, retry_after_s=None):
        refused = scheduler_pb2.Refused(
            first_seq_key=first_seq_key,
            code=code.value[0],
            message=message,
            retry_after_s=retry_after_s,
        )
        await self._stream.write(scheduler_pb2.ConnectResponse(refused=refused))
