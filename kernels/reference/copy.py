"""Copies whole KV blocks within a pool, and to and from a buffer, in plain torch.

Symbols: `B` blocks, `N` copies, `K` pieces of a block, `E` elements of a piece.
"""

import torch


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy block `src[i]` of `pool` [B, E] onto block `dst[i]`, for all i at once.

    All blocks are read before any block is written. So a block that is both a source and a
    destination is copied with its old contents. `src` and `dst` are int64[N]. Two equal numbers in
    `dst` are an error of the caller, and leave the block's contents undefined.
    """
    pool.index_copy_(0, dst, pool.index_select(0, src))


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy block `block_ids[i]` of `pool` to row i of `staged`, for all i.

    `pool` is [B, E], or [B, K, E] if a block consists of K pieces with any stride between them.
    `staged` is [N, E] or [N, K, E], and `block_ids` int64[N].
    """
    staged.copy_(pool.index_select(0, block_ids))


def scatter_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy row i of `staged` to block `block_ids[i]` of `pool`, for all i; see `gather_blocks`.

    Two equal `block_ids` are an error of the caller, and leave the block's contents undefined.
    """
    pool.index_copy_(0, block_ids, staged)
