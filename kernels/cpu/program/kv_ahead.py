"""Plans which keys and values each linear map of a decoder's program prefetches.

A linear map of many rows hardly uses the memory's bandwidth, while attention of many short
sequences mostly waits for memory. So the maps between two attention calls prefetch KV that the
second call will read. A map multiplies a tile of rows with a panel of its weight (32 output
features) at a time. Each of these products prefetches some *runs*, which are parts of a block's
keys or values (`src/kv_ahead.h`). The products of a map's first tile prefetch nothing, because the
first tile reads the weight from memory. No result depends on what is prefetched.
"""

from collections.abc import Hashable, Mapping
from typing import Final, NamedTuple, TypeVar

from kernels.cpu.library import KernelCall

_Place = TypeVar("_Place", bound=Hashable)

RUN_STEPS: Final = 128
"""A product prefetches one run for every 128 pairs of its input features. If fewer than 128 pairs
remain, they add no run. C uses the same number."""
MAX_RUNS: Final = 256
"""A product that would prefetch more runs than this prefetches nothing. C uses the same limit."""
PANEL: Final = 32
"""A panel, the part of a weight that enters one product, has this many output features. C uses the
same number."""


class KvAhead(NamedTuple):
    """The part of an attention call's memory that one map prefetches: C's `struct kv_part`."""

    attention: KernelCall | int
    """The attention call; 0: the map prefetches nothing."""
    num_runs: int
    """The limit on runs that this map prefetches during each tile of rows after the first."""
    num_runs_after: int
    """How many runs per tile are prefetched by later maps: those between this map and the attention
    call. This map does not prefetch these runs."""


NOTHING_AHEAD: Final = KvAhead(0, 0, 0)


def share_out(
    attention: KernelCall, maps: Mapping[_Place, tuple[int, int]]
) -> dict[_Place, KvAhead]:
    """Choose what each map prefetches of the keys and values that `attention` reads.

    `maps` has the maps that run before `attention`, in the order in which they run, each with its
    numbers of input and output features. The later a run is prefetched, the likelier it is still
    in a cache when `attention` reads it. So the map right before `attention` prefetches as many
    runs as it can, and the earlier maps prefetch the runs that are left.
    """
    aheads: dict[_Place, KvAhead] = {}
    num_after = 0
    for place, (num_in, num_out) in reversed(list(maps.items())):
        of_product = -(-num_in // 2) // RUN_STEPS
        num_runs = -(-num_out // PANEL) * of_product if of_product <= MAX_RUNS else 0
        aheads[place] = KvAhead(attention, num_runs, num_after)
        num_after += num_runs
    return aheads
