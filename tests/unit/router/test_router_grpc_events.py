"""Streams of each gRPC API, on our own server and on grpcio's."""

import struct
from collections import Counter

import grpc
import grpc.aio
import pytest
from keyed_router import plain_settings, running
from router_fake_scheduler import LENGTH

from quire.kserve import open_inference_pb2 as kserve_pb
from quire.kserve import open_inference_pb2_grpc
from quire.openengine import openengine_pb2, openengine_pb2_grpc
from quire.v1 import inference_pb2, inference_pb2_grpc
from quire.vllm_engine import vllm_engine_pb2, vllm_engine_pb2_grpc
from router.live.live_request import LiveRequest

pytestmark = pytest.mark.timeout(60)
NUM_TOKENS = 60
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
"""Windows so small that a client which does not read stalls its stream."""


class Quire:
    def call(self, channel, n):
        request = inference_pb2.GenerateRequest(text="hello", n=n)
        return inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)

    def num_tokens(self, message):
        return {message.delta.output_index: len(message.delta.token_ids)}


class KServe:
    def call(self, channel, n):
        request = kserve_pb.ModelInferRequest(model_name="tiny")
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        text = b"hello"
        request.raw_input_contents.append(struct.pack("<I", len(text)) + text)
        request.parameters["n"].int64_param = n
        for name in ("stream", "return_num_output_tokens"):
            request.parameters[name].bool_param = True
        stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        return stub.ModelStreamInfer(iter([request]))

    def num_tokens(self, message):
        assert not message.error_message
        return dict(enumerate(memoryview(message.infer_response.raw_output_contents[1]).cast("I")))


class OpenEngine:
    def call(self, channel, n):
        request = openengine_pb2.GenerateRequest(
            token_ids=openengine_pb2.TokenIds(ids=[5]),
            sampling=openengine_pb2.SamplingParams(num_sequences=n),
        )
        return openengine_pb2_grpc.InferenceStub(channel).Generate(request)

    def num_tokens(self, message):
        assert not message.HasField("error")
        return {message.token.output_index: len(message.token.tokens)}


class VllmEngine:
    def call(self, channel, n):
        request = vllm_engine_pb2.GenerateRequest(
            tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5]),
            sampling_params=vllm_engine_pb2.SamplingParams(n=n),
            stream=True,
        )
        return vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request)

    def num_tokens(self, message):
        return {message.chunk.index: len(message.chunk.token_ids)}


@pytest.fixture(params=[Quire, KServe, OpenEngine, VllmEngine])
def api(request):
    return request.param()


@pytest.fixture(params=["quire", "grpcio"])
def server(request):
    return request.param


@pytest.fixture
async def router(model_dir, tmp_path, server):
    settings = plain_settings(
        model_dir, tmp_path, openengine=True, vllm_engine=True, grpc_server=server
    )
    async with running(settings, tmp_path) as router:
        yield router


@pytest.fixture
def reads(monkeypatch):
    """Counts how often a task waits for an event."""
    counted = Counter()
    read = LiveRequest.__anext__

    async def count(live):
        counted["reads"] += 1
        return await read(live)

    monkeypatch.setattr(LiveRequest, "__anext__", count)
    return counted


async def test_our_own_server_wakes_no_task_for_an_event(router, api, server, reads):
    call = api.call(router.channel, n=1)
    key = (await router.scheduler.submits.get()).first_seq_key
    for _ in range(4):
        await router.scheduler.step({key: [70]}, admitted={key: 0})
        assert api.num_tokens(await call.read()) == {0: 1}
    await router.scheduler.step(finished={key: LENGTH})
    assert await call.read() is not grpc.aio.EOF
    while await call.read() is not grpc.aio.EOF:
        pass
    assert await call.code() is grpc.StatusCode.OK
    assert bool(reads) == (server == "grpcio")


async def test_a_slow_reader_gets_fewer_and_larger_messages_and_all_tokens(router, api, tmp_path):
    scheduler, n = router.scheduler, 3
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'r'}", options=NARROW) as channel:
        call = api.call(channel, n)
        first = (await scheduler.submits.get()).first_seq_key
        keys = range(first, first + n)
        for _ in range(NUM_TOKENS):
            await scheduler.step({key: [70] for key in keys})
        await scheduler.step(finished=dict.fromkeys(keys, LENGTH))
        # When another stream has its token, the router has read all steps.
        other = router.generate(None)
        key = (await scheduler.submits.get()).first_seq_key
        await scheduler.step({key: [70]})
        assert await other.read()
        other.cancel()
        messages = [message async for message in call]
        assert await call.code() is grpc.StatusCode.OK
    counted = Counter()
    for message in messages:
        counted.update(api.num_tokens(message))
    assert counted == dict.fromkeys(range(n), NUM_TOKENS)
    assert len(messages) < n * NUM_TOKENS
