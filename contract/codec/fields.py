"""Copies fields between a protobuf message and a dataclass whose fields have the same names."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeAlias

from google.protobuf.message import Message

Converters: TypeAlias = Mapping[str, Callable[[Any], Any]]
"""Maps a field's name to a function that converts the value. A field without a function is copied
unchanged."""


def set_fields(message: Message, converters: Converters) -> dict[str, Any]:
    """Return the fields that are set in `message`, as keyword arguments for the dataclass."""
    return {
        descriptor.name: converters.get(descriptor.name, _same)(value)
        for descriptor, value in message.ListFields()
    }


def changed_fields(value: Any, converters: Converters) -> dict[str, Any]:
    """Return the non-default fields of `value`, as keyword arguments for the message."""
    changed = {}
    for field in fields(value):
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if (item := getattr(value, field.name)) is not None and item != default:
            changed[field.name] = converters.get(field.name, _same)(item)
    return changed


def _same(value: Any) -> Any:
    return value
