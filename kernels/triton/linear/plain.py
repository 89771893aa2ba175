"""A linear map in which no bit of a row's result depends on other rows or on their number.

Symbols: `T` tokens, `K` input features, `N` output features.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

import torch
import triton
import triton.language as tl

from kernels.checks import check_float, check_tensor
from kernels.triton.linear.tile_sizes import ANY_ROWS


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,  # [T, K]
    weight,  # [N, K], contiguous
    bias,  # [N], or None
    out,  # [T, N], contiguous
    num_rows,  # T
    x_stride,
    K,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """`out = x @ weight.T + bias`, with fp32 sums.

    There is one program for each tile of `out`. All programs add their products in the same order,
    from the first to the last input feature. Programs for the same columns of `out` read the same
    weights. These programs run one after another, so all but the first can find the weights in the
    device's cache.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = (row < num_rows)[:, None]
    is_column = column < N
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    weight_row = weight + column.to(tl.int64)[None, :] * K
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, K, INPUTS, num_stages=NUM_STAGES):
        feature = begin + tl.arange(0, INPUTS)
        is_in = feature < K
        some_x = tl.load(x_row + feature[None, :], mask=is_row & is_in[None, :], other=0.0)
        is_weight = is_in[:, None] & is_column[None, :]
        some = tl.load(weight_row + feature[:, None], mask=is_weight, other=0.0)
        sums = tl.dot(some_x, some, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_row & is_column[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return what `kernels.reference.linear` returns; `weight` must be contiguous.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_float("x", x, 2)
    num_rows, num_in = x.shape
    num_out = len(weight)
    check_tensor("weight", weight, (num_out, num_in), x.dtype, x)
    if not weight.is_contiguous():
        raise ValueError("weight is not contiguous; it must be")
    if bias is not None:
        check_tensor("bias", bias, (num_out,), x.dtype, x)
    out = x.new_empty(num_rows, num_out)
    if num_rows == 0:
        return out
    tile = ANY_ROWS
    _linear_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, tile.columns))](
        x,
        weight,
        bias,
        out,
        num_rows,
        x.stride(0),
        num_in,
        num_out,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        INPUTS=tile.inputs,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
