import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.quantize.rounding import round_for_inputs, round_to_nearest


def inputs(num_in, num=400, seed=0):
    """Inputs whose features occur together and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num, num_in // 2, generator=generator) @ torch.randn(
        num_in // 2, num_in, generator=generator
    )
    return mixed * torch.rand(num_in, generator=generator).exp().square()


def error(weight, rounded, x):
    return float((x @ (weight - rounded.dequantized()).t()).square().mean())


@given(st.integers(0, 2**31), st.sampled_from([4, 8]), st.sampled_from([32, 64]))
def test_outputs_change_less_than_if_each_number_is_rounded_by_itself(seed, bits, group_size):
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(seed))
    x = inputs(128, seed=seed)
    fitted = round_for_inputs(weight, x.t() @ x, bits, group_size)
    nearest = round_to_nearest(weight, bits, group_size)
    assert error(weight, fitted, x) < 0.8 * error(weight, nearest, x)


@given(st.integers(0, 2**31), st.sampled_from([4, 8]))
def test_integers_and_grids_are_in_range(seed, bits):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    x = inputs(64, seed=seed)
    rounded = round_for_inputs(weight, x.t() @ x, bits, 32)
    for numbers in (rounded.values, rounded.zeros):
        assert 0 <= int(numbers.min()) <= int(numbers.max()) < 2**bits
    assert rounded.values.shape == (8, 64)
    assert rounded.scales.shape == rounded.zeros.shape == (8, 2)


def test_a_weight_on_a_grid_is_kept_as_it_is():
    integers = torch.randint(16, (8, 64))
    integers[:, [0, 32]], integers[:, [1, 33]] = 0, 15
    weight = (integers - 5.0) * 0.25
    x = inputs(64)
    rounded = round_for_inputs(weight, x.t() @ x, 4, 32)
    torch.testing.assert_close(rounded.dequantized(), weight)


def test_the_weight_that_is_given_is_not_changed():
    weight = torch.randn(8, 32)
    before = weight.clone()
    x = inputs(32)
    round_for_inputs(weight, x.t() @ x, 4, 32)
    assert torch.equal(weight, before)


@given(st.integers(0, 2**31))
def test_features_that_never_occur_are_rounded_or_cut_to_the_grid_s_range(seed):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    x = inputs(64, seed=seed)
    x[:, 10:20] = 0
    rounded = round_for_inputs(weight, x.t() @ x, 4, 32)
    scales, zeros = (each.float()[:, :1] for each in (rounded.scales, rounded.zeros))
    in_range = weight[:, 10:20].clamp(-zeros * scales, (15 - zeros) * scales)
    lost = (rounded.dequantized()[:, 10:20] - in_range).abs()
    assert bool((lost <= 0.5001 * scales).all())


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_constant_weight(value):
    weight, x = torch.full((4, 32), value), inputs(32)
    rounded = round_for_inputs(weight, x.t() @ x, 4, 32)
    torch.testing.assert_close(rounded.dequantized(), weight, atol=1e-3, rtol=1e-3)


def test_a_map_that_saw_no_input_is_rounded_to_nearest():
    weight = torch.randn(8, 64)
    rounded = round_for_inputs(weight, torch.zeros(64, 64), 4, 32)
    assert torch.equal(rounded.values, round_to_nearest(weight, 4, 32).values)
