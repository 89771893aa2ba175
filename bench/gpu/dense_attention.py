"""Torch's attention over dense keys and values, the baseline of the paged kernels."""

from collections.abc import Callable

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kernels.tuning.workload import PagedInputs

Launch = Callable[[], torch.Tensor]


def dense(paged: PagedInputs, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [S, HKV, seq_len, D], contiguous, of sequences of equal length."""
    tables = paged.block_tables.long()

    def read(cache: torch.Tensor) -> torch.Tensor:
        return cache[tables].flatten(1, 2)[:, :seq_len].transpose(1, 2).contiguous()

    return read(paged.key_cache), read(paged.value_cache)


def sdpa(query: torch.Tensor, paged: PagedInputs, query_len: int, seq_len: int) -> Launch:
    """Return a launch of SDPA; `query` is [S * query_len, H, D], as is its result."""
    key, value = dense(paged, seq_len)
    q = query.unflatten(0, (-1, query_len)).transpose(1, 2)  # [S, H, Q, D]
    is_causal = query_len == seq_len
    # The mask is aligned to the last key, not the first; None if there is one query, which sees
    # all.
    bias = None if is_causal or query_len == 1 else causal_lower_right(query_len, seq_len)

    def launch() -> torch.Tensor:
        out = scaled_dot_product_attention(
            q, key, value, attn_mask=bias, is_causal=is_causal, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return launch


def flex(query: torch.Tensor, paged: PagedInputs, query_len: int, seq_len: int) -> Launch:
    """Do as `sdpa` does, but with FlexAttention, which is compiled on a GPU."""
    from torch.nn.attention.flex_attention import (  # noqa: PLC0415  slow, and new
        create_block_mask,
        flex_attention,
    )

    key, value = dense(paged, seq_len)
    q = query.unflatten(0, (-1, query_len)).transpose(1, 2)
    mask = None
    if query_len > 1:
        shift = seq_len - query_len
        mask = create_block_mask(
            lambda _b, _h, row, column: row + shift >= column,
            None,
            None,
            query_len,
            seq_len,
            device=query.device.type,
        )
    attend = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention

    def launch() -> torch.Tensor:
        out = attend(q, key, value, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return launch
