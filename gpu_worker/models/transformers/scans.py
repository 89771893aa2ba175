"""Computes recurrent layers of `transformers` token by token, in float32, with our own scans.

The library `transformers` has one algorithm for prompts and another for decodes, and the two round
differently. With these algorithms in bfloat16, a token's result would depend on whether the token
was computed in a whole prompt, in a chunk, or as a decode. Our operations compute a token in the
same way every time. Also, the library's scan of Mamba 1 begins without a state, so it cannot
continue a prompt after the prompt's first chunk.

Symbols: `S` sequences, `T` tokens of each, `E` hidden size, `C` channels, `I` inner size, `H`
heads, `P` head dim, `G` groups of heads, `N` state size. `HK` is the number of query heads, which
is also the number of key heads, and `K` is their head dim.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn
from transformers.activations import ACT2FN

from kernels.cpu.ops import delta_scan, selective_scan

_LINEAR_SOFTPLUS: Final = 20.0
"""Above this number, softplus is the identity in float32."""


def token_by_token(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Return the forward pass of a recurrent module, with our operations instead of its own."""
    if hasattr(module, "x_proj") and hasattr(module, "dt_proj"):
        return partial(_mamba, module)
    forward = inspect.unwrap(type(module).forward)
    names = forward.__globals__
    ours = {name: operation for name, operation in _OPERATIONS.items() if name in names}
    dt_limit: Any = getattr(module, "time_step_limit", None)
    if dt_limit is not None:  # the library applies the limit only to prompts
        ours["mamba2_selective_state_update"] = partial(_scan_one, dt_limit=dt_limit)
    copied = FunctionType(
        forward.__code__, names | ours, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copied, module)


def _mamba(module: Any, hidden_states: torch.Tensor, cache_params: Any, **_: Any) -> torch.Tensor:
    """Compute a layer of Mamba 1, Falcon Mamba or Jamba: `[S, T, E]` to `[S, T, E]`."""
    num_tokens, width = hidden_states.shape[1], module.ssm_state_size
    inner, gate = module.in_proj(hidden_states).chunk(2, dim=2)  # [S, T, I]
    inner = cache_params.update_conv_state(inner.transpose(1, 2), module.layer_idx)
    weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    inner = _convolve(inner, weight, bias, module.activation)[:, :, -num_tokens:].transpose(1, 2)
    projected = module.x_proj(inner).split([module.time_step_rank, width, width], dim=2)
    dt, b, c = (
        norm(rows) if (norm := getattr(module, f"{name}_layernorm", None)) else rows
        for name, rows in zip(("dt", "b", "c"), projected, strict=True)
    )
    before = cache_params.get_recurrent_state(module.layer_idx)  # [S, I, N]
    out, after = selective_scan(
        inner.unsqueeze(3),
        _softplus(module.dt_proj(dt).float()),
        -torch.exp(module.A_log.float()),
        b.unsqueeze(2),
        c.unsqueeze(2),
        module.D.float(),
        None if before is None else before.unsqueeze(2),
    )
    cache_params.update_recurrent_state(after.squeeze(2), module.layer_idx)
    gated: torch.Tensor = module.out_proj(out.squeeze(3) * _silu(gate))
    return gated


def _scan(
    hidden_states: torch.Tensor,  # [S, T, H, P]
    dt: torch.Tensor,  # [S, T, H]
    A: torch.Tensor,  # noqa: N803  [H]
    B: torch.Tensor,  # noqa: N803  [S, T, G, N]
    C: torch.Tensor,  # noqa: N803  [S, T, G, N]
    *,
    D: torch.Tensor,  # noqa: N803  [H]
    dt_bias: torch.Tensor,  # [H]
    initial_states: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `mamba2_chunk_scan`."""
    step = _softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    return selective_scan(
        hidden_states, step, A.float().unsqueeze(1), B, C, D.float(), initial_states
    )


def _scan_one(
    state: torch.Tensor,  # [S, H, P, N]
    hidden_states: torch.Tensor,  # [S, H, P]
    dt: torch.Tensor,  # [S, H, P], all P alike
    A: torch.Tensor,  # noqa: N803  [H, P, N], all P and N alike
    B: torch.Tensor,  # noqa: N803  [S, G, N]
    C: torch.Tensor,  # noqa: N803  [S, G, N]
    D: torch.Tensor,  # noqa: N803  [H, P], all P alike
    *,
    dt_bias: torch.Tensor,  # [H, P], all P alike
    dt_limit: tuple[float, float],
    z: torch.Tensor | None = None,  # [S, H, P]
    **_: Any,
) -> torch.Tensor:
    """Replace `mamba2_selective_state_update`; changes `state` in place."""
    out, after = _scan(
        hidden_states.unsqueeze(1),
        dt[:, None, :, 0],
        A[:, 0, 0],
        B.unsqueeze(1),
        C.unsqueeze(1),
        D=D[:, 0],
        dt_bias=dt_bias[:, 0],
        initial_states=state,
        dt_limit=dt_limit,
    )
    state.copy_(after)
    out = out.squeeze(1)
    return out if z is None else out * _silu(z)


def _delta(
    query: torch.Tensor,  # [S, T, HK, K]
    key: torch.Tensor,  # [S, T, HK, K]
    value: torch.Tensor,  # [S, T, H, P]
    g: torch.Tensor,  # [S, T, H]
    beta: torch.Tensor,  # [S, T, H]
    *,
    initial_state: torch.Tensor | None = None,  # [S, H, K, P]
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `torch_chunk_gated_delta_rule` and `torch_recurrent_gated_delta_rule`."""
    return delta_scan(query, key, value, g.float(), beta.float(), initial_state)


def _convolve(
    hidden_states: torch.Tensor,  # [S, C, T]
    weight: torch.Tensor,  # [C, taps]
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Replace `causal_conv1d_fn`; the order in which taps are added does not depend on `T`."""
    num_taps = weight.shape[1]
    padded = nn.functional.pad(hidden_states.float(), (num_taps - 1, 0))
    out = padded.new_zeros(()) if bias is None else bias.float().unsqueeze(1)
    for tap, factors in enumerate(weight.float().unsqueeze(2).unbind(1)):
        out = out + factors * padded[:, :, tap : tap + hidden_states.shape[2]]
    if activation in {"silu", "swish"}:
        out = _silu(out)
    elif activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _convolve_next(
    hidden_states: torch.Tensor,  # [S, C, T]
    conv_state: torch.Tensor,  # [S, C, taps]
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Replace `causal_conv1d_update`; changes `conv_state` in place."""
    both = torch.cat([conv_state, hidden_states], dim=2)
    conv_state.copy_(both[:, :, -conv_state.shape[2] :])
    return _convolve(both, weight, bias, activation)[:, :, -hidden_states.shape[2] :]


def _silu(x: torch.Tensor) -> torch.Tensor:
    # torch's own function rounds the last elements of a vector, or of a thread's part, differently.
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    # torch's own function rounds the last elements of a vector differently.
    return torch.where(x > _LINEAR_SOFTPLUS, x, torch.log1p(torch.exp(x)))


_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolve,
    "causal_conv1d_update": _convolve_next,
    "mamba2_chunk_scan": _scan,
    "torch_chunk_gated_delta_rule": _delta,
    "torch_recurrent_gated_delta_rule": _delta,
}
"""Our operations, by the library's names of the operations that they replace."""
