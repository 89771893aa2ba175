"""Makes a JSON schema a part of another schema."""

from collections.abc import Mapping
from typing import Any, Final

DATA: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose contents are not schemas."""
BY_NAME: Final = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords, such as "properties", whose contents map names to schemas. These names are not
keywords."""
_AT_ROOT: Final = ("$id", "id", "$schema")
"""Keywords of a whole schema. A schema that becomes a part of another schema loses these
keywords."""


def embedded(schema: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Return a copy of `schema` for use inside another schema, at the JSON pointer `place`."""
    return {
        name: value
        for name, value in with_refs_below(schema, place).items()
        if name not in _AT_ROOT or not isinstance(value, str)
    }


def with_refs_below(schema: Any, place: str) -> Any:
    """Return a schema, or a part of a schema, with `place` inserted in each `$ref`.

    For example, if `place` is "/$defs/parameters", "#/$defs/a" becomes
    "#/$defs/parameters/$defs/a".
    """
    if isinstance(schema, list):
        return [with_refs_below(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str):
            moved[name] = f"#{place}{value.removeprefix('#')}"
        elif name in BY_NAME and isinstance(value, Mapping):
            moved[name] = {key: with_refs_below(each, place) for key, each in value.items()}
        else:
            moved[name] = value if name in DATA else with_refs_below(value, place)
    return moved
