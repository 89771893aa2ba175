import math

import pytest
import torch

from kernels import reference
from kernels.reference.linear.quantized import E2M1, pack_nibbles, unpack_nibbles
from kernels.triton.linear.quantized import quantized_linear
from tests.kernels.tensors import far_apart, strided
from tests.kernels.tolerance import assert_close, every_dot_dtype

KINDS = ["int8", "int8 with offsets", "int4", "fp8", "mxfp4"]


def make_weight(kind, num_in, num_out, num_groups, device):
    """Values, scales and offsets of a map whose outputs are of size 1.

    MXFP4 has groups of 32, whatever `num_groups` is.
    """
    size = num_in**-0.5
    scales = (torch.rand(num_groups, num_out) + 0.5) * size
    offsets = None
    if kind == "fp8":
        values = torch.randn(num_in, num_out).to(torch.float8_e4m3fn)
    elif kind == "int4":
        values = pack_nibbles(torch.randint(0, 16, (num_in, num_out), dtype=torch.uint8))
        scales, offsets = (scales / 4).half(), (-scales * 2).half()
    elif kind == "mxfp4":
        values = pack_nibbles(torch.randint(0, 16, (num_in, num_out), dtype=torch.uint8))
        power = round(math.log2(size / 3))
        shape = num_in // 32, num_out
        scales = torch.randint(126 + power, 129 + power, shape, dtype=torch.uint8)
    else:
        values = torch.randint(-127, 128, (num_in, num_out), dtype=torch.int8)
        scales = (scales / 64).half()
        if kind != "int8":
            offsets = (torch.randn(num_groups, num_out) * size).half()
    return tuple(None if t is None else t.to(device) for t in (values, scales, offsets))


@every_dot_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_rows", "num_in", "num_out", "num_groups"),
    [(1, 96, 5, 3), (3, 1024, 70, 8), (17, 192, 130, 2), (130, 64, 130, 1)],
)
def test_the_product_is_the_twin_s(num_rows, num_in, num_out, num_groups, kind, dtype, device):
    weight = make_weight(kind, num_in, num_out, num_groups, device)
    x = strided((num_rows, num_in), dtype, device)
    bias = torch.randn(num_out, device=device).to(dtype) if num_rows != 3 else None
    actual = quantized_linear(x, *weight, bias)
    expected = reference.quantized_linear(x, *weight, bias)
    # Sums of up to a thousand products, in another order.
    assert_close(actual / 4, expected / 4)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_one_group_may_have_any_number_of_features(kind, device):
    weight = make_weight(kind, 50, 20, 1, device)
    x = torch.randn(2, 50, device=device)
    assert_close(quantized_linear(x, *weight, None), reference.quantized_linear(x, *weight, None))


def test_the_twin_by_hand():
    numbers = torch.arange(64, dtype=torch.uint8).remainder(16).view(64, 1).repeat(1, 2)
    packed = pack_nibbles(numbers)
    assert packed[:2, 0].tolist() == [0x00, 0x11]  # features 0 and 16, then 1 and 17
    assert torch.equal(unpack_nibbles(packed), numbers)
    scales = torch.tensor([[1.0, 2.0], [0.5, 4.0]])
    offsets = torch.tensor([[0.0, -1.0], [-3.0, 0.0]])
    x = torch.zeros(2, 64)
    x[0, 3], x[1, 34] = 1, 1
    out = reference.quantized_linear(x, packed, scales, offsets, torch.tensor([10.0, 0.0]))
    assert out.tolist() == [[13.0, 5.0], [10 + 2 * 0.5 - 3, 8.0]]


@pytest.mark.parametrize("op", [quantized_linear, reference.quantized_linear])
def test_every_number_of_mxfp4_is_exact_with_every_scale(op, device):
    powers = torch.arange(2, 240, dtype=torch.uint8).view(1, -1)  # no larger weights exist
    numbers = torch.arange(32, dtype=torch.uint8).remainder(16).view(32, 1).repeat(1, 238)
    expected = torch.tensor(E2M1)[numbers.long()] * 2.0 ** (powers.float() - 127)
    args = pack_nibbles(numbers).to(device), powers.to(device), None, None
    identity = torch.eye(32, device=device)
    assert torch.equal(op(identity, *args).cpu(), expected)
    assert torch.equal(expected.bfloat16().float(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_with_one_tile_no_bit_of_a_row_depends_on_the_number_of_rows(kind, device):
    weight = make_weight(kind, 1024, 70, 8, device)
    x = torch.randn(70, 1024, device=device)
    together = quantized_linear(x, *weight, None, has_one_tile=True)
    # At the places that they have in their tiles: in the interpreter a place may change bits.
    for rows in (slice(0, 1), slice(64, 66), slice(0, 20)):
        assert torch.equal(
            quantized_linear(x[rows], *weight, None, has_one_tile=True), together[rows]
        )
    assert_close(together / 4, reference.quantized_linear(x, *weight, None, has_one_tile=True) / 4)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # in the interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_no_other_of_the_same_number(kind, device):
    weight = make_weight(kind, 256, 40, 2, device)
    x = torch.randn(5, 256, device=device)
    alone = quantized_linear(x, *weight, None)[2]
    x[[0, 1, 3, 4]] = torch.inf
    assert torch.equal(quantized_linear(x, *weight, None)[2], alone)


def test_rows_reach_past_int32_offsets(device):
    weight = make_weight("int4", 64, 40, 2, device)
    x = far_apart((3, 64), torch.float16, device)
    assert_close(quantized_linear(x, *weight, None), reference.quantized_linear(x, *weight, None))


def test_no_rows_give_none(device):
    weight = make_weight("int8", 64, 40, 1, device)
    assert quantized_linear(torch.empty(0, 64, device=device), *weight, None).shape == (0, 40)


def test_what_does_not_fit_is_named(device):
    x = torch.randn(2, 64, device=device)
    values, scales, offsets = make_weight("int4", 64, 40, 2, device)
    for args, message in (
        ((x, values.int(), scales, offsets, None), "values has dtype torch.int32"),
        ((x, values[None], scales[None], offsets[None], None), "values has 3 dimensions"),
        ((x, values, scales[0], offsets, None), "scales"),
        ((x, values[1:], scales, offsets, None), r"values has shape \(31, 40\)"),
        ((x, values, scales[:, 1:], offsets, None), r"scales has shape \(2, 39\)"),
        ((x, values, scales.repeat(2, 1), None, None), "scales has 4 groups for 64"),
        ((x, values, scales, offsets[:1], None), r"offsets has shape \(1, 40\)"),
        ((x, values, scales, offsets, x[0, :3]), r"bias has shape \(3,\)"),
        ((x, values, scales.repeat(1, 2)[:, ::2], offsets, None), "scales has last stride 2"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_linear(*args)
