"""Reads a request's fields, except its prompt, from parameters, JSON or tensors."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pydantic import ConfigDict, ValidationError

from contract.errors import InvalidArgumentError
from quire.kserve import open_inference_pb2
from router.http.errors import error_from_validation
from router.http.requests.shared_fields import UNIMPLEMENTED, Body
from router.http.strict_json import excerpt, parse_json
from router.kserve.tensors import Element

_LISTS: Final = frozenset(
    {"allowed_token_ids", "bad_words", "stop", "stop_token_ids", "guided_choice"}
)
"""Fields whose tensor may have several elements."""


class Fields(Body):
    """All fields of a request: those of `/v1/completions`, and those of NVIDIA's Triton server.

    Values are converted to the types of the fields, because tensors and parameters have few types,
    and clients send numbers as text.
    """

    model_config = ConfigDict(strict=False)

    unimplemented = MappingProxyType(
        {
            **UNIMPLEMENTED,
            "return_token_ids": (False,),
            "return_tokens_as_token_ids": (False,),
            # A request sets these by other names: model_name, id, return_*. `user` is not
            # supported.
            **dict.fromkeys(("model", "request_id", "stream_options", "user"), ()),
        }
    )

    max_tokens: int | None = None
    exclude_input_in_output: bool | None = None
    """None: true in a stream, else false."""
    return_finish_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    timeout: int | None = None
    """The request's time limit, in microseconds."""
    triton_enable_empty_final_response: bool = False
    """No effect: the last response of a stream is always marked."""


def fields_from_proto(
    request: open_inference_pb2.ModelInferRequest, inputs: Mapping[str, Sequence[Element]]
) -> Fields:
    """Read the parameters, the JSON in `sampling_parameters`, and all other inputs but the prompt.

    Raises InvalidArgumentError with the name of a field that is invalid or has two different
    values.
    """
    given: dict[str, object] = {}
    for name, value in (
        *_parameters(request.parameters),
        *_sampling_parameters(inputs.get("sampling_parameters")),
        *_tensors(inputs),
    ):
        if name in given and not _equal(given[name], value):
            raise InvalidArgumentError(
                name, f"is given twice, as {excerpt(given[name])} and as {excerpt(value)}"
            )
        given[name] = value
    try:
        return Fields.model_validate(given)
    except ValidationError as error:
        raise error_from_validation(error) from None


def text_of(name: str, elements: Sequence[Element]) -> str:
    """Return the text of a tensor whose only element is a text; may raise InvalidArgumentError."""
    element = _single(name, elements)
    if not isinstance(element, bytes):
        raise InvalidArgumentError(name, "must have the datatype BYTES")
    return _decode(name, element)


def _parameters(
    parameters: Mapping[str, open_inference_pb2.InferParameter],
) -> Iterable[tuple[str, object]]:
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidArgumentError(name, "is a parameter without a value")
        yield name, getattr(parameter, choice)


def _sampling_parameters(elements: Sequence[Element] | None) -> Iterable[tuple[str, object]]:
    if elements is None:
        return
    name = "sampling_parameters"
    try:
        fields = parse_json(text_of(name, elements).encode())
    except InvalidArgumentError as error:
        raise InvalidArgumentError(name, error.problem) from None
    if not isinstance(fields, dict):
        raise InvalidArgumentError(name, f"is {excerpt(fields)}; it must be a JSON object")
    yield from fields.items()


def _tensors(inputs: Mapping[str, Sequence[Element]]) -> Iterable[tuple[str, object]]:
    for name, elements in inputs.items():
        if name in ("text_input", "sampling_parameters"):
            continue
        values = [_decode(name, e) if isinstance(e, bytes) else e for e in elements]
        yield name, values if name in _LISTS else _single(name, values)


def _equal(value: object, other: object) -> bool:
    if isinstance(value, list | dict) or isinstance(other, list | dict):
        return value == other
    return str(value) == str(other)


def _single(name: str, elements: Sequence[object]) -> object:
    if len(elements) != 1:
        raise InvalidArgumentError(name, f"has {len(elements)} elements; it must have 1")
    return elements[0]


def _decode(name: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(name, f"is not UTF-8 at byte {error.start}") from None
