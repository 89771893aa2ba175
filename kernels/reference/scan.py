"""The recurrences of Mamba layers and gated delta nets, in plain torch.

Symbols: `S` sequences, `T` tokens of each, `H` heads, `P` head dim, `G` groups of heads, `N` size
of a Mamba state (a head has `P * N` numbers), `HK` heads of queries and keys, `K` their head dim.
"""

import torch


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the states of Mamba layers by `T` tokens; see `kernels.cpu.ops.selective_scan`."""
    num_seqs, num_tokens, num_heads, head_dim = x.shape
    num_groups, width = b.shape[2:]
    b, c = (rows.float().repeat_interleave(num_heads // num_groups, dim=2) for rows in (b, c))
    wide = x.float()
    out = torch.empty_like(wide)
    if state is None:
        state = wide.new_zeros(num_seqs, num_heads, head_dim, width)
    for t in range(num_tokens):
        now = dt[:, t].unsqueeze(2)  # [S, H, 1]
        decay = torch.exp(now * a).unsqueeze(2)  # [S, H, 1, N or 1]
        state = state * decay + (now * wide[:, t]).unsqueeze(3) * b[:, t].unsqueeze(2)
        seen = (state * c[:, t].unsqueeze(2)).sum(3)  # [S, H, P]
        out[:, t] = seen + d.unsqueeze(1) * wide[:, t]
    return out.to(x.dtype), state


def delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the states of gated delta nets by `T` tokens; see `kernels.cpu.ops.delta_scan`."""
    num_seqs, num_tokens, num_key_heads, key_dim = k.shape
    num_heads, head_dim = v.shape[2:]
    q, k = (rows.repeat_interleave(num_heads // num_key_heads, 2).float() for rows in (q, k))
    q, k = (rows * torch.rsqrt(rows.pow(2).sum(3, keepdim=True) + 1e-6) for rows in (q, k))
    q = q * key_dim**-0.5
    wide = v.float()
    out = torch.empty_like(wide)
    if state is None:
        state = wide.new_zeros(num_seqs, num_heads, key_dim, head_dim)
    for t in range(num_tokens):
        state = state * torch.exp(g[:, t, :, None, None])
        key = k[:, t].unsqueeze(3)  # [S, H, K, 1]
        known = (state * key).sum(2)  # [S, H, P]
        news = (wide[:, t] - known) * beta[:, t].unsqueeze(2)
        state = state + key * news.unsqueeze(2)
        out[:, t] = (state * q[:, t].unsqueeze(3)).sum(2)
    return out.to(v.dtype), state
