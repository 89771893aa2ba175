"""Causal attention to contiguous keys and values.

The plain-torch versions of attention kernels (`kernels/reference`) call it.

Symbols: `Q` query tokens, `K` keys, `H` query heads, `HKV` kv heads, `D` head dim of queries and
keys, `DV` that of values.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with the last Q of K tokens; return [Q, H, DV].

    `query` is [Q, H, D], `key` [1, HKV, K, D] and `value` [1, HKV, K, DV]. Each token attends to
    the keys up to its own, or with `window` to the last `window` of these keys. `softcap` and
    `sinks` are as in `paged_attention_decode`. Softmax and sums are fp32.
    """
    num_queries, num_keys = query.shape[0], key.shape[2]
    has_edge = window is not None and num_keys > window
    if softcap is not None or sinks is not None:
        mask = _mask(num_queries, num_keys, window, query.device)
        return _attend_by_definition(query, key, value, mask, scale, softcap, sinks)
    if num_queries == 1 and not has_edge:
        # The query heads of a group are the rows of one product, so K and V are read once per
        # group; SDPA's own `enable_gqa` reads them once per head, five times slower in bf16.
        grouped = query.reshape(1, key.shape[1], -1, query.shape[-1])  # [1, HKV, H / HKV, D]
        attended = scaled_dot_product_attention(grouped, key, value, scale=scale)
        return attended.reshape(1, query.shape[1], -1)
    # SDPA's `is_causal` aligns the first query with the first key; here the last query is aligned
    # with the last key.
    is_causal = num_queries == num_keys and not has_edge
    attended = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),  # [1, H, Q, D]
        key,
        value,
        attn_mask=None if is_causal else _mask(num_queries, num_keys, window, query.device),
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)


def _mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return bool[Q, K]: whether each query token attends to each key."""
    shift = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(shift)
    return mask if window is None else mask.triu(shift - window + 1)


def _attend_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.float().transpose(0, 1).reshape(num_kv_heads, -1, head_dim)  # G * Q rows each
    scores = (grouped @ key[0].float().mT * scale).view(num_heads, num_queries, -1)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        extra = sinks.view(-1, 1, 1).expand(-1, num_queries, 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    attended = weights.reshape(num_kv_heads, -1, weights.shape[-1]) @ value[0].float()
    return attended.view(num_heads, num_queries, -1).transpose(0, 1).to(query.dtype)
