"""A client in Python, from the protos alone: blocking calls. Usage: client.py HOST:PORT"""

import sys

import grpc
from google.rpc import error_details_pb2, status_pb2

from quire.v1 import common_pb2, inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub

PROMPT = "def add(a, b):\n    return"
LONG = inference_pb2.GenerateRequest(
    text=PROMPT, sampling=common_pb2.SamplingParams(max_tokens=900, ignore_eos=True)
)


def stream(stub: InferenceServiceStub) -> None:
    """Reads a completion as it is produced."""
    request = inference_pb2.GenerateRequest(
        text=PROMPT,
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=16),
        stop=["\n"],
    )
    text, token_ids = "", []
    for response in stub.Generate(request):
        kind = response.WhichOneof("event")
        if kind == "delta":
            text += response.delta.text
            token_ids += response.delta.token_ids
        elif kind == "finished":
            reason = common_pb2.FinishReason.Name(response.finished.finish_reason)
            print("stream.finish_reason", reason)
        elif kind == "usage":
            usage = response.usage
            print("stream.usage", usage.prompt_tokens, usage.completion_tokens)
    print("stream.text", text)
    print("stream.token_ids", *token_ids)


def cancel(stub: InferenceServiceStub) -> None:
    """Ends a stream after its first event."""
    call = stub.Generate(LONG)
    next(call)
    call.cancel()
    print("cancel.code", call.code().value[0])


def deadline(stub: InferenceServiceStub) -> None:
    """Gives a call less time than it needs."""
    try:
        for _ in stub.Generate(LONG, timeout=0.2):
            pass
    except grpc.RpcError as error:
        print("deadline.code", error.code().value[0])


def bad_request(stub: InferenceServiceStub) -> None:
    """Reads from the details of an error which field was wrong."""
    request = inference_pb2.GenerateRequest(
        text=PROMPT, sampling=common_pb2.SamplingParams(temperature=-1)
    )
    try:
        next(stub.Generate(request))
    except grpc.RpcError as error:
        print("error.code", error.code().value[0])
        packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
        for detail in status_pb2.Status.FromString(packed).details:
            bad = error_details_pb2.BadRequest()
            if detail.Unpack(bad):
                for violation in bad.field_violations:
                    print("error.violation", violation.field, violation.description)


with grpc.insecure_channel(sys.argv[1]) as channel:
    for example in (stream, cancel, deadline, bad_request):
        example(InferenceServiceStub(channel))
