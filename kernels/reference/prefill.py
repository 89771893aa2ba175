"""Causal paged attention for chunks of many tokens, in plain torch.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim, `B` blocks,
`P` block size, `M` max blocks per sequence.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.reference.decode import attend_one
from kernels.reference.gather import KvGather


def paged_attention_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,  # noqa: ARG001  the launcher sizes its grid by it
    scale: float,
) -> torch.Tensor:
    """Attend with each query token to its sequence's slots up to its own position; [T, H, D].

    Sequence s owns the rows [query_start_loc[s], query_start_loc[s + 1]) of `query` [T, H, D], its
    last query_len tokens: row i has position seq_len - query_len + i. The keys and values of these
    tokens are already in the caches, [B, P, HKV, D] views. `block_tables` is int32[S, M],
    `seq_lens` int32[S], `query_start_loc` int32[S + 1]; no query_len is above `max_query_len`.
    Rows of no sequence give zeros. Softmax and sums are fp32.

    A row depends on no other sequence, to the last bit; a chunk of one token gives what
    `paged_attention_decode` gives. Other ways of chunking a prompt agree to rounding.
    """
    out = torch.zeros_like(query)
    starts: list[int] = query_start_loc.tolist()
    lens: list[int] = seq_lens.tolist()
    kv = KvGather.for_lens(key_cache, value_cache, lens)
    for seq, seq_len in enumerate(lens):
        start, end = starts[seq], starts[seq + 1]
        if start == end or seq_len == 0:
            continue
        key, value = kv.read(block_tables[seq], seq_len)
        if end - start == 1:
            out[start] = attend_one(query[start], key, value, scale)
        else:
            out[start:end] = _attend_chunk(query[start:end], key, value, scale)
    return out


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    query_len, seq_len = query.shape[0], key.shape[2]
    mask = None
    if query_len < seq_len:  # SDPA's `is_causal` aligns the first row, not the last, with the keys
        mask = query.new_ones((query_len, seq_len), dtype=torch.bool).tril(seq_len - query_len)
    attended = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),  # [1, H, query_len, D]
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)
