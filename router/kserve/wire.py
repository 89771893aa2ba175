"""Converts messages of the Open Inference Protocol to Quire's data types and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from contract.errors import InvalidArgumentError, NotFoundError
from contract.request import GenerateRequest, Model
from quire.kserve import open_inference_pb2
from router.kserve.fields import Fields, fields_from_proto, text_of
from router.kserve.tensors import OutputTensor, inputs_from_proto, outputs_to_proto

MODEL_VERSION: Final = "1"
FINAL_PARAMETER: Final = "triton_final_response"

_INPUTS: Final = (
    ("text_input", "BYTES"),
    ("stream", "BOOL"),
    ("sampling_parameters", "BYTES"),
    ("exclude_input_in_output", "BOOL"),
    ("return_finish_reason", "BOOL"),
    ("return_num_input_tokens", "BOOL"),
    ("return_num_output_tokens", "BOOL"),
)
_OUTPUT_TO_DATATYPE: Final = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}


@dataclass(frozen=True, slots=True)
class InferCall:
    """A request, and the requested format of the answer."""

    request: GenerateRequest
    id: str
    """The id that the client chose, or ""; several requests may have the same id."""
    model_name: str
    stream: bool
    prefix: str
    """The prompt, if each output's text must begin with it; else empty."""
    output_names: tuple[str, ...]
    raw: bool
    """Whether tensors have raw contents (`tensors.py`), in the request and in the answer alike."""
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The outputs in one response; each tuple has one entry per output."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    """Empty for an unfinished output."""
    num_input_tokens: int
    num_output_tokens: tuple[int, ...]


def check_version(version: str) -> None:
    """Raise NotFoundError unless `version` is empty or `MODEL_VERSION`."""
    if version not in ("", MODEL_VERSION):
        raise NotFoundError(
            f"model version {version[:64]!r} is not served; the only version is {MODEL_VERSION!r}"
        )


def infer_call_from_proto(message: open_inference_pb2.ModelInferRequest) -> InferCall:
    """Parse a request; raises QuireError with the name of the invalid field."""
    check_version(message.model_version)
    inputs = inputs_from_proto(message)
    if "text_input" not in inputs:
        raise InvalidArgumentError("text_input", "is missing")
    prompt = text_of("text_input", inputs["text_input"])
    fields = fields_from_proto(message, inputs)
    if fields.timeout is not None and fields.timeout <= 0:
        raise InvalidArgumentError("timeout", f"is {fields.timeout}; it must be above 0")
    fields.check()
    exclude_input = fields.exclude_input_in_output
    if exclude_input is None:
        exclude_input = fields.stream
    elif fields.stream and not exclude_input:
        raise InvalidArgumentError(
            "exclude_input_in_output", "is false; with stream it must be true or unset"
        )
    return InferCall(
        request=fields.to_request(
            prompt,
            request_id="",
            sampling=fields.sampling(max_tokens=fields.max_tokens, logprobs=None),
            add_special_tokens=True,
        ),
        id=message.id,
        model_name=message.model_name,
        stream=fields.stream,
        prefix="" if exclude_input else prompt,
        output_names=_output_names(message, fields),
        raw=bool(message.raw_input_contents),
        timeout_s=None if fields.timeout is None else fields.timeout / 1e6,
    )


def answer_to_proto(
    call: InferCall, answer: Answer, *, final: bool | None = None
) -> open_inference_pb2.ModelInferResponse:
    """Make a response. `final`: whether the response ends its stream; None: there is no stream."""
    response = empty_response(call.model_name, call.id)
    if final is not None:
        response.parameters[FINAL_PARAMETER].bool_param = final
    outputs_to_proto([_output(name, answer) for name in call.output_names], response, raw=call.raw)
    return response


def empty_response(model_name: str, request_id: str) -> open_inference_pb2.ModelInferResponse:
    """Make a response without outputs."""
    return open_inference_pb2.ModelInferResponse(
        model_name=model_name, model_version=MODEL_VERSION, id=request_id
    )


def model_to_proto(model: Model) -> open_inference_pb2.ModelMetadataResponse:
    """Describe a model's input and output tensors."""
    metadata = open_inference_pb2.ModelMetadataResponse.TensorMetadata
    return open_inference_pb2.ModelMetadataResponse(
        name=model.id,
        versions=[MODEL_VERSION],
        platform="quire",
        inputs=[metadata(name=name, datatype=datatype, shape=[1]) for name, datatype in _INPUTS],
        outputs=[
            metadata(name=name, datatype=datatype, shape=[1 if name == "num_input_tokens" else -1])
            for name, datatype in _OUTPUT_TO_DATATYPE.items()
        ],
    )


def _output_names(message: open_inference_pb2.ModelInferRequest, fields: Fields) -> tuple[str, ...]:
    for i, output in enumerate(message.outputs):
        if output.name not in _OUTPUT_TO_DATATYPE:
            raise InvalidArgumentError(
                f"outputs[{i}].name",
                f"is {output.name[:64]!r}; it must be one of {', '.join(_OUTPUT_TO_DATATYPE)}",
            )
        if output.parameters:
            raise InvalidArgumentError(
                f"outputs[{i}].parameters",
                f"has {min(output.parameters)[:64]!r}; parameters of outputs are not supported",
            )
    if message.outputs:
        return tuple(dict.fromkeys(output.name for output in message.outputs))
    asked = {
        "text_output": True,
        "finish_reason": fields.return_finish_reason,
        "num_input_tokens": fields.return_num_input_tokens,
        "num_output_tokens": fields.return_num_output_tokens,
    }
    return tuple(name for name, is_asked in asked.items() if is_asked)


def _output(name: str, answer: Answer) -> OutputTensor:
    elements: Sequence[bytes | int]
    match name:
        case "text_output":
            elements = [text.encode() for text in answer.texts]
        case "finish_reason":
            elements = [reason.encode() for reason in answer.finish_reasons]
        case "num_input_tokens":
            elements = [answer.num_input_tokens]
        case _:
            elements = answer.num_output_tokens
    return OutputTensor(name, _OUTPUT_TO_DATATYPE[name], elements)
