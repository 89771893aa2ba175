"""Copies whole KV blocks within a pool.

Symbols: `B` blocks, `N` copies, `E` elements of a block.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor

_COLUMNS: Final = 4096  # elements that one program copies


@triton.jit
def _copy_rows_kernel(
    source,  # [?, E]
    source_rows,  # int64[N]
    target,  # [?, E]
    target_rows,  # int64[N]
    source_stride,
    target_stride,
    E,
    COLUMNS: tl.constexpr,
):
    """`target[target_rows[i], e] = source[source_rows[i], e]`; one program per i and COLUMNS."""
    copy = tl.program_id(0)
    source_row = tl.load(source_rows + copy).to(tl.int64)
    target_row = tl.load(target_rows + copy).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < E
    row = tl.load(source + source_row * source_stride + column, mask=inside)
    tl.store(target + target_row * target_stride + column, row, mask=inside)


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy block `src[i]` of `pool` [B, E] onto block `dst[i]`, for all i at once.

    Every read happens before any write, so chains and swaps copy the old contents: the blocks
    pass through a buffer of N blocks. `src` and `dst` are int64[N]; two equal `dst` are a caller's
    error and leave either content. `pool` is of any dtype; the copy moves bits.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_tensor("pool", pool, (pool.shape[0], pool.shape[1]), pool.dtype, pool)
    num_copies = src.shape[0]
    check_tensor("src", src, (num_copies,), torch.int64, pool)
    check_tensor("dst", dst, (num_copies,), torch.int64, pool)
    words = _as_words(pool)
    block_words = words.shape[1]
    buffer = words.new_empty((num_copies, block_words))
    buffer_rows = torch.arange(num_copies, device=pool.device)
    grid = (num_copies, triton.cdiv(block_words, _COLUMNS))
    for source, source_rows, target, target_rows in (
        (words, src, buffer, buffer_rows),
        (buffer, buffer_rows, words, dst),
    ):
        _copy_rows_kernel[grid](
            source,
            source_rows,
            target,
            target_rows,
            source.stride(0),
            target.stride(0),
            block_words,
            COLUMNS=_COLUMNS,
        )


def _as_words(pool: torch.Tensor) -> torch.Tensor:
    """Return `pool` seen as the widest integers that its rows and their addresses are made of."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(
            size * pool.element_size() % dtype.itemsize == 0
            for size in (pool.shape[1], pool.stride(0), pool.storage_offset())
        ):
            return pool.view(dtype)
    return pool.view(torch.uint8)
