"""Checks of packed integers that came from another process."""

import numpy as np

from rpc.errors import InvalidArgumentError
from scheduler_svc.core.plan import Int32Array


def check_below(values: Int32Array, field: str, limit: int, limit_name: str) -> None:
    """Raise unless all `values` are in [0, limit)."""
    # Read as unsigned, a negative number is a huge one: one comparison finds both kinds of error.
    if values.size and int(values.view(np.uint32).max()) >= limit:
        index = int(values.view(np.uint32).argmax())
        raise InvalidArgumentError(
            f"{field}[{index}]",
            f"is {values[index]}; it must be in [0, {limit}), by {limit_name}",
        )
