"""Checks of what came from another process; each error names field, value and limit."""

import numpy as np

from contract.errors import InvalidArgumentError
from quire.v1 import common_pb2
from scheduler_svc.core.plan import Int32Array


def check_at_most(field: str, value: int, most: int) -> None:
    """Raise unless a number, or a number of entries, is at most `most`."""
    if value > most:
        raise InvalidArgumentError(field, f"is or has {value}; the limit is {most}")


def check_below(values: Int32Array, field: str, limit: int, limit_name: str) -> None:
    """Raise unless all `values` are in [0, limit)."""
    # Read as unsigned, a negative number is a huge one: one comparison finds both kinds of error.
    if values.size and int(np.maximum.reduce(values.view(np.uint32))) >= limit:
        index = int(values.view(np.uint32).argmax())
        raise InvalidArgumentError(
            f"{field}[{index}]",
            f"is {values[index]}; it must be in [0, {limit}), by {limit_name}",
        )


def check_top_tokens(logprob: common_pb2.TokenLogprob, field: str, vocab_size: int) -> None:
    """Raise unless the likeliest tokens are the model's, and each has a log-probability."""
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
