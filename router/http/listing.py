"""Pages of lists, as in OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import Any

from contract.errors import InvalidArgumentError
from router.http.answers.objects import Json
from router.http.strict_json import excerpt

_DEFAULT_LIMIT = 20
_MAX_NUMBER_DIGITS = 9


def page(items: Sequence[Json], query: Mapping[str, str], *, most: int) -> dict[str, Any]:
    """Return the page that the query's `limit`, `after` and `order` select.

    `items` is sorted, newest first; `most` is the highest `limit`.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidArgumentError("order", f"is {excerpt(order)}; it must be asc or desc")
    limit = integer(query, "limit", _DEFAULT_LIMIT, least=1, most=most)
    listed = items if order == "desc" else items[::-1]
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise InvalidArgumentError("after", f"is {excerpt(after)}; no entry has that id")
        listed = listed[ids.index(after) + 1 :]
    shown = listed[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(listed) > limit,
    }


def integer(query: Mapping[str, str], name: str, default: int, *, least: int, most: int) -> int:
    """Return an integer parameter of the query; raises InvalidArgumentError."""
    if (text := query.get(name)) is None:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_NUMBER_DIGITS):
        raise InvalidArgumentError(name, f"is {excerpt(text)}; it must be an integer")
    if not least <= int(text) <= most:
        raise InvalidArgumentError(name, f"is {text}; it must be in [{least}, {most}]")
    return int(text)
