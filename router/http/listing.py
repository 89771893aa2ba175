"""Pages of lists, as in OpenAI's API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.errors import InvalidArgumentError
from router.http.answers.objects import Json
from router.http.strict_json import excerpt

_DEFAULT_LIMIT = 20
_MAX_NUMBER_DIGITS = 9


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which entries of a list a client wants."""

    limit: int
    after: str | None = None
    """The id of the entry before the first one on the page."""
    is_ascending: bool = False
    """Whether the oldest entries come first."""

    def missing(self) -> InvalidArgumentError:
        """Return the error for an `after` that is not an entry's id."""
        return InvalidArgumentError("after", f"is {excerpt(self.after)}; no entry has that id")


def page_query(query: Mapping[str, str], *, most: int, default: int = _DEFAULT_LIMIT) -> PageQuery:
    """Read a query's `limit`, `after` and `order`; may raise InvalidArgumentError.

    `most` is the highest `limit`.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidArgumentError("order", f"is {excerpt(order)}; it must be asc or desc")
    limit = integer(query, "limit", default, least=1, most=most)
    return PageQuery(limit, query.get("after"), order == "asc")


def page(items: Sequence[Json], query: Mapping[str, str], *, most: int) -> dict[str, Any]:
    """Return the page of `items` that a query selects; `items` is sorted, newest first."""
    wanted = page_query(query, most=most)
    listed = items[::-1] if wanted.is_ascending else items
    if wanted.after is not None:
        ids = [item["id"] for item in listed]
        if wanted.after not in ids:
            raise wanted.missing()
        listed = listed[ids.index(wanted.after) + 1 :]
    return page_json(listed, wanted)


def page_json(listed: Sequence[Json], wanted: PageQuery) -> dict[str, Any]:
    """Return a page as JSON, without the entries of `listed` beyond the limit."""
    shown = listed[: wanted.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(listed) > wanted.limit,
    }


def integer(query: Mapping[str, str], name: str, default: int, *, least: int, most: int) -> int:
    """Return an integer parameter of the query; may raise InvalidArgumentError."""
    if (text := query.get(name)) is None:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_NUMBER_DIGITS):
        raise InvalidArgumentError(name, f"is {excerpt(text)}; it must be an integer")
    if not least <= int(text) <= most:
        raise InvalidArgumentError(name, f"is {text}; it must be in [{least}, {most}]")
    return int(text)
