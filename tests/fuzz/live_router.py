"""A router whose gRPC and HTTP clients send arbitrary input, with a scripted scheduler."""

import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc.aio
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st

from bench.faults import bodies
from contract.codec.packing import pack_int32, pack_uint64, unpack_uint64
from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc, kv_pb2, scheduler_pb2
from router.app import run_router
from router.settings import RouterSettings
from rpc.peers.channel import open_channel
from rpc.transport import DEFAULT_MAX_MESSAGE_MB, channel_options
from tests.fuzz import examples
from tests.fuzz.fuzzing import Case, Target
from tests.fuzz.http import raw_requests
from tests.fuzz.live import Probe, as_is, in_event_loop, status_of
from tests.fuzz.messages import wire
from tests.unit.router.router_tokenizers import byte_level_bpe

_VOCAB_SIZE, _MAX_MODEL_LEN, _TOKENS = 500, 64, (50, 51)
_CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_EXPECTED = inference_pb2.GenerateRequest(
    token_ids=inference_pb2.TokenIds(ids=[5]), sampling=common_pb2.SamplingParams(max_tokens=2)
)


class ScriptedScheduler:
    """Ends each request after two tokens; before that it sends its script, once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.script: Sequence[bytes] = ()
        self._server = grpc.aio.server(options=channel_options(DEFAULT_MAX_MESSAGE_MB))
        methods = {
            "Connect": grpc.stream_stream_rpc_method_handler(
                self._connect, scheduler_pb2.ConnectRequest.FromString, as_is
            ),
            "GetSchedulerLoad": grpc.unary_unary_rpc_method_handler(
                self._load, response_serializer=as_is
            ),
            "DescribeSchedulerKv": grpc.unary_unary_rpc_method_handler(
                self._describe, response_serializer=as_is
            ),
        }
        handler = grpc.method_handlers_generic_handler("quire.v1.SchedulerService", methods)
        self._server.add_generic_rpc_handlers([handler])
        self._server.add_insecure_port(target)

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def _connect(self, requests: Any, context: Any) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "hello":
                    model = common_pb2.ModelInfo(
                        id="weights", max_model_len=_MAX_MODEL_LEN, vocab_size=_VOCAB_SIZE,
                        eos_token_ids=[1], structured_output=True,
                    )  # fmt: skip
                    welcome = scheduler_pb2.SchedulerWelcome(epoch=1, model=model)
                    await context.write(scheduler_pb2.ConnectResponse(welcome=welcome))
                case "submit":
                    await self._send_script(context, request.submit.first_seq_key)
                    await context.write(_answer(request.submit))
                case "resume":
                    key = request.resume.first_seq_key
                    await self._send_script(context, key)
                    refused = scheduler_pb2.Refused(first_seq_key=key, code=5, message="no such")
                    await context.write(scheduler_pb2.ConnectResponse(refused=refused))
                    # requests that the script resumed end here
                    await context.write(_end(range(key, key + 64), ()))

    async def _send_script(self, context: Any, first_seq_key: int) -> None:
        script, self.script = self.script, ()
        for data in script:
            await context.write(_about(data, first_seq_key))

    async def _load(self, _request: bytes, _context: Any) -> bytes | Message:
        return scheduler_pb2.GetSchedulerLoadResponse(load=common_pb2.Load(num_blocks=7))

    async def _describe(self, _request: bytes, _context: Any) -> bytes | Message:
        return scheduler_pb2.DescribeSchedulerKvResponse(workers=[kv_pb2.WorkerKv(worker="w")])


def _answer(submit: scheduler_pb2.Submit) -> scheduler_pb2.ConnectResponse:
    num_left = submit.sampling.max_tokens
    return _end(
        range(submit.first_seq_key, submit.first_seq_key + submit.n), _TOKENS[: min(2, num_left)]
    )


def _end(seq_keys: range, token_ids: Sequence[int]) -> scheduler_pb2.ConnectResponse:
    step = scheduler_pb2.StepOutput(
        seq_keys=pack_uint64([key for key in seq_keys for _ in token_ids]),
        token_ids=pack_int32([*token_ids] * len(seq_keys)),
        finished=[
            scheduler_pb2.SequenceFinished(
                seq_key=key, finish_reason=common_pb2.FINISH_REASON_LENGTH
            )
            for key in seq_keys
        ],
    )
    return scheduler_pb2.ConnectResponse(step=step)


def _about(data: bytes, first_seq_key: int) -> bytes:
    """The message with the request's keys instead of 0, 1, 2, …; other bytes are unchanged."""
    try:
        message = scheduler_pb2.ConnectResponse.FromString(data)
    except DecodeError:
        return data

    def shift(key: int) -> int:
        return (key + first_seq_key) % 2**64

    steps = []
    match message.WhichOneof("message"):
        case "step":
            steps.append(message.step)
        case "refused":
            message.refused.first_seq_key = shift(message.refused.first_seq_key)
        case "resumed":
            submit = message.resumed.submit
            submit.first_seq_key = shift(submit.first_seq_key)
            if message.resumed.HasField("so_far"):
                steps.append(message.resumed.so_far)
    for step in steps:
        if len(step.seq_keys) % 8 == 0:
            keys = unpack_uint64(step.seq_keys, "").tolist()
            step.seq_keys = pack_uint64([shift(key) for key in keys])
        for field in ("admitted", "pinned", "finished", "prompt_logprobs"):
            for item in getattr(step, field):
                item.seq_key = shift(item.seq_key)
    return message.SerializeToString()


class LiveRouter:
    """A router, its scheduler, and a well-behaved client."""

    def __init__(
        self,
        scheduler: ScriptedScheduler,
        task: asyncio.Task[None],
        channel: grpc.aio.Channel,
        http: str,
    ) -> None:
        self.scheduler = scheduler
        self._task = task
        self.channel = channel
        self.http = http
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)

    def call(self, method: str, *, streams: bool) -> Any:
        """A method that takes and returns bytes."""
        path = f"/quire.v1.InferenceService/{method}"
        make = self.channel.unary_stream if streams else self.channel.unary_unary
        return make(path, request_serializer=as_is, response_deserializer=lambda data: data)

    async def check_serves(self) -> None:
        """Check that the router serves when its scheduler has reconnected."""
        self.scheduler.script = ()
        while True:
            if self._task.done():
                self._task.result()
            assert not self._task.done(), "the router has ended"
            try:
                outputs = (await self._generate()).outputs
                break
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
        assert [list(output.token_ids) for output in outputs] == [list(_TOKENS)], outputs

    async def _generate(self) -> inference_pb2.GenerateOnceResponse:
        request = inference_pb2.GenerateOnceRequest(request=_EXPECTED)
        return await self._stub.GenerateOnce(request)


@contextlib.asynccontextmanager
async def running_router() -> AsyncIterator[LiveRouter]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        folder = Path(name)
        byte_level_bpe().save(str(folder / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        settings = RouterSettings(
            model=folder,
            scheduler=f"unix:{folder}/s",
            uds=folder / "r",
            http_port=0,
            drain_s=1,
            tokenizer_threads=1,
        )
        started, stop = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def on_started(addresses: Any) -> None:
            started.set_result(addresses)

        async with ScriptedScheduler(settings.scheduler[0]) as scheduler:
            task = asyncio.create_task(run_router(settings, on_started=on_started, stop=stop))
            await asyncio.wait([started, task], return_when=asyncio.FIRST_COMPLETED)
            addresses = started.result()
            async with open_channel(addresses.grpc) as channel:
                router = LiveRouter(scheduler, task, channel, addresses.http)
                await router.check_serves()
                yield router
            stop.set()
            # a check has raised the error already
            await asyncio.gather(task, return_exceptions=True)


# --- targets -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _method(name: str, *, streams: bool) -> AsyncIterator[Probe]:
    async with running_router() as router:

        async def probe(case: Case) -> None:
            for data in case:
                await status_of(router.call(name, streams=streams)(data, timeout=5))
            await router.check_serves()

        yield probe


@contextlib.asynccontextmanager
async def _news() -> AsyncIterator[Probe]:
    generate = _EXPECTED.SerializeToString()
    resume = inference_pb2.ResumeRequest(request_id="r").SerializeToString()

    async with running_router() as router:

        async def probe(case: Case) -> None:
            for method, data in (("Generate", generate), ("Resume", resume)):
                router.scheduler.script = case
                await status_of(router.call(method, streams=True)(data, timeout=5))
                await router.check_serves()

        yield probe


@contextlib.asynccontextmanager
async def _http() -> AsyncIterator[Probe]:
    async with running_router() as router:
        host, port = router.http.rsplit(":", 1)

        async def probe(case: Case) -> None:
            for data in case:
                await _exchange(host, int(port), data)
            await router.check_serves()

        yield probe


@contextlib.asynccontextmanager
async def _worst_bodies() -> AsyncIterator[Probe]:
    async with running_router() as router:
        host, port = router.http.rsplit(":", 1)

        async def probe(case: Case) -> None:
            path, data = case
            if b"." in path:  # of a gRPC package
                call = router.channel.stream_stream(path.decode())(iter([data]), timeout=8)
                await status_of(call)
            else:
                head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % path
                head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
                await _exchange(host, int(port), head + data)
            await router.check_serves()

        yield probe


def _worst_body(seed: int) -> Case:
    body = bodies.make(bodies.draw_shape(random.Random(seed)), 2**20)
    return body.path.encode(), body.data


async def _exchange(host: str, port: int, data: bytes) -> None:
    """Send bytes and end; any answer must be HTTP, and not a 5xx."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        with contextlib.suppress(ConnectionError):  # the router has closed the connection
            writer.write(data)
            await writer.drain()
            writer.write_eof()
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    if answer:
        version, code, *_ = answer.split(b" ", 2)
        assert version in (b"HTTP/1.1", b"HTTP/1.0"), answer[:200]
        assert code[:1] in (b"1", b"2", b"3", b"4"), answer[:2000]


def _method_target(method: str, *known: Message, streams: bool = False) -> Target:
    return Target(
        f"grpc-{method.lower()}",
        st.tuples(wire(*known)),
        lambda: in_event_loop(_method(method, streams=streams)),
        type(known[0]),
        num_examples=15,
    )


_CHAT = inference_pb2.TokenizeRequest(
    chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="x")])
)
_ONCE = [inference_pb2.GenerateOnceRequest(request=request) for request in examples.GENERATE]

TARGETS = (
    _method_target("Generate", *examples.GENERATE, streams=True),
    _method_target("GenerateOnce", *_ONCE),
    _method_target("Resume", *examples.RESUME, streams=True),
    _method_target("Cancel", inference_pb2.CancelRequest(request_id="r")),
    _method_target("Tokenize", inference_pb2.TokenizeRequest(text="hello"), _CHAT),
    _method_target("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[5, 6])),
    _method_target(
        "DescribeKv", inference_pb2.DescribeKvRequest(query=kv_pb2.KvQuery(max_blocks=3))
    ),
    Target(
        "router-news",
        st.lists(wire(*examples.CONNECT_RESPONSES), min_size=1, max_size=3).map(tuple),
        lambda: in_event_loop(_news()),
        scheduler_pb2.ConnectResponse,
        num_examples=15,
    ),
    Target(
        "worst-bodies",
        st.integers(0, 2**32).map(_worst_body),
        lambda: in_event_loop(_worst_bodies()),
        num_examples=40,
    ),
    Target("http", st.tuples(raw_requests()), lambda: in_event_loop(_http()), num_examples=60),
)
