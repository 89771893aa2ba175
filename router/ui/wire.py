"""Converts URL queries to protobuf, and messages to JSON values for the page.

Fields are named as in the protos. Bytes are base64. An enum's value is its name in lower case
without the enum's prefix. There may be many steps and sequences, so these are sent as columns: one
list of values for each field.
"""

import base64
import re
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from contract.errors import InvalidArgumentError
from quire.v1.common_pb2 import StepRecord, WorkerActivity
from quire.v1.kv_pb2 import SequenceKv, WorkerKv

Query = TypeVar("Query", bound=Message)

_MAX_SHOWN: Final = 64


def query_from_url(kind: type[Query], parameters: Mapping[str, str]) -> Query:
    """Make a query from a URL's parameters, which are named like the query's fields.

    Raises:
        InvalidArgumentError: The query has no field with the name of a parameter, or a parameter's
            value does not fit the field's type.
    """
    query = kind()
    for name, text in parameters.items():
        field = kind.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            raise InvalidArgumentError(
                name[:_MAX_SHOWN], f"is {text[:_MAX_SHOWN]!r}; there is no such field"
            )
        try:
            setattr(query, name, _parse(field.cpp_type, text))
        except ValueError:  # also raised by protobuf for a number out of range
            expected = _CPP_TYPE_TO_WORDS[field.cpp_type]
            raise InvalidArgumentError(
                name, f"is {text[:_MAX_SHOWN]!r}; it must be {expected}"
            ) from None
    return query


def message_to_json(message: Message, without: str = "") -> dict[str, Any]:
    """Convert a message, with its nested messages, to JSON values; leaves out field `without`."""
    return {
        field.name: _to_json(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if field.name != without
    }


def kv_to_json(worker: WorkerKv) -> dict[str, Any]:
    """Convert a worker's KV to JSON values; each field of its `sequences` becomes one list."""
    return _with_columns(worker, "sequences", SequenceKv)


def activity_to_json(worker: WorkerActivity) -> dict[str, Any]:
    """Convert a worker's activity to JSON values; each field of its `steps` becomes one list."""
    return _with_columns(worker, "steps", StepRecord)


def _with_columns(message: Message, many: str, kind: type[Message]) -> dict[str, Any]:
    rows = getattr(message, many)
    columns = {
        field.name: _column(field, list(map(attrgetter(field.name), rows)))
        for field in kind.DESCRIPTOR.fields
    }
    return {**message_to_json(message, without=many), many: columns}


def _column(field: Any, values: list[Any]) -> list[Any]:
    """Convert the values of one field to JSON values."""
    if field.enum_type is not None:
        names = _value_names(field.enum_type)
        return [names[value] for value in values]
    if values and isinstance(values[0], bytes):
        return [base64.b64encode(value).decode() for value in values]
    return values


_CPP_TYPE_TO_WORDS: Final = {
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_UINT32: "an integer in [0, 2**32 - 1]",
    FieldDescriptor.CPPTYPE_UINT64: "an integer in [0, 2**64 - 1]",
}


def _parse(cpp_type: int, text: str) -> object:
    match cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return text
        case FieldDescriptor.CPPTYPE_BOOL if text in ("true", "false"):
            return text == "true"
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_UINT64 if text.isdecimal():
            return int(text)
    raise ValueError


def _to_json(field: Any, value: Any) -> object:  # protobuf has two types of descriptors
    match value:
        case Message():
            return message_to_json(value)
        case bytes():
            return base64.b64encode(value).decode()
        case int() if field.enum_type is not None:
            return _value_names(field.enum_type)[value]
        case str() | int() | float():
            return value
        case _:
            return [message_to_json(each) for each in value]


@cache
def _value_names(enum: EnumDescriptor) -> Mapping[int, str]:
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    return {value.number: value.name.removeprefix(prefix).lower() for value in enum.values}
