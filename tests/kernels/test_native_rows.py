"""Norms, rotation and gating in C, against their twins."""

import pytest
import torch

from kernels import ops, reference
from tests.kernels.tensors import far_apart, strided
from tests.kernels.tolerance import assert_close

EPS = 1e-5

wide_weights = pytest.mark.parametrize("is_wide", [False, True], ids=["", "fp32 weight"])

native_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def table(num_positions, head_dim):
    angles = torch.outer(torch.arange(num_positions).float(), torch.rand(head_dim // 2))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@native_dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (5, 768), (64, 768), (0, 16), (4, 3, 24)])
@wide_weights
def test_rms_norm_is_the_twin_s(shape, dtype, is_wide):
    x = strided(shape, dtype, "cpu")
    weight = torch.randn(shape[-1]).to(torch.float32 if is_wide else dtype)
    assert_close(ops.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@native_dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (5, 768), (64, 768)])
@wide_weights
def test_add_rms_norm_is_the_twin_s_and_keeps_its_inputs(shape, dtype, is_wide):
    x, residual = strided(shape, dtype, "cpu"), strided(shape, dtype, "cpu")
    weight = torch.randn(shape[-1]).to(torch.float32 if is_wide else dtype)
    kept = x.clone(), residual.clone()
    out, total = ops.add_rms_norm(x, residual, weight, EPS)
    twin_out, twin_total = reference.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, twin_total)
    assert_close(out, twin_out)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


gates = pytest.mark.parametrize("gate", ["silu_mul", "tanh_gelu_mul"])


@gates
@native_dtypes
@pytest.mark.parametrize("shape", [(1, 2), (5, 70), (3, 3000), (40, 1024)])
def test_gating_is_the_twin_s(gate, shape, dtype):
    gate_up = strided(shape, dtype, "cpu")
    assert_close(getattr(ops, gate)(gate_up), getattr(reference, gate)(gate_up))


@gates
@pytest.mark.parametrize("width", [1, 16])
def test_large_gates_neither_overflow_nor_turn_nan(gate, width):
    large = torch.tensor([-200.0, 200.0, -88.5, 1e38]).repeat_interleave(width)
    out = getattr(ops, gate)(torch.cat((large, torch.ones_like(large)))[None])
    assert_close(out[0], torch.nn.functional.silu(large))


@gates
def test_a_gate_keeps_nan(gate):
    assert getattr(ops, gate)(torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]])).isnan().all()


@native_dtypes
@pytest.mark.parametrize(
    ("head_dim", "rotated"), [(2, 2), (40, 40), (64, 64), (128, 128), (40, 6), (128, 96)]
)
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_rotary_is_the_twin_s(num_tokens, head_dim, rotated, dtype):
    query = strided((num_tokens, 6, head_dim), dtype, "cpu")
    key = strided((num_tokens, 2, head_dim), dtype, "cpu")
    args = query, key, table(99, rotated), torch.randint(99, (num_tokens,))
    for ours, twin in zip(ops.rotary(*args), reference.rotary(*args), strict=True):
        assert_close(ours, twin)


def test_rows_reach_past_int32_offsets():
    x = far_apart((3, 40), torch.bfloat16, "cpu")
    weight = torch.randn(40, dtype=torch.bfloat16)
    assert_close(ops.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert_close(ops.silu_mul(x), reference.silu_mul(x))
    assert_close(ops.tanh_gelu_mul(x), reference.tanh_gelu_mul(x))


def test_rows_name_the_tensor_that_does_not_fit():
    x, weight = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); it must be \(8,\)"):
        ops.rms_norm(x, weight[:7], EPS)
    with pytest.raises(ValueError, match=r"residual has dtype torch\.bfloat16"):
        ops.add_rms_norm(x, x.bfloat16(), weight, EPS)
    with pytest.raises(ValueError, match="gate_up has width 5"):
        ops.silu_mul(torch.randn(2, 5))
    query, positions = torch.randn(2, 4, 16), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"cos_sin has shape \(4, 18\); it must .* at most 16"):
        ops.rotary(query, query, table(4, 18), positions)
    with pytest.raises(ValueError, match=r"positions has dtype torch\.int32"):
        ops.rotary(query, query, table(4, 16), positions.int())
