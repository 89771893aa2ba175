"""The tile sizes for linear maps, and the choice among them by the number of rows.

The choice depends only on the numbers of rows and maps, which the host knows. In a captured graph
both numbers are fixed, so the graph uses the same tile size in each replay. None of the sizes was
measured. This module does not import Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class TileSizes:
    rows: int
    columns: int
    inputs: int
    """How many input features are multiplied at once."""
    num_warps: int
    num_stages: int


ANY_ROWS: Final = TileSizes(64, 64, 64, 4, 3)
"""The tile size for maps that use one size for any number of rows. The tiles have few columns,
so that even a launch with a single row has enough tiles to occupy many processors."""
BY_ROWS: Final = (
    TileSizes(16, 64, 128, 4, 4),
    TileSizes(64, 128, 64, 8, 3),
    TileSizes(128, 128, 64, 8, 3),
)
FLOAT32_BY_ROWS: Final = (
    TileSizes(16, 64, 64, 4, 4),
    TileSizes(64, 128, 64, 8, 3),
    TileSizes(128, 128, 32, 8, 3),
)
"""Tile sizes for fp32 weights. Two of these tiles have fewer input features than those of
`BY_ROWS`, so that they fit into 99 KiB of shared memory without spills."""


def choose(choices: Sequence[TileSizes], num_rows: int, num_maps: int = 1) -> TileSizes:
    """Return the first tile size with room for `num_rows / num_maps` rows, or else the last one.

    A launch may compute several maps, for example experts. Only the device knows how many of the
    rows belong to each map, so the choice goes by the average, `num_rows / num_maps`.
    """
    return next((each for each in choices if num_rows <= each.rows * num_maps), choices[-1])


def fewest_rows(num_maps: int = 1) -> tuple[int, ...]:
    """Return, for each size in `BY_ROWS`, the least number of rows for which it is chosen."""
    return (1, *(each.rows * num_maps + 1 for each in BY_ROWS[:-1]))
