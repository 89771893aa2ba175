import pytest
import torch

from kernels.cpu.library import native
from kernels.cpu.quantized import can_pack, pack
from tests.kernels.tolerance import assert_close

needs_kernel = pytest.mark.skipif(
    (library := native()) is None or not library.has_linear,
    reason="this CPU has no dot product of bfloat16",
)
EVERY_FORM = [(8, None), (4, 32), (4, 64), (4, 128)]
"""Bits of a value, and how many values share a scale; None: all of an output feature."""


def random_weight(bits, group_size, num_out, num_in):
    """Values, scales, offsets, and the weight they stand for in float64."""
    num_groups = num_in // (group_size or num_in)
    most = 2 ** (bits - 1)
    values = torch.randint(1 - most if bits == 8 else -most, most, (num_out, num_in))
    scales = ((0.5 + torch.rand(num_out, num_groups)) * num_in**-0.5 / most).bfloat16()
    offsets = None
    weight = values.double() * scales.double().repeat_interleave(num_in // num_groups, 1)
    if group_size is not None:
        offsets = (torch.randn(num_out, num_groups) * num_in**-0.5).bfloat16()
        weight += offsets.double().repeat_interleave(group_size, 1)
    return values.to(torch.int8), scales, offsets, weight


@needs_kernel
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(128, 1), (256, 70), (384, 96), (2048, 32)])
@pytest.mark.parametrize(("bits", "group_size"), EVERY_FORM)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 12, 13, 31, 100, 193])
def test_it_is_the_product_with_the_dequantized_weight(
    num_rows, bits, group_size, num_in, num_out, has_bias
):
    values, scales, offsets, weight = random_weight(bits, group_size, num_out, num_in)
    bias = torch.randn(num_out).bfloat16() if has_bias else None
    x = torch.randn(num_rows, num_in + 6).bfloat16()[:, :num_in]
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    assert_close(pack(bits, values, scales, offsets, bias)(x), expected.bfloat16())


@needs_kernel
@pytest.mark.parametrize("num_in", [8, 24, 136, 1160])
def test_eight_bits_need_only_a_multiple_of_eight_input_features(num_in):
    values, scales, offsets, weight = random_weight(8, None, 40, num_in)
    x = torch.randn(193, num_in).bfloat16()
    expected = (x.double() @ weight.T).bfloat16()
    for num_rows in (1, 20, 193):
        assert_close(pack(8, values, scales, offsets, None)(x[:num_rows]), expected[:num_rows])


@needs_kernel
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(("bits", "group_size"), EVERY_FORM)
def test_a_row_depends_on_no_other_row(bits, group_size, num_threads):
    apply = pack(bits, *random_weight(bits, group_size, 160, 1152)[:3], None)
    x = torch.randn(150, 1152).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = apply(x)
    finally:
        torch.set_num_threads(before)
    for row in range(150):
        assert torch.equal(apply(x[row : row + 1])[0], together[row])
    for num_rows in (2, 7, 12, 13, 97):
        assert torch.equal(apply(x[40 : 40 + num_rows]), together[40 : 40 + num_rows])


@needs_kernel
def test_it_names_what_does_not_fit():
    apply = pack(8, *random_weight(8, None, 8, 16)[:3], None)
    with pytest.raises(ValueError, match=r"x has shape \(3, 24\), required is \(3, 16\)"):
        apply(torch.randn(3, 24).bfloat16())
    with pytest.raises(ValueError, match=r"x has dtype torch\.float32"):
        apply(torch.randn(3, 16))


def test_other_weights_are_left_to_others():
    values = torch.zeros(8, 16, dtype=torch.int8)
    assert not can_pack(values, torch.float32)
    assert not can_pack(values[:, :12], torch.bfloat16)
    assert not can_pack(values.to("meta"), torch.bfloat16)
