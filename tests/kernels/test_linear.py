import pytest
import torch

from kernels import reference
from kernels.triton.linear.plain import linear
from tests.kernels.tensors import far_apart, strided
from tests.kernels.tolerance import assert_close, every_dot_dtype


def make_map(num_in, num_out, dtype, device):
    weight = torch.randn(num_out, num_in, device=device) * num_in**-0.5
    return weight.to(dtype), torch.randn(num_out, device=device).to(dtype)


@every_dot_dtype
@pytest.mark.parametrize(
    ("num_rows", "num_in", "num_out"), [(1, 64, 64), (3, 40, 70), (65, 200, 5), (130, 30, 129)]
)
def test_a_linear_map_is_the_twin_s(num_rows, num_in, num_out, dtype, device):
    weight, bias = make_map(num_in, num_out, dtype, device)
    x = strided((num_rows, num_in), dtype, device)
    for each in (bias, None):
        assert_close(linear(x, weight, each), reference.linear(x, weight, each))


@every_dot_dtype
def test_no_bit_of_a_row_depends_on_other_rows(dtype, device):
    weight, bias = make_map(300, 70, dtype, device)
    x = torch.randn(130, 300, device=device).to(dtype)
    together = linear(x, weight, bias)
    # At the places that they have in their tiles: in the interpreter a place may change bits.
    for rows in (slice(0, 1), slice(128, 129), slice(64, 100), slice(0, 65)):
        assert torch.equal(linear(x[rows], weight, bias), together[rows])


def test_rows_reach_past_int32_offsets(device):
    weight, bias = make_map(24, 20, torch.float16, device)
    x = far_apart((3, 24), torch.float16, device)
    assert_close(linear(x, weight, bias), reference.linear(x, weight, bias))


def test_no_rows_give_none(device):
    weight, bias = make_map(8, 5, torch.float32, device)
    assert linear(torch.empty(0, 8, device=device), weight, bias).shape == (0, 5)


def test_what_does_not_fit_is_named(device):
    weight, bias = make_map(8, 5, torch.float32, device)
    x = torch.randn(4, 8, device=device)
    for args, message in (
        ((x[:, 1:], weight, bias), r"weight has shape \(5, 8\); it must be \(5, 7\)"),
        ((x, weight.half(), bias), "weight has dtype torch.float16"),
        ((x, weight, bias[1:]), r"bias has shape \(4,\)"),
        ((x[:, :5], weight.repeat(1, 2)[:, :5], bias), "weight is not contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            linear(*args)
