"""A JSON object of a call's body: nothing unknown, nothing of a wrong type, no null that counts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from contract.errors import UnimplementedError
from router.http.json_text import excerpt


class Schema(BaseModel):
    """A JSON object. Strict: no string becomes a number, and true is not 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    unimplemented: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({})
    """Fields that are refused by name, each with the values that ask for nothing."""

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
