import math

import pytest
import torch

from kernels import reference
from kernels.cpu import ops as in_c
from kernels.cpu.library import native
from kernels.triton.activation import clamped_swiglu, silu_mul, tanh_gelu_mul
from tests.kernels.tensors import far_apart, strided
from tests.kernels.tolerance import assert_close, every_dtype

gates = pytest.mark.parametrize("gate", [silu_mul, tanh_gelu_mul])


def twin(gate):
    return getattr(reference, gate.__name__)


@gates
@every_dtype
@pytest.mark.parametrize("shape", [(1, 2), (5, 70), (3, 3000)])
def test_gating_is_the_twin_s(gate, shape, dtype, device):
    gate_up = strided(shape, dtype, device)
    assert_close(gate(gate_up), twin(gate)(gate_up))


@pytest.mark.parametrize(
    ("gated", "module"),
    [
        (reference.silu_mul, torch.nn.SiLU()),
        (reference.tanh_gelu_mul, torch.nn.GELU(approximate="tanh")),
    ],
)
@every_dtype
def test_the_twin_is_the_two_module_form(gated, module, dtype):
    gate, up = torch.randn(4, 48).to(dtype), torch.randn(4, 48).to(dtype)
    # Equal up to rounding: torch's exp rounds a row's full vectors and its rest differently.
    assert_close(gated(torch.cat((gate, up), dim=-1)), module(gate) * up)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
@pytest.mark.parametrize(
    "op", [silu_mul, reference.silu_mul, tanh_gelu_mul, reference.tanh_gelu_mul]
)
def test_large_gates_neither_overflow_nor_turn_nan(op, device):
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=device)
    assert op(gate_up).tolist() == [[0.0, 200.0]]


@gates
def test_gating_reaches_past_int32_offsets(gate, device):
    gate_up = far_apart((3, 70), torch.float16, device)
    assert_close(gate(gate_up), twin(gate)(gate_up))


@gates
def test_gating_names_what_does_not_fit(gate, device):
    with pytest.raises(ValueError, match="gate_up has width 5"):
        gate(torch.randn(2, 5, device=device))
    with pytest.raises(ValueError, match="gate_up has 1 dimensions"):
        gate(torch.randn(4, device=device))


def in_native_code(gate_up, alpha, limit):
    library = native()
    if library is None or gate_up.dtype is torch.float16:
        pytest.skip("needs native code for this dtype")
    return in_c.clamped_swiglu(library, gate_up, alpha, limit)


@every_dtype
@pytest.mark.parametrize("op", [clamped_swiglu, in_native_code])
@pytest.mark.parametrize("shape", [(1, 2), (5, 70), (3, 3000)])
def test_clamped_swiglu_is_the_twin_s(op, shape, dtype, device):
    gate_up = 6 * strided(shape, dtype, device)
    expected = reference.clamped_swiglu(gate_up, 1.702, 7.0)
    assert_close(op(gate_up, 1.702, 7.0) / 8, expected / 8)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
@pytest.mark.parametrize("op", [clamped_swiglu, reference.clamped_swiglu, in_native_code])
def test_the_clamped_swiglu_by_hand(op, device):
    gate_up = torch.tensor([[9.0, -200.0, 0.5, 1.0, 9.0, -9.0]], device=device)
    half = 0.5 / (1 + math.exp(-1.702 * 0.5))
    expected = torch.tensor([[2 * 7 / (1 + math.exp(-1.702 * 7)), 0.0, -6 * half]], device=device)
    torch.testing.assert_close(op(gate_up, 1.702, 7.0), expected)


@pytest.mark.parametrize("op", [clamped_swiglu, in_native_code])
def test_a_clamp_keeps_nan(op, device):
    gate_up = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]], device=device)
    assert op(gate_up, 1.702, 7.0).isnan().all()


def test_clamped_swiglu_reaches_past_int32_offsets(device):
    gate_up = far_apart((3, 70), torch.float16, device)
    args = gate_up, 1.702, 7.0
    assert_close(clamped_swiglu(*args), reference.clamped_swiglu(*args))


@pytest.mark.parametrize("op", [clamped_swiglu, in_native_code])
def test_clamped_swiglu_names_what_does_not_fit(op, device):
    with pytest.raises(ValueError, match="gate_up has width 5"):
        op(torch.randn(2, 5, device=device), 1.702, 7.0)
