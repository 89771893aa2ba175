import math

import pytest
import torch
from torch.nn.functional import linear, pad

from gpu_worker.weights.stored.mxfp4 import Mxfp4Weight
from kernels.cpu.library import native
from kernels.cpu.linear import can_pack, can_pack_integers, pack, pack_integers, pack_mxfp4
from tests.kernels.tolerance import assert_close as assert_close_in_dtype

needs_native = pytest.mark.skipif(native() is None, reason="needs native code")
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
EVERY_FORM = [(8, None), (8, 32), (4, 32), (4, 64), (4, 128)]
"""Bits of a value, and how many values share a scale; None: all of an output feature."""
every_form = pytest.mark.parametrize(("bits", "group_size"), EVERY_FORM)


def assert_close(actual, expected):
    if expected.dtype is torch.float32:  # sums of up to 2,048 products
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    else:
        assert_close_in_dtype(actual, expected)


def random_integers(bits, group_size, num_out, num_in):
    """Values, scales, offsets, and the weight they stand for in float64."""
    num_groups = num_in // (group_size or num_in)
    most = 2 ** (bits - 1)
    values = torch.randint(1 - most if bits == 8 else -most, most, (num_out, num_in))
    scales = ((0.5 + torch.rand(num_out, num_groups)) * num_in**-0.5 / most).half().float()
    offsets = None
    weight = values.double() * scales.double().repeat_interleave(num_in // num_groups, 1)
    if group_size is not None:
        offsets = (torch.randn(num_out, num_groups) * num_in**-0.5).half().float()
        if bits == 4:  # in the form that C multiplies: values begin at 0
            offsets += 8 * scales
        weight += offsets.double().repeat_interleave(group_size, 1)
    return values.to(torch.int8), scales, offsets, weight


def without_offsets(group_size, num_out, num_in):
    """Values and scales of 8 bits, and the weight they stand for, as GGUF's Q8_0 and Q6_K have."""
    values = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
    scales = ((0.5 + torch.rand(num_out, num_in // group_size)) * num_in**-0.5 / 127).half().float()
    return values, scales, values * scales.double().repeat_interleave(group_size, 1)


@needs_native
@every_dtype
@pytest.mark.parametrize("group_size", [16, 32])
def test_groups_of_eight_bits_need_no_offsets(group_size, dtype):
    values, scales, weight = without_offsets(group_size, 70, 384)
    apply = pack_integers(8, values, scales, None, None, dtype)
    x = torch.randn(100, 384).to(dtype)
    together = apply(x)
    assert_close(together, (x.double() @ weight.T).to(dtype))
    for num_rows in (1, 12, 36, 37):
        assert torch.equal(apply(x[:num_rows]), together[:num_rows])


def random_mxfp4(num_out, num_in):
    """Blocks and scales, and the weight that they stand for in float64."""
    blocks = torch.randint(256, (num_out, num_in // 32, 16), dtype=torch.uint8)
    power = 127 - round(math.log2(3 * num_in**0.5))
    scales = torch.randint(power - 2, power + 2, blocks.shape[:2], dtype=torch.uint8)
    return blocks, scales, Mxfp4Weight(blocks, scales).dequantized().double()


@needs_native
@every_dtype
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(32, 1), (96, 70), (288, 96), (2880, 64)])
def test_mxfp4_multiplies_as_the_weight_that_it_stands_for(num_in, num_out, has_bias, dtype):
    blocks, scales, weight = random_mxfp4(num_out, num_in)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    apply = pack_mxfp4(blocks, scales, bias, dtype)
    x = torch.randn(193, num_in + 6).to(dtype)[:, :num_in]
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    for num_rows in (0, 1, 2, 5, 12, 13, 37, 100, 193):
        assert_close(apply(x[:num_rows]), expected[:num_rows].to(dtype))


@needs_native
@every_dtype
def test_mxfp4_is_exact_and_takes_as_many_bytes_as_before(dtype):
    powers = torch.arange(255, dtype=torch.uint8).view(255, 1)
    blocks = torch.arange(16, dtype=torch.uint8).repeat(255, 1, 1) * 16
    blocks += 15 - torch.arange(16, dtype=torch.uint8)  # every number, twice
    apply = pack_mxfp4(blocks, powers, None, dtype)
    weight = Mxfp4Weight(blocks, powers).dequantized()
    assert weight[127].abs().unique().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    kept = slice(2, 250)  # others are no normal numbers
    assert torch.equal(apply(torch.eye(32).to(dtype)).T[kept], weight.to(dtype)[kept])
    assert torch.equal(apply(torch.eye(96, 32).to(dtype)).T[kept, :32], weight.to(dtype)[kept])
    held = apply.panels.nbytes + apply._scales.nbytes
    assert held == 256 * (32 // 2 + 1), "17 bytes for 32 weights, in whole panels of 32 rows"


def every_packed(num_out, num_in, dtype):
    """A map of each form."""
    yield pack((torch.randn(num_out, num_in) * num_in**-0.5).to(dtype), None)
    for bits, group_size in EVERY_FORM:
        integers = random_integers(bits, group_size, num_out, num_in)[:3]
        yield pack_integers(bits, *integers, None, dtype)
    if num_in % 32 == 0:
        yield pack_mxfp4(*random_mxfp4(num_out, num_in)[:2], None, dtype)


@needs_native
@every_dtype
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_in", "num_out"), [(1, 33), (2, 1), (63, 70), (64, 70), (768, 96), (1025, 40), (2048, 32)]
)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 12, 13, 31, 100, 193])
def test_a_packed_linear_is_torch_s(num_rows, num_in, num_out, has_bias, dtype):
    weight = (torch.randn(num_out, num_in) * num_in**-0.5).to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    x = torch.full((num_rows, num_in + 6), torch.nan, dtype=dtype)[:, :num_in]
    x.copy_(torch.randn(num_rows, num_in))
    assert_close(pack(weight, bias)(x), linear(x, weight, bias))


@needs_native
@every_dtype
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(128, 1), (256, 70), (384, 96), (2048, 32)])
@every_form
def test_integers_multiply_as_the_weight_they_stand_for(
    bits, group_size, num_in, num_out, has_bias, dtype
):
    *integers, weight = random_integers(bits, group_size, num_out, num_in)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    apply = pack_integers(bits, *integers, bias, dtype)
    wide = torch.randn(193, num_in + 6).to(dtype)[:, :num_in]
    expected = wide.double() @ weight.T + (0 if bias is None else bias.double())
    for num_rows in (0, 1, 2, 5, 12, 13, 31, 100, 193):
        assert_close(apply(wide[:num_rows]), expected[:num_rows].to(dtype))


@needs_native
@every_dtype
@pytest.mark.parametrize("num_in", [8, 24, 136, 1160])
def test_eight_bits_need_only_a_multiple_of_eight_input_features(num_in, dtype):
    *integers, weight = random_integers(8, None, 40, num_in)
    x = torch.randn(193, num_in).to(dtype)
    expected = (x.double() @ weight.T).to(dtype)
    apply = pack_integers(8, *integers, None, dtype)
    for num_rows in (1, 20, 193):
        assert_close(apply(x[:num_rows]), expected[:num_rows])


@needs_native
@every_dtype
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_depends_on_no_other_row(num_threads, dtype):
    even, odd = torch.randn(150, 2048).to(dtype), torch.randn(150, 1023).to(dtype)
    apply_odd = pack((torch.randn(160, 1023) * 1023**-0.5).to(dtype), None)
    pairs = [(even, apply) for apply in every_packed(160, 2048, dtype)]
    for x, apply in [*pairs, (odd, apply_odd), (even[:, 5:1028], apply_odd)]:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            together = apply(x)
        finally:
            torch.set_num_threads(before)
        for row in range(0, 150, 7):
            assert torch.equal(apply(x[row : row + 1])[0], together[row])
        for num_rows in (2, 7, 12, 13, 36, 37, 97):
            assert torch.equal(apply(x[40 : 40 + num_rows]), together[40 : 40 + num_rows])


@needs_native
@every_dtype
@pytest.mark.parametrize("num_rows", [1, 12, 40, 150])
def test_an_odd_number_of_input_features_is_as_with_one_more_of_zeros(num_rows, dtype):
    weight = (torch.randn(70, 301) * 301**-0.5).to(dtype)
    x = torch.randn(num_rows, 301).to(dtype)
    even = pack(pad(weight, (0, 1)), None)(pad(x, (0, 1)))
    assert torch.equal(pack(weight, None)(x), even)


@needs_native
@pytest.mark.parametrize("num_rows", [1, 40])
def test_as_float32_it_gives_the_same_numbers(num_rows):
    apply = pack(torch.randn(70, 64).bfloat16(), torch.randn(70).bfloat16())
    x = torch.randn(num_rows, 64).bfloat16()
    assert torch.equal(apply(x, torch.float32), apply(x).float())


@needs_native
def test_four_bits_with_scale_and_offset_in_half_precision_are_exact():
    # GGUF's Q4_1: weight = q * d + m, q from 0 to 15
    d, m = torch.rand(64, 4).half().float(), torch.randn(64, 4).half().float()
    q = torch.randint(0, 16, (64, 128))
    weight = q * d.repeat_interleave(32, 1) + m.repeat_interleave(32, 1)
    values, offsets = (q - 8).to(torch.int8), m + 8 * d
    apply = pack_integers(4, values, d, offsets, None, torch.float32)
    assert torch.equal(apply(torch.eye(128)), weight.T)


@needs_native
def test_it_names_what_does_not_fit():
    integers = random_integers(8, None, 8, 16)[:3]
    wide = pack_integers(8, *integers, None, torch.bfloat16)
    for apply in (pack(torch.randn(8, 16).bfloat16(), None), wide):
        with pytest.raises(ValueError, match=r"x has shape \(3, 24\); it must be \(3, 16\)"):
            apply(torch.randn(3, 24).bfloat16())
        with pytest.raises(ValueError, match=r"x has dtype torch\.float32"):
            apply(torch.randn(3, 16))


def test_other_weights_are_left_to_others():
    assert not can_pack(torch.randn(8, 4).half())
    assert not can_pack(torch.randn(8, 4, device="meta").bfloat16())
    values = torch.zeros(8, 16, dtype=torch.int8)
    assert not can_pack_integers(values, torch.float16)
    assert not can_pack_integers(values[:, :12], torch.bfloat16)
    assert not can_pack_integers(values.to("meta"), torch.bfloat16)


@needs_native
@pytest.mark.parametrize("has_amx", [False, True])
def test_maps_are_packed_with_and_without_amx(monkeypatch, has_amx):
    # With AMX, oneDNN rounds a row differently by the number of rows, so Quire's maps replace it.
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_amx})
    assert can_pack(torch.randn(64, 32).bfloat16())


def test_a_weight_on_a_gpu_compiles_nothing(monkeypatch):
    def compiles():
        raise AssertionError("the C kernels are compiled")

    monkeypatch.setattr("kernels.cpu.linear.native", compiles)
    weight = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    assert not can_pack(weight)
    assert not can_pack_integers(weight.to(torch.int8), torch.bfloat16)
