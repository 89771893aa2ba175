"""Linear maps for groups of rows: each row uses the map of an expert or of a LoRA adapter.

Symbols: `R` rows that are mapped, `X` maps, `K` input features, `N` output features.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  Triton infers the types inside kernels

import torch
import triton
import triton.language as tl

from kernels.checks import check_float, check_tensor
from kernels.grouped_maps import GroupedMaps
from kernels.triton.linear.tile_sizes import BY_ROWS, FLOAT32_BY_ROWS, choose


@triton.jit
def rows_of_tile(ends, num_maps, nth, MAPS: tl.constexpr, ROWS: tl.constexpr):
    """Return the map of the n-th tile, the tile's first row, and the end of the map's rows.

    The tiles of all maps are numbered, map by map. Each tile has up to ROWS rows. Tiles after the
    last one have no rows.
    """
    each = tl.arange(0, MAPS)
    is_map = each < num_maps
    end = tl.load(ends + each, mask=is_map, other=0)
    start = tl.load(ends + each - 1, mask=is_map & (each > 0), other=0)
    num_tiles = tl.where(is_map, (end - start + ROWS - 1) // ROWS, 0)
    first_tile = tl.cumsum(num_tiles, axis=0) - num_tiles
    is_own = (nth >= first_tile) & (nth < first_tile + num_tiles)
    own = tl.sum(tl.where(is_own, each, 0), axis=0)
    first = tl.sum(tl.where(is_own, start + (nth - first_tile) * ROWS, 0), axis=0)
    last = tl.sum(tl.where(is_own, end, 0), axis=0)
    return own, first, last


@triton.jit
def sources_and_places(sources, places, row, is_row):
    """Return `sources[i]` and `places[i]` for each i in `row`; for a tensor that is None, i."""
    source = row.to(tl.int64)
    place = row.to(tl.int64)
    if sources is not None:
        source = tl.load(sources + row, mask=is_row, other=0)
    if places is not None:
        place = tl.load(places + row, mask=is_row, other=0)
    return source, place


@triton.jit(
    do_not_specialize=["num_maps"],
    do_not_specialize_on_alignment=["addresses", "sizes", "ends", "sources", "places"],
)
def _grouped_linear_kernel(
    x,  # [*, K]
    addresses,  # int64[X], of weights [N, K]; or [K, N] if IS_BY_INPUT
    sizes,  # int32[X]: rows of each weight
    ends,  # int32[X]
    sources,  # int64[R], or None
    places,  # int64[R], or None
    biases,  # [X, N], or None
    out,  # [*, N]
    num_maps,  # X
    x_stride,
    out_stride,
    K,
    N,
    MAPS: tl.constexpr,  # a power of two, at least X
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_BY_INPUT: tl.constexpr,
    ADDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """`out[places[i]] += x[sources[i]] @ w.T + b`, where w and b are weight and bias of i's map.

    If ADDS is false, `out` is overwritten. Sums are fp32. Each program computes COLUMNS outputs for
    up to ROWS rows of one map. There may be more programs than tiles; programs without a tile end
    at once.
    """
    own, first, last = rows_of_tile(ends, num_maps, tl.program_id(1), MAPS, ROWS)
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
            source, place = sources_and_places(sources, places, row, is_row)
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
            if biases is not None:
                bias = biases + own.to(tl.int64) * N + column
                sums += tl.load(bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
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

    The host does not read which rows belong to which map. So a captured graph can be replayed with
    another division of the rows among the maps. A row's result depends on the other rows only
    through their number, which decides the tile size.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_float("x", x, 2)
    check_tensor("x", x, (x.shape[0], maps.num_in), x.dtype, x)
    num_maps = len(maps.weights)
    check_tensor("addresses", maps.addresses, (num_maps,), torch.int64, x)
    check_tensor("sizes", maps.sizes, (num_maps,), torch.int32, x)
    check_tensor("ends", ends, (num_maps,), torch.int32, x)
    for name, index in (("sources", sources), ("places", places)):
        if index is not None:
            check_tensor(name, index, (num_rows,), torch.int64, x)
    if maps.biases is not None:
        check_tensor("biases", maps.biases, (num_maps, maps.num_out), x.dtype, x)
        if not maps.biases.is_contiguous():
            raise ValueError("biases is not contiguous; it must be")
    adds = out is not None
    if out is None:
        out = x.new_empty(num_rows, maps.num_out)
    else:
        check_tensor("out", out, (out.shape[0], maps.num_out), x.dtype, x)
    if num_rows == 0:
        return out
    choices = FLOAT32_BY_ROWS if x.dtype is torch.float32 else BY_ROWS
    tile = choose(choices, num_rows, num_maps)
    most_tiles = num_rows // tile.rows + min(num_maps, num_rows)
    _grouped_linear_kernel[(triton.cdiv(maps.num_out, tile.columns), most_tiles)](
        x,
        maps.addresses,
        maps.sizes,
        ends,
        sources,
        places,
        maps.biases,
        out,
        num_maps,
        x.stride(0),
        out.stride(0),
        maps.num_in,
        maps.num_out,
        MAPS=triton.next_power_of_2(num_maps),
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
