"""The loads of several schedulers as one."""

import dataclasses
from collections.abc import Sequence
from typing import Final

from router.domain import Load

_NO_SUMS: Final = ("block_size", "fragmentation", "host_fragmentation")
"""Of these the greatest is told."""


def add_up(loads: Sequence[Load]) -> Load:
    """How busy they are together; at least one."""
    names = [field.name for field in dataclasses.fields(Load)]
    columns = {name: [getattr(load, name) for load in loads] for name in names}
    return Load(**{name: (max if name in _NO_SUMS else sum)(of) for name, of in columns.items()})
