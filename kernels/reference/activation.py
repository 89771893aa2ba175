"""Gated products in plain torch.

Symbols: `T` tokens, `I` intermediate size.
"""

import math

import torch
from torch.nn.functional import silu


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` [T, I] for `gate_up` [T, 2 * I], with gate in the first half.

    `silu(gate)` is rounded to the dtype of `gate_up` before it is multiplied by `up`, as in a model
    that calls `torch.nn.functional.silu`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return `x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2`, elementwise, in fp32.

    torch's own tanh GELU is not used: on a CPU, its last bits depend on where an element is in the
    tensor.
    """
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return 0.5 * wide * (1 + inner.tanh())


def tanh_gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `tanh_gelu(gate) * up` [T, I] for `gate_up` [T, 2 * I], with gate in the first half.

    `tanh_gelu(gate)` is rounded to the dtype of `gate_up` before it is multiplied by `up`, as in a
    model that calls GELU separately.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return tanh_gelu(gate).to(gate_up.dtype).mul_(up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return `(up + 1) * gate * sigmoid(alpha * gate)` [T, I] for `gate_up` [T, 2 * I].

    The first half is `gate`, which is clamped to at most `limit`. The second half is `up`, which is
    clamped to [-limit, limit]. The result is computed in fp32 and rounded once.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(alpha * gate))).to(gate_up.dtype)
