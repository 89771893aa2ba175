"""Reads typed fields of a model directory's JSON files, with errors that name file and field."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model_files.errors import ModelError, UnsupportedError

__all__ = ["JsonFields", "ModelError", "UnsupportedError", "read_json"]


@dataclass(frozen=True, slots=True)
class JsonFields:
    """The fields of a JSON object. A null field counts as absent.

    Every getter except `get` raises ModelError for a value of the wrong type, and for an absent
    field without a default.
    """

    path: Path
    prefix: str
    """Path to this object from the file's root, such as "rope_scaling."; empty at the root."""
    values: Mapping[str, object]

    def error(self, name: str, problem: str) -> ModelError:
        """Make an error to raise; its message names file and field, and ends with `problem`."""
        return ModelError(f"{self.path}: {self.prefix}{name} {problem}")

    def unsupported(self, name: str, problem: str) -> UnsupportedError:
        """Make an error for a feature that Quire's model code lacks; `transformers` may have it."""
        return UnsupportedError(str(self.error(name, problem)))

    def has(self, name: str) -> bool:
        """Whether the field exists, even if null."""
        return name in self.values

    def get(self, name: str, default: object = None) -> object:
        """Return the field, unchecked."""
        value = self.values.get(name)
        return default if value is None else value

    def allow_only(self, name: str, supported: object) -> None:
        """Raise UnsupportedError unless the field equals `supported` or is absent."""
        if (value := self.get(name, supported)) != supported:
            raise self.unsupported(name, f"is {value!r}; only {supported!r} is supported")

    def positive_int(self, name: str, default: int | None = None) -> int:
        """Return an integer, at least 1."""
        value = self._required(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"is {value!r}; it must be a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self._required(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(name, f"is {value!r}; it must be a positive number")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}; it must be true or false")
        return value

    def int_list(self, name: str) -> list[int]:
        """Return a list of integers, all at least 0; a single integer counts as a list of one.

        The list is empty if the field is absent.
        """
        value = self.get(name, default=[])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in items):
            raise self.error(name, f"is {value!r}; it must be integers of 0 or more")
        return list(items)

    def nested(self, name: str) -> "JsonFields":
        """Return a nested object; empty if absent."""
        value = self.get(name, default={})
        if not isinstance(value, dict):
            raise self.error(name, f"is {value!r}; it must be an object")
        return JsonFields(self.path, f"{self.prefix}{name}.", value)

    def _required(self, name: str, default: object) -> object:
        value = self.get(name, default)
        if value is None:
            raise self.error(name, "is missing")
        return value


def read_json(path: Path) -> JsonFields:
    """Return the object in a JSON file; raises ModelError if the file does not hold an object."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return JsonFields(path, "", values)
