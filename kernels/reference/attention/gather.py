"""Reads a sequence's keys and values from their blocks, for attention in plain torch.

Symbols: `HKV` kv heads, `D` head dim of keys or of values, `B` blocks, `P` block size, `M` max
blocks per sequence.
"""

from typing import Any

import numpy.typing as npt
import torch

from kernels.reference.quantized_kv import dequantize

# Integers of the same size are used, because numpy has no bfloat16, and torch cannot index float8.
_SAME_SIZE_INT = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
}


class KvGather:
    """Reads sequences from one layer's caches, each cache [B, P, HKV, D].

    If scales [B, P, HKV] are given, the caches are quantized, and `read` converts to `dtype`.
    """

    def __init__(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        key_scales: torch.Tensor | None,
        value_scales: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._key_blocks, self._value_blocks = _Blocks(key_cache), _Blocks(value_cache)
        self._key_scales = None if key_scales is None else _Blocks(key_scales)
        self._value_scales = None if value_scales is None else _Blocks(value_scales)
        self._dtype = dtype
        self._block_size = key_cache.shape[1]

    def read(
        self, block_table: torch.Tensor, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of positions [start, end).

        Keys and values are each [1, HKV, end - start, D].

        `block_table` is int32[M].
        """
        first_block = start // self._block_size
        blocks = block_table[first_block : -(-end // self._block_size)]
        skipped = first_block * self._block_size
        slots = slice(start - skipped, end - skipped)
        return (
            self._read(self._key_blocks, self._key_scales, blocks, slots),
            self._read(self._value_blocks, self._value_scales, blocks, slots),
        )

    def _read(
        self, cache: "_Blocks", scales: "_Blocks | None", blocks: torch.Tensor, slots: slice
    ) -> torch.Tensor:
        """Return [1, HKV, *, D]: the keys or values of some positions in `blocks`.

        `slots` selects the positions, counted from the start of the first block.
        """
        read = cache.read(blocks).flatten(0, 1)[slots]  # [slots, HKV, D]
        if scales is not None:
            read = dequantize(read, scales.read(blocks).flatten(0, 1)[slots], self._dtype)
        return read.transpose(0, 1).unsqueeze(0)


class _Blocks:
    """Copies blocks of one cache [B, P, HKV, ...] by their numbers.

    A block is contiguous, and blocks are far apart. numpy copies each block as a whole, but torch
    copies it element by element. For ten blocks of 8 kB, numpy takes 3 microseconds and torch 46.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache = cache
        self._rows: npt.NDArray[Any] | None = None
        if cache.device.type == "cpu" and cache[:1].is_contiguous():
            self._rows = cache.flatten(1).view(_SAME_SIZE_INT[cache.itemsize]).numpy()

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the blocks with the numbers `blocks`, int32[N], as [N, P, HKV, ...]."""
        if self._rows is None:
            as_ints = self._cache.view(_SAME_SIZE_INT[self._cache.itemsize])
            return as_ints.index_select(0, blocks).view(self._cache.dtype)
        copied = torch.from_numpy(self._rows[blocks.numpy()])
        return copied.view(self._cache.dtype).view(-1, *self._cache.shape[1:])
