"""The Open Inference Protocol, between a gRPC client and a fake scheduler."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from router_fake_scheduler import ERROR, LENGTH, FakeScheduler

from quire.kserve import open_inference_pb2 as pb
from quire.kserve import open_inference_pb2_grpc
from quire.v1 import common_pb2
from router.kserve.api import KServeServicer
from rpc.peers.channel import open_channel
from rpc.status import ErrorInterceptor


@dataclass
class Process:
    stub: open_inference_pb2_grpc.GRPCInferenceServiceStub
    scheduler: FakeScheduler
    router: object
    is_ready: bool = True


@pytest.fixture
async def process(router, tmp_path) -> AsyncIterator[Process]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    target = f"unix:{tmp_path / 'k'}"
    async with open_channel(target) as channel:
        stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        process = Process(stub, router.scheduler, router)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            KServeServicer(router.cells, lambda: process.is_ready), server
        )
        server.add_insecure_port(target)
        await server.start()
        yield process
    await server.stop(0)


def raw_text(*texts):
    return b"".join(struct.pack("<I", len(t.encode())) + t.encode() for t in texts)


def request(text="hello", *, raw=True, json_fields=None, parameters=None, **kwargs):
    """A request with the text, and fields in any of the three ways; `kwargs` are tensors."""
    message = pb.ModelInferRequest(model_name="tiny", id="7")
    tensors = [("text_input", "BYTES", [text])]
    if json_fields is not None:
        tensors.append(("sampling_parameters", "BYTES", [json.dumps(json_fields)]))
    tensors += [(name, *tensor) for name, tensor in kwargs.items()]
    for name, datatype, elements in tensors:
        tensor = message.inputs.add(name=name, datatype=datatype, shape=[len(elements)])
        if raw:
            code = {"BOOL": "?", "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f"}
            message.raw_input_contents.append(
                raw_text(*elements)
                if datatype == "BYTES"
                else struct.pack(f"<{len(elements)}{code[datatype]}", *elements)
            )
        else:
            field = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "INT32": "int_contents"}
            getattr(tensor.contents, field[datatype]).extend(
                [e.encode() if isinstance(e, str) else e for e in elements]
            )
    for name, value in (parameters or {}).items():
        kind = {str: "string_param", bool: "bool_param", int: "int64_param", float: "double_param"}
        setattr(message.parameters[name], kind[type(value)], value)
    return message


async def refusal(call):
    """The error of a call: its code, and the field that its details name, if any."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    packed = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    bad = error_details_pb2.BadRequest()
    for detail in status_pb2.Status.FromString(packed).details:
        detail.Unpack(bad)
    field = bad.field_violations[0].field if bad.field_violations else None
    return caught.value.code().name, field, caught.value.details()


async def test_it_says_what_is_there(process):
    assert (await process.stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await process.stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await process.stub.ModelReady(pb.ModelReadyRequest(name="tiny", version="1"))).ready
    assert (await process.stub.ServerMetadata(pb.ServerMetadataRequest())).name == "quire"
    model = await process.stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"))
    assert (model.name, list(model.versions)) == ("tiny", ["1"])
    assert ("text_input", "BYTES") in [(t.name, t.datatype) for t in model.inputs]
    assert model.outputs[0].name == "text_output"


async def test_it_is_not_ready_while_the_process_is_not(process):
    process.is_ready = False
    assert (await process.stub.ServerLive(pb.ServerLiveRequest())).live
    assert not (await process.stub.ServerReady(pb.ServerReadyRequest())).ready
    assert not (await process.stub.ModelReady(pb.ModelReadyRequest(name="tiny"))).ready


@pytest.mark.parametrize(
    ("rpc", "message"),
    [
        ("ModelReady", pb.ModelReadyRequest(name="huge")),
        ("ModelReady", pb.ModelReadyRequest(name="tiny", version="2")),
        ("ModelMetadata", pb.ModelMetadataRequest(name="huge")),
        ("ModelMetadata", pb.ModelMetadataRequest(name="tiny", version="2")),
        ("ModelInfer", pb.ModelInferRequest(model_name="tiny", model_version="2")),
    ],
)
async def test_an_unknown_model_or_version_is_not_found(process, rpc, message):
    code, _, _ = await refusal(getattr(process.stub, rpc)(message))
    assert code == "NOT_FOUND"


@pytest.mark.parametrize("raw", [True, False])
async def test_infer_answers_as_it_was_asked(process, raw):
    call = process.stub.ModelInfer(
        request(
            raw=raw,
            max_tokens=("INT32", [3]),
            exclude_input_in_output=("BOOL", [True]),
            return_finish_reason=("BOOL", [True]),
            return_num_output_tokens=("BOOL", [True]),
        )
    )
    submit = await process.scheduler.submits.get()
    tokens = process.router.tokens("abc")
    key = submit.first_seq_key
    await process.scheduler.step({key: tokens}, finished={key: LENGTH})
    response = await call
    assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "7")
    names = [(t.name, t.datatype, list(t.shape)) for t in response.outputs]
    assert names == [
        ("text_output", "BYTES", [1]),
        ("finish_reason", "BYTES", [1]),
        ("num_output_tokens", "UINT32", [1]),
    ]
    if raw:
        assert list(response.raw_output_contents) == [
            raw_text("abc"),
            raw_text("length"),
            struct.pack("<I", len(tokens)),
        ]
        assert not any(t.HasField("contents") for t in response.outputs)
    else:
        assert [list(t.contents.bytes_contents) for t in response.outputs[:2]] == [
            [b"abc"],
            [b"length"],
        ]
        assert list(response.outputs[2].contents.uint_contents) == [len(tokens)]
        assert not response.raw_output_contents


async def test_infer_without_a_stream_includes_the_prompt_by_default(process):
    call = process.stub.ModelInfer(request("hi ", raw=False, json_fields={"n": 2}))
    key = (await process.scheduler.submits.get()).first_seq_key
    a, b = process.router.tokens("a"), process.router.tokens("b")
    await process.scheduler.step({key: a, key + 1: b}, finished={key: LENGTH, key + 1: LENGTH})
    (output,) = (await call).outputs
    assert (list(output.shape), list(output.contents.bytes_contents)) == ([2], [b"hi a", b"hi b"])


FIELDS = {
    "temperature": 0.5,
    "top_k": 5,
    "max_tokens": 9,
    "ignore_eos": True,
    "seed": 11,
}


@pytest.mark.parametrize(
    "given",
    [
        {"json_fields": {**FIELDS, "stop_token_ids": [4, 5], "stop": "x"}},
        # Triton's own example sends numbers as text, and each parameter twice.
        {
            "json_fields": {name: str(value) for name, value in FIELDS.items()},
            "parameters": {name: str(value) for name, value in FIELDS.items()},
            "stop_token_ids": ("INT64", [4, 5]),
            "stop": ("BYTES", ["x"]),
        },
        {"parameters": FIELDS, "stop_token_ids": ("INT32", [4, 5]), "stop": ("BYTES", ["x", "y"])},
        {
            "temperature": ("FP16", [0.5]),
            "top_k": ("INT64", [5]),
            "max_tokens": ("INT32", [9]),
            "ignore_eos": ("BOOL", [True]),
            "seed": ("INT64", [11]),
            "stop_token_ids": ("INT32", [4, 5]),
        },
    ],
)
async def test_fields_may_be_given_in_three_ways(process, given):
    call = process.stub.ModelInfer(request(**given))
    sampling = (await process.scheduler.submits.get()).sampling
    assert sampling.temperature == 0.5
    assert (sampling.top_k, sampling.max_tokens) == (5, 9)
    assert (sampling.ignore_eos, sampling.seed) == (True, 11)
    assert list(sampling.stop_token_ids) == [4, 5]
    call.cancel()


async def test_timeout_and_metadata_count(process):
    metadata = (("x-quire-priority", "3"), ("x-quire-tenant", "a"))
    call = process.stub.ModelInfer(
        request(parameters={"timeout": 30_000_000}), metadata=metadata, timeout=600
    )
    submit = await process.scheduler.submits.get()
    assert (submit.priority, submit.tenant) == (3, "a")
    assert 20 < submit.deadline_s < 31
    call.cancel()
    assert await process.scheduler.cancels.get() == [submit.first_seq_key]


def spoilt(change):
    message = request(raw=False)
    change(message)
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ModelInferRequest(model_name="tiny"), "text_input"),
        (request(""), "text_input"),
        (request("x" * 9999), "text_input"),
        (request(json_fields={"temperature": -1}), "temperature"),
        (request(json_fields={"temperature": "hot"}), "temperature"),
        (request(json_fields={"tempreature": 1}), "tempreature"),
        (request(json_fields=[1]), "sampling_parameters"),
        (request(sampling_parameters=("BYTES", ["{"])), "sampling_parameters"),
        (request(sampling_parameters=("INT32", [1])), "sampling_parameters"),
        (request(max_tokens=("INT32", [1, 2])), "max_tokens"),
        (request(json_fields={"seed": 1}, parameters={"seed": 2}), "seed"),
        (request(parameters={"timeout": 0}), "timeout"),
        (request(parameters={"sequence_id": 1}), "sequence_id"),
        (request(stream=("BOOL", [True])), "stream"),
        (
            request(stream=("BOOL", [True]), exclude_input_in_output=("BOOL", [False])),
            "exclude_input_in_output",
        ),
        (request(image=("BYTES", ["x"])), "image"),
        (spoilt(lambda m: m.inputs.add(name="text_input")), "inputs[1]"),
        (spoilt(lambda m: m.inputs[0].shape.append(2)), "text_input.shape"),
        (spoilt(lambda m: m.inputs[0].shape.extend([-1, -1])), "text_input.shape"),
        (spoilt(lambda m: setattr(m.inputs[0], "datatype", "BF16")), "text_input.datatype"),
        (spoilt(lambda m: setattr(m.inputs[0], "datatype", "INT32")), "text_input.contents"),
        (spoilt(lambda m: m.raw_input_contents.append(b"")), "text_input.contents"),
        (spoilt(lambda m: m.raw_input_contents.extend([b"", b""])), "raw_input_contents"),
        (spoilt(lambda m: m.inputs[0].parameters["shm"].SetInParent()), "text_input.parameters"),
        (spoilt(lambda m: m.parameters["n"].SetInParent()), "n"),
        (spoilt(lambda m: m.outputs.add(name="logits")), "outputs[0].name"),
        (
            spoilt(lambda m: m.outputs.add(name="text_output").parameters["shm"].SetInParent()),
            "outputs[0].parameters",
        ),
    ],
)
async def test_a_bad_request_names_its_field(process, message, field):
    code, named, details = await refusal(process.stub.ModelInfer(message))
    assert (code, named) == ("INVALID_ARGUMENT", field), details


@pytest.mark.parametrize("contents", [b"\1", b"\2\0\0\0x", b"\1\0\0\0\xff"])
async def test_raw_text_that_is_none_names_its_tensor(process, contents):
    message = request()
    message.raw_input_contents[0] = contents
    code, named, _ = await refusal(process.stub.ModelInfer(message))
    assert (code, named) == ("INVALID_ARGUMENT", "text_input")


@pytest.mark.parametrize("fields", [{"model": "x"}, {"return_token_ids": True}, {"user": "me"}])
async def test_unsupported_options_are_refused_by_name(process, fields):
    code, _, details = await refusal(process.stub.ModelInfer(request(json_fields=fields)))
    assert code == "UNIMPLEMENTED"
    assert next(iter(fields)) in details


async def test_an_outputs_error_is_the_status(process):
    call = process.stub.ModelInfer(request())
    key = (await process.scheduler.submits.get()).first_seq_key
    error = common_pb2.OutputError(code=grpc.StatusCode.UNAVAILABLE.value[0], message="lost")
    await process.scheduler.step({key: [70]}, finished={key: ERROR}, error=error)
    code, _, details = await refusal(call)
    assert (code, details) == ("UNAVAILABLE", "lost")


def final(response):
    return response.infer_response.parameters["triton_final_response"].bool_param


async def test_a_stream_serves_its_requests_at_once_and_marks_the_last_response(process):
    call = process.stub.ModelStreamInfer()
    for number in "12":
        message = request(stream=("BOOL", [True]), return_finish_reason=("BOOL", [True]))
        message.id = number
        await call.write(message)
    first, second = [(await process.scheduler.submits.get()).first_seq_key for _ in "12"]
    await process.scheduler.step({second: process.router.tokens("b")})
    response = await call.read()
    assert list(response.infer_response.raw_output_contents) == [raw_text("b"), raw_text("")]
    assert not final(response)
    other = response.infer_response.id
    await process.scheduler.step({first: process.router.tokens("a")}, finished={first: LENGTH})
    delta, end = await call.read(), await call.read()
    assert {delta.infer_response.id, end.infer_response.id} == {"1", "2"} - {other}
    assert [final(delta), final(end)] == [False, True]
    assert list(end.infer_response.raw_output_contents) == [raw_text(""), raw_text("length")]
    await call.done_writing()
    await process.scheduler.step(finished={second: LENGTH})
    assert final(await call.read())
    assert await call.read() is grpc.aio.EOF


async def test_a_bad_request_does_not_end_a_stream(process):
    call = process.stub.ModelStreamInfer()
    await call.write(request(json_fields={"temperature": -1}))
    response = await call.read()
    assert response.error_message == "temperature is -1.0; it must be in [0, 100]"
    assert (response.infer_response.id, final(response)) == ("7", True)
    # A request that is not streamed has one response.
    await call.write(request(exclude_input_in_output=("BOOL", [True])))
    key = (await process.scheduler.submits.get()).first_seq_key
    await process.scheduler.step({key: process.router.tokens("abc")}, finished={key: LENGTH})
    response = await call.read()
    assert list(response.infer_response.raw_output_contents) == [raw_text("abc")]
    assert final(response)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_a_stream_that_is_cancelled_ends_its_requests(process):
    call = process.stub.ModelStreamInfer()
    await call.write(request(stream=("BOOL", [True])))
    await call.write(request(stream=("BOOL", [True])))
    keys = {(await process.scheduler.submits.get()).first_seq_key for _ in range(2)}
    call.cancel()
    while keys:  # both may be in one message
        keys -= set(await process.scheduler.cancels.get())
    with pytest.raises(asyncio.CancelledError):
        await call.read()
