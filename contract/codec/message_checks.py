"""Checks of messages from other processes.

A check that fails raises InvalidArgumentError, which names the field, the value and the limit.
"""

from collections.abc import Sized

import numpy as np

from contract.arrays import Int32Array, Labels
from contract.errors import InvalidArgumentError
from contract.hashing import HASH_BYTES
from quire.v1 import common_pb2


def check_number(field: str, value: float, least: float, most: float) -> None:
    """Check that a number is in [least, most]; NaN is refused."""
    if not least <= value <= most:  # false for NaN
        raise InvalidArgumentError(field, f"is {value}; it must be in [{least}, {most}]")


def check_positive(field: str, value: float, most: float) -> None:
    """Check that a number is in (0, most]; NaN is refused."""
    if not 0 < value <= most:  # false for NaN
        raise InvalidArgumentError(field, f"is {value}; it must be in (0, {most}]")


def check_num_entries(field: str, count: int, least: int, most: int) -> None:
    """Check that the number of entries is in [least, most]."""
    if not least <= count <= most:
        raise InvalidArgumentError(field, f"has {count} entries; it must have {least} to {most}")


def check_at_most(field: str, value: int, most: int) -> None:
    """Check that a number, or a number of entries, is at most `most`."""
    if value > most:
        raise InvalidArgumentError(field, f"is or has {value}; the limit is {most}")


def check_size(field: str, value: bytes, most: int) -> None:
    """Check that `value` has at most `most` bytes."""
    if len(value) > most:
        raise InvalidArgumentError(field, f"has {len(value)} bytes; it must have at most {most}")


def check_values(field: str, values: Int32Array, least: int, most: int) -> None:
    """Check that all values are in [least, most]."""
    if not values.size:
        return
    if least <= int(np.minimum.reduce(values)) and int(np.maximum.reduce(values)) <= most:
        return
    index = int(np.argmax((values < least) | (values > most)))
    raise InvalidArgumentError(
        f"{field}[{index}]", f"is {values[index]}; it must be in [{least}, {most}]"
    )


def check_distinct(field: str, values: Int32Array) -> None:
    """Check that no value occurs twice."""
    if len(values) > 1:
        ordered = np.sort(values)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            value = ordered[np.argmax(twice)]
            raise InvalidArgumentError(field, f"has {value} twice; each may occur once")


def check_parallel(field: str, values: Sized, other: str, others: Sized) -> None:
    """Check that `values` and `others` have the same length."""
    if len(values) != len(others):
        raise InvalidArgumentError(
            field, f"has {len(values)} entries; it must have one for each of {other}, {len(others)}"
        )


def unpack_labels(packed: bytes, field: str, other: str, count: int) -> Labels:
    """Unpack `count` labels, one for each entry of the field `other`, without a copy."""
    if len(packed) != HASH_BYTES * count:
        raise InvalidArgumentError(
            field,
            f"has {len(packed)} bytes; it must have {HASH_BYTES} for each of {other}, {count}",
        )
    return np.frombuffer(packed, np.uint8).reshape(count, HASH_BYTES)


def check_top_tokens(logprob: common_pb2.TokenLogprob, field: str, vocab_size: int) -> None:
    """Check that all `top_token_ids` are in the vocabulary and have `top_logprobs`."""
    token_ids = logprob.top_token_ids
    if len(token_ids) != len(logprob.top_logprobs):
        raise InvalidArgumentError(
            f"{field}.top_logprobs",
            f"has {len(logprob.top_logprobs)} entries; it must have {len(token_ids)}",
        )
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidArgumentError(
            f"{field}.top_token_ids", f"has {max(token_ids)}; ids must be below {vocab_size}"
        )
