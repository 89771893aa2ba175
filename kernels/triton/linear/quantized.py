"""Linear maps whose weights have 8 or 4 bits, dequantized within the product.

Symbols: `T` tokens, `K` input features, `N` output features, `G` groups of input features. A run
is 32 consecutive input features.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  Triton infers the types inside kernels

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import check_float, check_tensor
from kernels.triton.configs import num_processors
from kernels.triton.linear.tile_sizes import BY_ROWS, choose
from kernels.triton.quantized_kv import as_bits, plain_numbers

RUN: Final = 32
_ONE_TILE: Final = BY_ROWS[1]
_MAX_SPLITS: Final = 16
"""The limit on splits of the input features. If there are few rows, `out` has few tiles, and one
program for each tile would not fill the device. So with the smallest tile size, which is for few
rows, several programs compute a tile, each from a part of the input features (a split). With larger
tile sizes the features are not split. The limit was not measured."""


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _quantized_linear_kernel(
    x,  # [T, K]
    values,  # int8 or the bits of e4m3 [K, N]; or uint8[K / 2, N], two numbers in each
    scales,  # floats [G, N]; uint8 if the numbers are MXFP4
    offsets,  # as scales, or None
    bias,  # [N], or None
    out,  # [T, N]; fp32 [SPLITS, T, N] if there are several
    num_rows,  # T
    num_splits,
    x_stride,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # input features of a group; K if there is one group
    IS_FP8: tl.constexpr,
    IS_HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """`out = x @ (values * scale + offset) + bias`, with weights and sums computed in fp32.

    The K features are divided into splits. Each tile of `out` has one program for each split.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    inside = column < N
    num_tiles = tl.cdiv(K, RUNS * 32)
    acc = dequantized_product(
        x + row.to(tl.int64)[:, None] * x_stride,
        row < num_rows,
        values,
        scales,
        offsets,
        column,
        num_tiles * split // num_splits,
        num_tiles * (split + 1) // num_splits,
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
    is_out = (row < num_rows)[:, None] & inside[None, :]
    out_row = split.to(tl.int64) * num_rows + row
    out_place = out_row[:, None] * N + column[None, :]
    if IS_PARTIAL:
        tl.store(out + out_place, acc, mask=is_out)
    else:
        store_sums(out + out_place, acc, bias, column, inside, is_out)


@triton.jit
def dequantized_product(
    x_row,  # pointers [ROWS, 1] to rows [K]
    is_row,  # [ROWS]
    values,  # as in `_quantized_linear_kernel`
    scales,
    offsets,
    column,  # [COLUMNS]
    first,
    last,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Return the sums of `x @ (values * scale + offset)`, fp32 [ROWS, COLUMNS].

    A run is 32 input features, and a piece is RUNS runs. The sums are over the input features of
    the pieces from `first` to `last` - 1. A weight is computed in fp32, and rounded to the dtype of
    `x` before its product. With 4 bits, each byte holds the weights of two input features that are
    16 apart. One product takes all low nibbles, and another takes all high nibbles, so that no
    interleaving is needed.
    """
    dtype: tl.constexpr = x_row.dtype.element_ty
    is_mxfp4: tl.constexpr = scales.dtype.element_ty == tl.uint8
    inside = column < N
    BYTES: tl.constexpr = 16 if IS_HALF else 32  # rows of `values` in a run
    run = tl.arange(0, RUNS)
    part = tl.arange(0, BYTES)
    flat = tl.arange(0, RUNS * BYTES)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for nth in tl.range(first, last, num_stages=NUM_STAGES):
        start = nth * RUNS * 32
        feature = start + run * 32  # the first feature of each run
        byte_row = (feature // 32 * BYTES)[:, None] + part[None, :]  # [RUNS, BYTES]
        is_weight = ((feature[:, None] + part[None, :]) < K)[:, :, None] & inside[None, None, :]
        place = byte_row.to(tl.int64)[:, :, None] * N + column[None, None, :]
        stored = tl.load(values + place, mask=is_weight, other=0)
        group = (tl.minimum(feature, K - 1) // GROUP).to(tl.int64)
        scale_place = (group[:, None] * N + column[None, :])[:, None, :]
        scale = tl.load(scales + scale_place, mask=inside[None, None, :], other=0)
        # `_number` returns numbers of MXFP4 in units of 2^14.
        scale = _power_of_two(scale) * 16384.0 if is_mxfp4 else scale.to(tl.float32)
        offset = None
        if offsets is not None:
            offset = tl.load(offsets + scale_place, mask=inside[None, None, :], other=0.0)
        x_column = start + flat // BYTES * 32 + flat % BYTES
        is_x = is_row[:, None] & (x_column < K)[None, :]
        some_x = tl.load(x_row + x_column[None, :], mask=is_x, other=0.0)
        if IS_HALF:
            low = _weight(_number(stored & 15, is_mxfp4), scale, offset, dtype)
            high = _weight(_number(stored >> 4, is_mxfp4), scale, offset, dtype)
            other_x = tl.load(x_row + x_column[None, :] + 16, mask=is_x, other=0.0)
            low = tl.reshape(low, [RUNS * BYTES, COLUMNS])
            high = tl.reshape(high, [RUNS * BYTES, COLUMNS])
            acc = tl.dot(some_x, low, acc, input_precision="ieee")
            acc = tl.dot(other_x, high, acc, input_precision="ieee")
        else:
            # `plain_numbers` returns fp8 numbers in units of 2^8.
            numbers = plain_numbers(stored, tl.float32) * (256.0 if IS_FP8 else 1.0)
            weight = _weight(numbers, scale, offset, dtype)
            weight = tl.reshape(weight, [RUNS * BYTES, COLUMNS])
            acc = tl.dot(some_x, weight, acc, input_precision="ieee")
    return acc


@triton.jit
def _number(nibbles, is_mxfp4: tl.constexpr):
    """Return `nibbles` as fp32: 4-bit integers, or MXFP4 numbers divided by 2^14."""
    if is_mxfp4:
        # Read as fp16, the number is 2^14 times smaller, because fp16's exponent has a bias of 15,
        # not 1.
        bits = nibbles.to(tl.uint16)
        bits = ((bits & 8) << 12) | ((bits & 7) << 9)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = nibbles.to(tl.float32)
    return number


@triton.jit
def _power_of_two(stored):
    """Return `2^(stored - 127)`."""
    bits = stored.to(tl.int32) << 23
    bits = tl.where(bits == 0, 1 << 22, bits)  # 2^-127 has no leading one
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight(number, scale, offset, dtype: tl.constexpr):
    weight = number * scale
    if offset is not None:
        weight += offset.to(tl.float32)
    return weight.to(dtype)


@triton.jit
def store_sums(place, sums, bias, column, inside, is_out):
    if bias is not None:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(place, sums.to(place.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _sum_splits_kernel(
    partial,  # fp32 [SPLITS, T, N]
    bias,  # [N], or None
    out,  # [T, N]
    num_rows,
    num_splits,
    N,
    COLUMNS: tl.constexpr,
):
    """Add up the splits of `partial` in order, add `bias`, and store the sums in `out`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    sums = tl.zeros([1, COLUMNS], tl.float32)
    for split in range(num_splits):
        place = partial + (split * num_rows + row) * N + column
        sums += tl.load(place, mask=inside, other=0.0)[None, :]
    store_sums((out + row * N + column)[None, :], sums, bias, column, inside, inside[None, :])


def quantized_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    has_one_tile: bool = False,
) -> torch.Tensor:
    """Return what `kernels.reference.quantized_linear` returns for the same arguments.

    `values`, `scales` and `offsets` must be contiguous. A row's result depends on the number of
    rows, which decides the tile size and the number of splits, but not on the contents of other
    rows. If `has_one_tile`, there is only one tile size and no split, so a row's result does not
    depend on the number of rows either. If T is at most 16, there can be 16 splits, whose sums need
    up to 16 * T * N fp32 numbers of scratch memory.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_float("x", x, 2)
    if values.dim() != 2:  # noqa: PLR2004
        raise ValueError(f"values has {values.dim()} dimensions, required are 2")
    num_rows, num_in = x.shape
    group = check_weight(x, values, scales, offsets)
    num_out = values.shape[1]
    if bias is not None:
        check_tensor("bias", bias, (num_out,), x.dtype, x)
    out = x.new_empty((num_rows, num_out))
    if num_rows == 0:
        return out
    tile = _ONE_TILE if has_one_tile else choose(BY_ROWS, num_rows)
    grid = triton.cdiv(num_out, tile.columns), triton.cdiv(num_rows, tile.rows)
    splits = 1
    if tile is BY_ROWS[0]:
        wanted = max(1, 4 * num_processors(x.device) // grid[0])
        splits = min(_MAX_SPLITS, triton.cdiv(num_in, tile.inputs), wanted)
    partial = out
    if splits > 1:
        partial = x.new_empty((splits, num_rows, num_out), dtype=torch.float32)
    _quantized_linear_kernel[(*grid, splits)](
        x,
        as_bits(values),
        scales,
        offsets,
        bias,
        partial,
        num_rows,
        splits,
        x.stride(0),
        num_out,
        K=num_in,
        GROUP=group,
        IS_FP8=values.dtype is torch.float8_e4m3fn,
        IS_HALF=values.dtype is torch.uint8,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        RUNS=tile.inputs // RUN,
        IS_PARTIAL=splits > 1,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        columns = 256
        _sum_splits_kernel[(num_rows, triton.cdiv(num_out, columns))](
            partial, bias, out, num_rows, splits, num_out, COLUMNS=columns
        )
    return out


def check_weight(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
) -> int:
    """Require a weight, or a stack of weights, that the kernels can multiply with `x` [*, K].

    Returns:
        The size of a group: how many consecutive input features share a scale.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    is_mxfp4 = scales.dtype is torch.uint8
    if not is_mxfp4:
        check_float("scales", scales, values.dim())
    *stack, _, num_out = values.shape
    num_in, num_groups = x.shape[1], scales.shape[-2]
    is_half = values.dtype is torch.uint8
    if values.dtype not in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"values has dtype {values.dtype}; it must be uint8, int8 or e4m3")
    value_rows = num_in // 2 if is_half else num_in
    check_tensor("values", values, (*stack, value_rows, num_out), values.dtype, x)
    check_tensor("scales", scales, (*stack, num_groups, num_out), scales.dtype, x)
    group = num_in // num_groups
    if num_in % num_groups or (num_groups > 1 and group % RUN) or (is_half and num_in % RUN):
        raise ValueError(
            f"scales has {num_groups} groups for {num_in} input features, required are groups of a"
            f" multiple of {RUN}"
        )
    if is_mxfp4 and (not is_half or group != RUN or offsets is not None):
        raise ValueError(
            f"scales has dtype torch.uint8, required are values of uint8 in groups of {RUN} and no"
            f" offsets; values has dtype {values.dtype}, and groups have {group} input features"
        )
    if offsets is not None:
        check_tensor("offsets", offsets, tuple(scales.shape), offsets.dtype, x)
    for name, tensor in (("values", values), ("scales", scales), ("offsets", offsets)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous; it must be")
    return group
