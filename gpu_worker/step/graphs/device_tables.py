"""The rows' block tables on the device: a step sends only the entries that the device lacks.

Symbols: `R` rows, `G` KV groups, `M` blocks of the longest block table, `N` rows of a step.
"""

import numpy as np
import torch

from contract.arrays import Int32Array, Int64Array
from contract.worker_limits import Limits
from gpu_worker.step.rows import Rows


class DeviceTables:
    """The device's copies of block tables, for the rows that steps have computed."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        num_rows, num_groups = limits.max_num_seqs, len(limits.kv_windows)
        self._num_groups = num_groups
        self._width = limits.max_blocks_per_row
        self._tables = torch.zeros(
            num_groups, num_rows, self._width, dtype=torch.int32, device=device
        )
        self._versions = np.full(num_rows, -1)
        """The `Rows.table_version` of each table on the device."""
        self._num_blocks = np.zeros(num_rows, np.int64)
        """How many entries of each row's table the device has, for each KV group."""

    def news(self, rows: Rows, which: Int64Array) -> tuple[()] | tuple[Int64Array, Int32Array]:
        """Return the entries of rows `which`, int64[N], that the device lacks.

        Returns:
            int64[K], the entries' indexes in the flattened tables; and int32[K], their blocks.
            Empty if there are none.
        """
        is_known = self._versions[which] == rows.table_version[which]
        firsts = np.where(is_known, self._num_blocks[which], 0)
        lens = rows.num_blocks[which] - firsts
        if not lens.any():  # true in most steps of few rows
            return ()
        row = np.repeat(which, lens)
        ends = np.cumsum(lens)
        block = np.arange(len(row)) - np.repeat(ends - lens - firsts, lens)
        group = np.arange(self._num_groups)[:, None]
        places = (group * len(self._versions) + row) * self._width + block  # [G, K / G]
        return places.ravel(), rows.block_tables[row, block * self._num_groups + group].ravel()

    def write(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write entries that `news` returned; operations that are launched later see them."""
        self._tables.view(-1).index_copy_(0, places, blocks)

    def know(self, rows: Rows, which: Int64Array) -> None:
        """Remember that the device now has all entries of rows `which`."""
        self._versions[which] = rows.table_version[which]
        self._num_blocks[which] = rows.num_blocks[which]

    def gather(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the first columns of the tables of `rows` to `out`.

        `rows` is int64[N]; `out` is int32[G, N, columns].
        """
        torch.index_select(self._tables[..., : out.shape[2]], 1, rows, out=out)
