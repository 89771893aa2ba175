"""Converts tensors of the Open Inference Protocol to Python values and back.

The contents of a tensor are *typed*, in a protobuf field for the tensor's datatype, or *raw*, as
bytes.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from contract.errors import InvalidArgumentError
from contract.value_checks import check_count
from quire.kserve import open_inference_pb2

Element: TypeAlias = bool | int | float | bytes

_DATATYPE_TO_FORM: Final[dict[str, tuple[str, str | None]]] = {
    "BOOL": ("?", "bool_contents"),
    "INT8": ("b", "int_contents"),
    "INT16": ("h", "int_contents"),
    "INT32": ("i", "int_contents"),
    "INT64": ("q", "int64_contents"),
    "UINT8": ("B", "uint_contents"),
    "UINT16": ("H", "uint_contents"),
    "UINT32": ("I", "uint_contents"),
    "UINT64": ("Q", "uint64_contents"),
    "FP16": ("e", None),
    "FP32": ("f", "fp32_contents"),
    "FP64": ("d", "fp64_contents"),
    "BYTES": ("", "bytes_contents"),
}
"""Maps a datatype to the `struct` code of its elements, and to the protobuf field of its typed
contents; None: it has no typed contents."""

MAX_ELEMENTS: Final = 1024
"""Maximum number of elements of an input; only lists such as `guided_choice` have several."""
MAX_DIMENSIONS: Final = 8

_LENGTH: Final = struct.Struct("<I")
"""The format of the length that precedes each element of a BYTES tensor in raw contents."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A one-dimensional output."""

    name: str
    datatype: str
    elements: Sequence[Element]


def inputs_from_proto(
    request: open_inference_pb2.ModelInferRequest,
) -> dict[str, tuple[Element, ...]]:
    """Return the elements of each input, by name; may raise InvalidArgumentError."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidArgumentError(
            "raw_input_contents",
            f"has {len(raw)} entries; it must have one for each of the {len(request.inputs)}"
            " inputs, or none",
        )
    name_to_elements: dict[str, tuple[Element, ...]] = {}
    for i, tensor in enumerate(request.inputs):
        if tensor.name in name_to_elements:
            raise InvalidArgumentError(f"inputs[{i}]", f"repeats the name {tensor.name[:64]!r}")
        if tensor.parameters:
            raise InvalidArgumentError(
                f"{tensor.name}.parameters",
                f"has {min(tensor.parameters)[:64]!r}; parameters of tensors are not supported",
            )
        if raw and tensor.HasField("contents"):
            raise InvalidArgumentError(
                f"{tensor.name}.contents", "is set; it must be unset with raw_input_contents"
            )
        check_count(f"{tensor.name}.shape", len(tensor.shape), MAX_DIMENSIONS)
        elements = _from_raw(tensor, raw[i]) if raw else _from_typed(tensor)
        if any(size < 0 for size in tensor.shape) or len(elements) != math.prod(tensor.shape):
            raise InvalidArgumentError(
                f"{tensor.name}.shape",
                f"is {list(tensor.shape)[:8]}, but the input has {len(elements)} elements",
            )
        name_to_elements[tensor.name] = elements
    return name_to_elements


def outputs_to_proto(
    tensors: Sequence[OutputTensor], response: open_inference_pb2.ModelInferResponse, *, raw: bool
) -> None:
    """Add tensors to a response, with raw or typed contents."""
    for tensor in tensors:
        output = response.outputs.add(
            name=tensor.name, datatype=tensor.datatype, shape=[len(tensor.elements)]
        )
        if raw:
            response.raw_output_contents.append(_to_raw(tensor))
        else:
            _, field = _DATATYPE_TO_FORM[tensor.datatype]
            assert field is not None, "no output is of a type without typed contents"
            getattr(output.contents, field).extend(tensor.elements)


def _form(
    tensor: open_inference_pb2.ModelInferRequest.InferInputTensor,
) -> tuple[str, str | None]:
    form = _DATATYPE_TO_FORM.get(tensor.datatype)
    if form is None:
        raise InvalidArgumentError(
            f"{tensor.name}.datatype",
            f"is {tensor.datatype[:64]!r}; it must be one of {', '.join(_DATATYPE_TO_FORM)}",
        )
    return form


def _from_typed(
    tensor: open_inference_pb2.ModelInferRequest.InferInputTensor,
) -> tuple[Element, ...]:
    _, field = _form(tensor)
    for other, elements in tensor.contents.ListFields():
        if other.name != field:
            raise InvalidArgumentError(
                f"{tensor.name}.contents",
                f"has {len(elements)} {other.name}; with the datatype {tensor.datatype} it must"
                f" have {field or 'none: it is given in raw_input_contents'}",
            )
    if field is None:
        return ()
    contents = getattr(tensor.contents, field)
    check_count(tensor.name, len(contents), MAX_ELEMENTS)
    return tuple(contents)


def _from_raw(
    tensor: open_inference_pb2.ModelInferRequest.InferInputTensor, raw: bytes
) -> tuple[Element, ...]:
    code, _ = _form(tensor)
    if tensor.datatype == "BYTES":
        return _texts_from_raw(tensor.name, raw)
    size = struct.calcsize(f"<{code}")
    if len(raw) % size:
        raise InvalidArgumentError(
            tensor.name, f"has {len(raw)} bytes; an element of {tensor.datatype} has {size}"
        )
    check_count(tensor.name, len(raw) // size, MAX_ELEMENTS)
    return struct.unpack(f"<{len(raw) // size}{code}", raw)


def _texts_from_raw(name: str, raw: bytes) -> tuple[bytes, ...]:
    texts: list[bytes] = []
    at = 0
    while at < len(raw):
        begin = at + _LENGTH.size
        if begin > len(raw) or begin + (length := _LENGTH.unpack_from(raw, at)[0]) > len(raw):
            raise InvalidArgumentError(
                name, f"has {len(raw)} bytes; element {len(texts)} does not fit in them"
            )
        at = begin + length
        texts.append(raw[begin:at])
        check_count(name, len(texts), MAX_ELEMENTS)
    return tuple(texts)


def _to_raw(tensor: OutputTensor) -> bytes:
    if tensor.datatype == "BYTES":
        texts = [element for element in tensor.elements if isinstance(element, bytes)]
        return b"".join(_LENGTH.pack(len(text)) + text for text in texts)
    code, _ = _DATATYPE_TO_FORM[tensor.datatype]
    return struct.pack(f"<{len(tensor.elements)}{code}", *tensor.elements)
