"""Which keys and values each linear map of a native program asks of memory while it computes.

With many rows a linear map leaves memory idle, and attention of many short sequences waits for
little else. So the maps between two attentions fetch what the second one will read, while they
compute their rows but the first few (`src/kv_ahead.h`). No result depends on it.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from kernels.cpu.library import Call, Field

_Place = TypeVar("_Place", bound=Hashable)

RUN_STEPS: Final = 128
"""Pairs of input features that a product multiplies, at least, while it fetches a run; as in C."""
MAX_RUNS: Final = 256
"""A product that would fetch more fetches none; as in C."""
PANEL: Final = 32
"""Output features that lie together in a packed weight, and of a product; as in C."""


@dataclass(frozen=True, slots=True, eq=False)
class KvAhead:
    """What one map fetches of what `attention` reads."""

    attention: Call
    num_runs: int
    """At most, with each tile of rows but the first."""
    num_runs_after: int
    """Of the maps between this one and the attention: theirs come later, so they go first."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """As C knows it."""
        return self.attention, self.num_runs, self.num_runs_after


NO_FIELDS: Final = (0, 0, 0)
"""Of a map that fetches nothing for later."""


def share_out(attention: Call, maps: Mapping[_Place, tuple[int, int]]) -> dict[_Place, KvAhead]:
    """What each of the maps before `attention`, in their order, fetches of what that reads.

    Of a map its input and output features are given.
    """
    aheads: dict[_Place, KvAhead] = {}
    num_after = 0
    for place, (num_in, num_out) in reversed(list(maps.items())):
        of_product = num_in // 2 // RUN_STEPS
        num_runs = -(-num_out // PANEL) * of_product if of_product <= MAX_RUNS else 0
        aheads[place] = KvAhead(attention, num_runs, num_after)
        num_after += num_runs
    return aheads
