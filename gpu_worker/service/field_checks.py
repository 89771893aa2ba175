"""Checks of a message's fields; each raises InvalidArgumentError with field, value and limit."""

import numpy as np

from contract.errors import InvalidArgumentError
from gpu_worker.step.messages import Int32Array


def require_parallel(field: str, values: Int32Array, other: str, others: Int32Array) -> None:
    """Check that there is a value for each of `others`."""
    if len(values) != len(others):
        raise InvalidArgumentError(
            field, f"has {len(values)} entries; it must have one for each of {other}, {len(others)}"
        )


def require_range(field: str, values: Int32Array, least: int, most: int) -> None:
    """Check that each value is in [least, most]."""
    if not values.size:  # most fields of most batches: numpy takes 20 µs to find that out
        return
    wrong = (values < least) | (values > most)
    if wrong.any():
        value = values[np.argmax(wrong)]
        raise InvalidArgumentError(field, f"has {value}; values must be in [{least}, {most}]")


def require_distinct(field: str, values: Int32Array) -> None:
    """Check that no value occurs twice."""
    if len(values) > 1:
        ordered = np.sort(values)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            value = ordered[np.argmax(twice)]
            raise InvalidArgumentError(field, f"has {value} twice; each may occur once")


def require_number(field: str, value: float, least: float, most: float) -> None:
    """Check that a number is in [least, most], which NaN is not."""
    if not least <= value <= most:  # false for NaN
        raise InvalidArgumentError(field, f"is {value}; it must be in [{least}, {most}]")


def require_positive(field: str, value: float, most: float) -> None:
    """Check that a number is in (0, most], which NaN is not."""
    if not 0 < value <= most:  # false for NaN
        raise InvalidArgumentError(field, f"is {value}; it must be in (0, {most}]")


def require_count(field: str, count: int, least: int, most: int) -> None:
    """Check how many entries there are."""
    if not least <= count <= most:
        raise InvalidArgumentError(field, f"has {count} entries; it must have {least} to {most}")


def require_size(field: str, value: bytes, most: int) -> None:
    """Check how many bytes there are."""
    if len(value) > most:
        raise InvalidArgumentError(field, f"has {len(value)} bytes; it must have at most {most}")
