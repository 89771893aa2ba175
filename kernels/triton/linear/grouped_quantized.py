"""Linear maps for groups of rows, with weights of 8 or 4 bits: each row uses an expert's map.

Symbols: `R` rows that are mapped, `X` maps, `K` input features, `N` output features, `G` groups of
input features.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

import torch
import triton
import triton.language as tl

from kernels.checks import check_float, check_tensor
from kernels.triton.linear.grouped import rows_of_tile, sources_and_places
from kernels.triton.linear.quantized import RUN, check_weight, dequantized_product, store_sums
from kernels.triton.linear.tile_sizes import BY_ROWS, choose
from kernels.triton.quantized_kv import as_bits


@triton.jit(
    do_not_specialize=["num_maps"],
    do_not_specialize_on_alignment=["ends", "sources", "places"],
)
def _grouped_quantized_linear_kernel(
    x,  # [*, K]
    values,  # int8 or the bits of e4m3 [X, K, N]; or uint8[X, K / 2, N], two numbers in each
    scales,  # floats [X, G, N]; uint8 if the numbers are MXFP4
    offsets,  # as scales, or None
    ends,  # int32[X]
    sources,  # int64[R], or None
    places,  # int64[R], or None
    bias,  # [X, N], contiguous, or None
    out,  # [R, N], contiguous
    num_maps,  # X
    x_stride,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # input features of a group; K if there is one group
    IS_FP8: tl.constexpr,
    IS_HALF: tl.constexpr,
    MAPS: tl.constexpr,  # a power of two, at least X
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """`out[places[i]] = x[sources[i]] @ (values * scale + offset) + bias` for each row i.

    `values`, scale, offset and `bias` are those of the map of row i. Rows are divided into tiles as
    in `_grouped_linear_kernel`. Products are computed as in `_quantized_linear_kernel`.
    """
    own, first, last = rows_of_tile(ends, num_maps, tl.program_id(1), MAPS, ROWS)
    if last > first:
        row = first + tl.arange(0, ROWS)
        is_row = row < last
        source, place = sources_and_places(sources, places, row, is_row)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        own_scales = own.to(tl.int64) * (K // GROUP) * N
        own_offsets = None
        if offsets is not None:
            own_offsets = offsets + own_scales
        sums = dequantized_product(
            x + source[:, None] * x_stride,
            is_row,
            values + own.to(tl.int64) * (K // 2 if IS_HALF else K) * N,
            scales + own_scales,
            own_offsets,
            column,
            0,
            tl.cdiv(K, RUNS * 32),
            N,
            K,
            GROUP,
            IS_FP8,
            IS_HALF,
            ROWS,
            COLUMNS,
            RUNS,
            NUM_STAGES,
        )
        own_bias = None
        if bias is not None:
            own_bias = bias + own.to(tl.int64) * N
        is_out = is_row[:, None] & (column < N)[None, :]
        to = out + place[:, None] * N + column[None, :]
        store_sums(to, sums, own_bias, column, column < N, is_out)


def grouped_quantized_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    ends: torch.Tensor,
    sources: torch.Tensor | None,
    places: torch.Tensor | None,
    num_rows: int,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `kernels.reference.grouped_quantized_linear`; weights and `bias` must be contiguous.

    Only the device reads `ends`, which divides the rows among the maps. So a captured graph works
    for any division. Other rows affect a row's result only through R, which decides the tile size.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_float("x", x, 2)
    if values.dim() != 3:  # noqa: PLR2004
        raise ValueError(f"values has {values.dim()} dimensions, required are 3")
    group = check_weight(x, values, scales, offsets)
    num_maps, _, num_out = values.shape
    check_tensor("ends", ends, (num_maps,), torch.int32, x)
    for name, index in (("sources", sources), ("places", places)):
        if index is not None:
            check_tensor(name, index, (num_rows,), torch.int64, x)
    if bias is not None:
        check_tensor("bias", bias, (num_maps, num_out), x.dtype, x)
        if not bias.is_contiguous():
            raise ValueError("bias is not contiguous; it must be")
    out = x.new_empty(num_rows, num_out)
    if num_rows == 0:
        return out
    tile = choose(BY_ROWS, num_rows, num_maps)
    most_tiles = num_rows // tile.rows + min(num_maps, num_rows)
    _grouped_quantized_linear_kernel[(triton.cdiv(num_out, tile.columns), most_tiles)](
        x,
        as_bits(values),
        scales,
        offsets,
        ends,
        sources,
        places,
        bias,
        out,
        num_maps,
        x.stride(0),
        num_out,
        K=x.shape[1],
        GROUP=group,
        IS_FP8=values.dtype is torch.float8_e4m3fn,
        IS_HALF=values.dtype is torch.uint8,
        MAPS=triton.next_power_of_2(num_maps),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        RUNS=tile.inputs // RUN,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
