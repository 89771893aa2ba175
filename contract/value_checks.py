"""Checks of values against limits; each error names the field, the value and the limit."""

from collections.abc import Sequence

from contract.errors import InvalidArgumentError


def check_range(
    field: str, value: float, least: float, most: float, *, open_below: bool = False
) -> None:
    """Check that a number is in [least, most], or with `open_below` in (least, most]."""
    # These comparisons refuse NaN, which compares false with everything.
    if (least < value if open_below else least <= value) and value <= most:
        return
    bracket = "(" if open_below else "["
    raise InvalidArgumentError(field, f"is {value}; it must be in {bracket}{least}, {most}]")


def check_count(field: str, count: int, most: int) -> None:
    """Check that there are at most `most` entries."""
    if count > most:
        raise InvalidArgumentError(field, f"has {count} entries; it must have at most {most}")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Check that all token ids are in the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidArgumentError(
                f"{field}[{i}]", f"is {token_id}; it must be in [0, {vocab_size})"
            )


def check_unicode(field: str, text: str) -> int:
    """Check that a text is valid Unicode; return its length in UTF-8 bytes."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        # JSON can escape half of a surrogate pair, which no encoding can represent.
        raise InvalidArgumentError(
            field,
            f"has U+{ord(text[error.start]):04X} at {error.start}, half of a surrogate pair;"
            " it must be valid Unicode",
        ) from None


def check_chars(field: str, text: str, most: int) -> None:
    """Check that a text is valid Unicode of at most `most` characters."""
    if len(text) > most:
        raise InvalidArgumentError(
            field, f"has {len(text)} characters; it must have at most {most}"
        )
    check_unicode(field, text)
