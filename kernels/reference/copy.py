"""Copies whole KV blocks within a pool, in plain torch.

Symbols: `B` blocks, `N` copies.
"""

import torch


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy block `src[i]` of `pool` [B, block_elems] onto block `dst[i]`, for all i at once.

    Every read happens before any write, so chains and swaps copy the old contents. `src` and
    `dst` are int64[N]; two equal `dst` are a caller's error and leave either content.
    """
    pool.index_copy_(0, dst, pool.index_select(0, src))
