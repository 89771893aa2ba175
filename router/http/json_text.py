"""JSON to and from bytes, and the excerpts of it that errors quote.

`pydantic_core` does both: on one SSE chunk it takes a third of the time of `json.dumps` (1.05 µs
against 3.3), and a quarter of a pydantic model's `model_dump_json`.
"""

from pydantic_core import from_json, to_json

from contract.errors import InvalidArgumentError

MAX_EXCERPT_CHARS = 80


def parse_json(body: bytes) -> object:
    """Parse a body; raises InvalidArgumentError if it is not JSON in UTF-8, or nested too deep."""
    try:
        value: object = from_json(body)
    except ValueError as error:
        raise InvalidArgumentError("body", f"is not valid JSON: {error}") from error
    return value


def json_bytes(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    return to_json(value)


def excerpt(value: object) -> str:
    """A value as its JSON text, cut to a length that fits an error message."""
    if isinstance(value, str):  # cut first: the whole may be megabytes
        value = value[: MAX_EXCERPT_CHARS + 1]
        value = value.encode(errors="replace").decode()  # a header's bytes may be no UTF-8
    elif isinstance(value, list):
        value = value[: MAX_EXCERPT_CHARS // 2]
    text = to_json(value, fallback=repr).decode()
    return text if len(text) <= MAX_EXCERPT_CHARS else f"{text[:MAX_EXCERPT_CHARS]}…"
