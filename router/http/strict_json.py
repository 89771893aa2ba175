"""JSON to and from bytes, excerpts of it for errors, and strict objects of a call's body.

`pydantic_core` parses and writes: on one SSE chunk it takes a third of the time of `json.dumps`
(1.05 µs against 3.3), and a quarter of that of a pydantic model's `model_dump_json`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import from_json, to_json

from contract.errors import InvalidArgumentError, UnimplementedError

MAX_EXCERPT_CHARS = 80


def parse_json(body: bytes) -> object:
    """Parse a body; raises InvalidArgumentError if it is not JSON in UTF-8, or nested too deep."""
    try:
        value: object = from_json(body)
    except ValueError as error:
        raise InvalidArgumentError("body", f"is not valid JSON: {error}") from error
    return value


def json_bytes(value: object) -> bytes:
    """Write compact JSON in UTF-8."""
    return to_json(value)


def excerpt(value: object) -> str:
    """Return a value's JSON text, cut to a length that fits an error message."""
    if isinstance(value, str):  # cut first: the whole may be megabytes
        value = value[: MAX_EXCERPT_CHARS + 1]
        value = value.encode(errors="replace").decode()  # a header may not be UTF-8
    elif isinstance(value, list):
        value = value[: MAX_EXCERPT_CHARS // 2]
    text = to_json(value, fallback=repr).decode()
    return text if len(text) <= MAX_EXCERPT_CHARS else f"{text[:MAX_EXCERPT_CHARS]}…"


class Schema(BaseModel):
    """A JSON object: unknown fields are refused, null means unset, types are strict."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    unimplemented: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({})
    """Fields that are refused by name, unless they have one of these values."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        fields = {}
        for name, item in value.items():
            if item is None:
                continue
            if name not in cls.unimplemented:
                fields[name] = item
            elif not any(_same(item, neutral) for neutral in cls.unimplemented[name]):
                raise UnimplementedError(f"{name} is {excerpt(item)}; it is not supported")
        return fields


def _same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral  # 0 does not pass for false
