"""Linear maps for groups of rows: each row uses one map, an expert's or a LoRA adapter's.

Symbols: `R` rows that are mapped, `G` maps, `K` input features, `N` output features.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  Triton infers the types inside kernels

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import check_float, check_tensor
from kernels.grouped_maps import GroupedMaps


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile sizes of the products. None of these numbers was measured."""

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int


_TILES: Final = (Tile(16, 64, 128, 4, 4), Tile(64, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3))
_FLOAT32_TILES: Final = (Tile(16, 64, 64, 4, 4), _TILES[1], Tile(128, 128, 32, 8, 3))
"""As `_TILES`, but with fewer input features, to fit 99 KiB of shared memory without spills."""


@triton.jit
def rows_of_tile(ends, num_groups, nth, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return the group of the n-th tile, and its rows [first, last of the group).

    The tiles of all groups are numbered, group by group. Each has up to ROWS rows. After the last
    tile, there are no rows.
    """
    group = tl.arange(0, GROUPS)
    is_group = group < num_groups
    end = tl.load(ends + group, mask=is_group, other=0)
    start = tl.load(ends + group - 1, mask=is_group & (group > 0), other=0)
    num_tiles = tl.where(is_group, (end - start + ROWS - 1) // ROWS, 0)
    first_tile = tl.cumsum(num_tiles, axis=0) - num_tiles
    is_own = (nth >= first_tile) & (nth < first_tile + num_tiles)
    own = tl.sum(tl.where(is_own, group, 0), axis=0)
    first = tl.sum(tl.where(is_own, start + (nth - first_tile) * ROWS, 0), axis=0)
    last = tl.sum(tl.where(is_own, end, 0), axis=0)
    return own, first, last


@triton.jit(
    do_not_specialize=["num_groups"],
    do_not_specialize_on_alignment=["addresses", "sizes", "ends", "sources", "places"],
)
def _grouped_linear_kernel(
    x,  # [*, K]
    addresses,  # int64[G], of weights [N, K]; or [K, N] if IS_BY_INPUT
    sizes,  # int32[G]: rows of each weight
    ends,  # int32[G]
    sources,  # int64[R], or None
    places,  # int64[R], or None
    out,  # [*, N]
    num_groups,  # G
    x_stride,
    out_stride,
    K,
    N,
    GROUPS: tl.constexpr,  # a power of two, at least G
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_BY_INPUT: tl.constexpr,
    ADDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """`out[places[i]] += x[sources[i]] @ w.T`, with fp32 sums; w is the weight of the group of i.

    Each program computes COLUMNS outputs for up to ROWS rows of one group. There are more programs
    than tiles; the rest end at once.
    """
    own, first, last = rows_of_tile(ends, num_groups, tl.program_id(1), GROUPS, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if last > first:
        size = tl.load(sizes + own)
        address = tl.load(addresses + own)
        num_out = N if IS_BY_INPUT else size
        num_in = size if IS_BY_INPUT else K
        if (address != 0) & (tl.program_id(0) * COLUMNS < num_out):
            weight = tl.multiple_of(address, 16).to(tl.pointer_type(x.dtype.element_ty))
            weight = tl.multiple_of(weight, 16)
            row = first + tl.arange(0, ROWS)
            is_row = row < last
            source = row.to(tl.int64)
            place = row.to(tl.int64)
            if sources is not None:
                source = tl.load(sources + row, mask=is_row, other=0)
            if places is not None:
                place = tl.load(places + row, mask=is_row, other=0)
            is_column = column < num_out
            x_row = x + source[:, None] * x_stride
            sums = tl.zeros([ROWS, COLUMNS], tl.float32)
            for begin in tl.range(0, num_in, INPUTS, num_stages=NUM_STAGES):
                feature = begin + tl.arange(0, INPUTS)
                is_in = feature < num_in
                is_x = is_row[:, None] & is_in[None, :]
                some_x = tl.load(x_row + feature[None, :], mask=is_x, other=0.0)
                if IS_BY_INPUT:
                    where = feature.to(tl.int64)[:, None] * N + column[None, :]
                else:
                    where = column.to(tl.int64)[None, :] * K + feature[:, None]
                is_weight = is_in[:, None] & is_column[None, :]
                some = tl.load(weight + where, mask=is_weight, other=0.0)
                sums = tl.dot(some_x, some, sums, input_precision="ieee")
            to = out + place[:, None] * out_stride + column[None, :]
            is_out = is_row[:, None] & is_column[None, :]
            if ADDS:
                sums += tl.load(to, mask=is_out, other=0.0).to(tl.float32)
            tl.store(to, sums.to(out.dtype.element_ty), mask=is_out)


def grouped_linear(
    x: torch.Tensor,
    maps: GroupedMaps,
    ends: torch.Tensor,
    sources: torch.Tensor | None,
    places: torch.Tensor | None,
    num_rows: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `kernels.reference.grouped_linear`: return the result, or add it to `out`.

    The host reads nothing from the device, so one captured graph works however the rows are divided
    into groups. Other rows affect a row's result only through R, which decides the tile.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_float("x", x, 2)
    check_tensor("x", x, (x.shape[0], maps.num_in), x.dtype, x)
    num_groups = len(maps.weights)
    check_tensor("addresses", maps.addresses, (num_groups,), torch.int64, x)
    check_tensor("sizes", maps.sizes, (num_groups,), torch.int32, x)
    check_tensor("ends", ends, (num_groups,), torch.int32, x)
    for name, index in (("sources", sources), ("places", places)):
        if index is not None:
            check_tensor(name, index, (num_rows,), torch.int64, x)
    adds = out is not None
    if out is None:
        out = x.new_empty(num_rows, maps.num_out)
    else:
        check_tensor("out", out, (out.shape[0], maps.num_out), x.dtype, x)
    if num_rows == 0:
        return out
    tile = tile_of(num_rows, num_groups, x.dtype)
    most_tiles = num_rows // tile.rows + min(num_groups, num_rows)
    _grouped_linear_kernel[(triton.cdiv(maps.num_out, tile.columns), most_tiles)](
        x,
        maps.addresses,
        maps.sizes,
        ends,
        sources,
        places,
        out,
        num_groups,
        x.stride(0),
        out.stride(0),
        maps.num_in,
        maps.num_out,
        GROUPS=triton.next_power_of_2(num_groups),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        INPUTS=tile.inputs,
        IS_BY_INPUT=maps.is_by_input,
        ADDS=adds,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def tiles_of(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the tiles for `x` of this dtype, in the order of their rows.

    A launch uses the first tile that has room for the rows of an average group, else the last tile.
    """
    return _FLOAT32_TILES if dtype is torch.float32 else _TILES


def tile_of(num_rows: int, num_groups: int, dtype: torch.dtype) -> Tile:
    """Return the tile for `num_rows` rows in all."""
    average, tiles = num_rows / num_groups, tiles_of(dtype)
    return next((tile for tile in tiles if average <= tile.rows), tiles[-1])


def fewest_rows(num_groups: int) -> tuple[int, ...]:
    """Return for each tile the least number of rows that chooses it."""
    return (1, *(tile.rows * num_groups + 1 for tile in _TILES[:-1]))
