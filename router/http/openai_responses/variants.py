"""Parses objects whose `type` says which fields they have; errors name the object."""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from contract.errors import InvalidArgumentError, UnimplementedError
from router.http.errors import error_from_validation
from router.http.strict_json import Schema, excerpt

Variant = TypeVar("Variant", bound=Schema)


def parse_variant(
    value: object, field: str, type_to_class: Mapping[str, type[Variant]], default: str = ""
) -> Variant:
    """Parse an object as the class for its `type`; errors call the object `field`.

    An object without `type` has the type `default`.

    Raises:
        InvalidArgumentError: The value is no object, or one of its fields is invalid.
        UnimplementedError: The object's type or one of its fields is not supported.
    """
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, f"is {excerpt(value)}; it must be an object")
    kind = value.get("type") or default
    found = type_to_class.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise UnimplementedError(
            f"{field}.type is {excerpt(kind)}; it must be one of {', '.join(type_to_class)}"
        )
    try:
        return found.model_validate(value)
    except ValidationError as error:
        problem = error_from_validation(error)
        raise InvalidArgumentError(f"{field}.{problem.field}", problem.problem) from error
    except UnimplementedError as error:
        raise UnimplementedError(f"{field}.{error}") from error
