"""Copies whole KV blocks within a pool, and between a pool and a buffer of blocks.

Symbols: `B` blocks, `N` copies, `K` pieces of a block, `E` elements of a piece.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor

_COLUMNS: Final = 4096  # elements of one program


@triton.jit(
    do_not_specialize_on_alignment=["source_ids", "target_ids"],
)
def _copy_blocks_kernel(
    source,  # [B, K, E]; [N, K, E] without ids
    source_ids,  # int64[N], or None: 0 to N - 1
    target,  # as source
    target_ids,  # as source_ids
    source_stride,
    source_stride_k,
    target_stride,
    target_stride_k,
    E,
    COLUMNS: tl.constexpr,
):
    """`target[target_ids[i], k, e] = source[source_ids[i], k, e]`.

    Each program copies COLUMNS elements for one i and one k.
    """
    copy = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    source_id = copy if source_ids is None else tl.load(source_ids + copy)
    target_id = copy if target_ids is None else tl.load(target_ids + copy)
    column = tl.program_id(2).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < E
    source_piece = source + source_id * source_stride + piece * source_stride_k
    target_piece = target + target_id * target_stride + piece * target_stride_k
    tl.store(target_piece + column, tl.load(source_piece + column, mask=inside), mask=inside)


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy block `src[i]` of `pool` [B, E] onto block `dst[i]`, for all i at once.

    The blocks pass through a buffer of N blocks, so all blocks are read before any block is
    written. So a block that is both a source and a destination is copied as it was before the call.
    `src` and `dst` are int64[N]. Two equal numbers in `dst` are an error of the caller, and leave
    the block's contents undefined. `pool` may have any dtype, because bits are copied.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_tensor("pool", pool, (pool.shape[0], pool.shape[1]), pool.dtype, pool)
    num_copies = src.shape[0]
    check_tensor("src", src, (num_copies,), torch.int64, pool)
    check_tensor("dst", dst, (num_copies,), torch.int64, pool)
    staged = pool.new_empty((num_copies, pool.shape[1]))
    _copy(pool, src, staged, None, num_copies)
    _copy(staged, None, pool, dst, num_copies)


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy block `block_ids[i]` of `pool` to row i of `staged`, for all i, for a swap-out.

    `pool` is [B, E] if each block is contiguous. If a block consists of K pieces that are apart, as
    in a pool that stores the KV layer by layer, `pool` is [B, K, E]. `staged` is [N, E] or
    [N, K, E] to match `pool`. All strides except the last may be any. `block_ids` is int64[N].
    After the copy, one DMA transfers `staged`, instead of N * K DMAs of one piece each.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    _check_staged(pool, block_ids, staged)
    _copy(pool, block_ids, staged, None, block_ids.shape[0])


def scatter_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy row i of `staged` to block `block_ids[i]` of `pool`, for all i; see `gather_blocks`.

    Two equal `block_ids` are an error of the caller, and leave the block's contents undefined.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    _check_staged(pool, block_ids, staged)
    _copy(staged, None, pool, block_ids, block_ids.shape[0])


def _check_staged(pool: torch.Tensor, block_ids: torch.Tensor, staged: torch.Tensor) -> None:
    if pool.dim() not in (2, 3):
        raise ValueError(f"pool has {pool.dim()} dimensions, required are 2 or 3")
    check_tensor("pool", pool, tuple(pool.shape), pool.dtype, pool)
    check_tensor("block_ids", block_ids, (block_ids.shape[0],), torch.int64, pool)
    check_tensor("staged", staged, (block_ids.shape[0], *pool.shape[1:]), pool.dtype, pool)


def _copy(
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    num_copies: int,
) -> None:
    """Launch the kernel for `source` and `target` of two or three dimensions."""
    if source.dim() == 2:  # noqa: PLR2004
        source, target = source.unsqueeze(1), target.unsqueeze(1)
    dtype = _widest_word(source, target)
    source, target = source.view(dtype), target.view(dtype)
    _, num_pieces, num_words = source.shape
    _copy_blocks_kernel[(num_copies, num_pieces, triton.cdiv(num_words, _COLUMNS))](
        source,
        source_ids,
        target,
        target_ids,
        *source.stride()[:2],
        *target.stride()[:2],
        num_words,
        COLUMNS=_COLUMNS,
    )


def _widest_word(*tensors: torch.Tensor) -> torch.dtype:
    """Return the widest integer dtype in which all tensors can be copied.

    The dtype's size divides the row sizes, strides and offsets of all tensors, in bytes.
    """
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(
            size * tensor.element_size() % dtype.itemsize == 0
            for tensor in tensors
            for size in (tensor.shape[-1], *tensor.stride()[:-1], tensor.storage_offset())
        ):
            return dtype
    return torch.uint8
