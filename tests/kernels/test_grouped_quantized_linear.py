import pytest
import torch

from kernels import reference
from kernels.triton.linear.grouped_quantized import grouped_quantized_linear
from tests.kernels.tensors import far_apart, strided
from tests.kernels.test_grouped_linear import ends_of
from tests.kernels.test_quantized_linear import KINDS, make_weight
from tests.kernels.tolerance import assert_close, every_dot_dtype


def make_weights(kind, num_maps, num_in, num_out, num_groups, device):
    """Values, scales and offsets of several maps."""
    each = [make_weight(kind, num_in, num_out, num_groups, device) for _ in range(num_maps)]
    parts = zip(*each, strict=True)
    return tuple(None if part[0] is None else torch.stack(part) for part in parts)


@every_dot_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("counts", "num_in", "num_out", "num_groups"),
    [
        ([0, 1, 0, 2, 0], 96, 70, 3),  # tiles of 16 rows
        ([17, 0, 40], 192, 5, 1),
        ([130, 3], 64, 130, 2),  # of 64
    ],
)
def test_each_row_is_mapped_by_its_group_s_weight(
    counts, num_in, num_out, num_groups, kind, dtype, device
):
    weights = make_weights(kind, len(counts), num_in, num_out, num_groups, device)
    num_rows = sum(counts)
    x = strided((num_rows, num_in), dtype, device)
    args = x, *weights, ends_of(counts, device), None, None, num_rows
    expected = reference.grouped_quantized_linear(*args)
    each = [
        reference.quantized_linear(part, *(None if t is None else t[nth] for t in weights), None)
        for nth, part in enumerate(torch.split(x, counts))
    ]
    assert_close(expected, torch.cat(each))
    assert_close(grouped_quantized_linear(*args), expected)
    bias = torch.randn(len(counts), num_out, device=device).to(dtype)
    with_bias = reference.grouped_quantized_linear(*args, bias=bias)
    groups = torch.arange(len(counts), device=device).repeat_interleave(
        torch.tensor(counts, device=device)
    )
    assert_close(with_bias, expected + bias[groups])
    assert_close(grouped_quantized_linear(*args, bias=bias), with_bias)


@every_dot_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_gathered_and_scattered(kind, dtype, device):
    weights = make_weights(kind, 4, 64, 100, 2, device)
    counts = [3, 2, 0, 18]
    num_rows = sum(counts)
    x = torch.randn(12, 64, device=device).to(dtype)
    sources = torch.randint(0, 12, (num_rows,), device=device)
    places = torch.randperm(num_rows, device=device)
    args = x, *weights, ends_of(counts, device), sources, places, num_rows
    actual = grouped_quantized_linear(*args)
    assert_close(actual, reference.grouped_quantized_linear(*args))
    plain = grouped_quantized_linear(x[sources], *args[1:5], None, None, num_rows)
    assert torch.equal(actual[places], plain)


def test_no_row_s_group_depends_on_the_host(device):
    """The launch reads on the device, in `ends`, which rows belong to each group."""
    weights = make_weights("int4", 3, 32, 8, 1, device)
    x = torch.randn(9, 32, device=device)
    ends = ends_of([9, 0, 0], device)
    first = grouped_quantized_linear(x, *weights, ends, None, None, 9)
    ends.copy_(ends_of([1, 3, 5], device))
    again = grouped_quantized_linear(x, *weights, ends, None, None, 9)
    assert_close(again, reference.grouped_quantized_linear(x, *weights, ends, None, None, 9))
    assert torch.equal(again[0], first[0])
    assert not torch.equal(again[1], first[1])


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # in the interpreter
def test_a_row_depends_on_no_other(device):
    weights = make_weights("int8", 2, 64, 40, 2, device)
    x = torch.randn(5, 64, device=device)
    args = *weights, ends_of([3, 2], device), None, None, 5
    alone = grouped_quantized_linear(x, *args)[2]
    x[[0, 1, 3, 4]] = torch.inf
    assert torch.equal(grouped_quantized_linear(x, *args)[2], alone)


def test_rows_reach_past_int32_offsets(device):
    weights = make_weights("int4", 2, 64, 40, 2, device)
    x = far_apart((3, 64), torch.float16, device)
    args = x, *weights, ends_of([1, 2], device), None, None, 3
    assert_close(grouped_quantized_linear(*args), reference.grouped_quantized_linear(*args))


def test_weights_reach_past_int32_offsets(device):
    num_maps, num_in, num_out = 513, 2**15, 128  # the last begins at 2^31; no other is touched
    values = torch.empty(num_maps, num_in, num_out, dtype=torch.int8, device=device)
    values[-1] = torch.randint(-127, 128, (num_in, num_out), device=device)
    scales = torch.full((num_maps, 1, num_out), 1e-4, device=device)
    ends = ends_of([0] * (num_maps - 1) + [1], device)
    x = torch.randn(1, num_in, device=device)
    actual = grouped_quantized_linear(x, values, scales, None, ends, None, None, 1)
    expected = reference.quantized_linear(x, values[-1], scales[-1], None, None)
    assert_close(actual / 100, expected / 100)


def test_no_rows_give_none(device):
    weights = make_weights("fp8", 2, 64, 40, 1, device)
    none = torch.empty(0, 64, device=device)
    args = none, *weights, ends_of([0, 0], device), None, None, 0
    assert grouped_quantized_linear(*args).shape == (0, 40)


def test_what_does_not_fit_is_named(device):
    x, ends = torch.randn(4, 64, device=device), ends_of([1, 3], device)
    values, scales, offsets = make_weights("int4", 2, 64, 40, 2, device)
    rest = ends, None, None, 4
    bias = torch.randn(2, 41, device=device)[:, :40]
    with pytest.raises(ValueError, match="bias is not contiguous; it must be"):
        grouped_quantized_linear(x, values, scales, offsets, *rest, bias=bias)
    integers = values.to(torch.int8).repeat(1, 2, 1), scales.to(torch.uint8), None
    with pytest.raises(ValueError, match=r"scales has dtype torch\.uint8, required are values of"):
        grouped_quantized_linear(x, *integers, *rest)
    for args, message in (
        ((x[:, 1:], values, scales, offsets, *rest), r"values has shape \(2, 32, 40\)"),
        ((x, values[0], scales[0], offsets[0], *rest), "values has 2 dimensions"),
        ((x, values.int(), scales, offsets, *rest), "values has dtype torch.int32"),
        ((x, values, scales[:1], offsets, *rest), r"scales has shape \(1, 2, 40\)"),
        ((x, values, scales, offsets[:, :1], *rest), r"offsets has shape \(2, 1, 40\)"),
        ((x, values, scales, offsets, ends[:1], None, None, 4), r"ends has shape \(1,\)"),
        ((x, values, scales, offsets, ends.long(), None, None, 4), "ends has dtype torch.int64"),
        ((x, values, scales, offsets, ends, ends, None, 4), r"sources has shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_quantized_linear(*args)
