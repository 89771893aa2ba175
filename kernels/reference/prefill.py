"""Causal paged attention for chunks of many tokens, in plain torch.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim, `B` blocks,
`P` block size, `M` max blocks per sequence.
"""

from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.reference.decode import attend_one
from kernels.reference.gather import KvGather

# Query tokens that one call of SDPA takes, cut at multiples of it: what lies in a piece's future is
# not computed (a prompt of 512 takes 0.7 of the time) and masks stay small.
_PIECE: Final = 64


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

    A row depends on no other sequence, to the last bit. Neither does it depend on how the prompt
    was cut into chunks, if the cuts are at multiples of 64; other cuts agree to rounding. A chunk
    of one token gives what `paged_attention_decode` gives.
    """
    out = torch.zeros_like(query)
    starts: list[int] = query_start_loc.tolist()
    lens: list[int] = seq_lens.tolist()
    kv = KvGather(key_cache, value_cache)
    for seq, seq_len in enumerate(lens):
        start, end = starts[seq], starts[seq + 1]
        if start < end and seq_len > 0:
            key, value = kv.read(block_tables[seq], seq_len)
            _attend_chunk(query[start:end], key, value, scale, out[start:end])
    return out


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """Write to `out` what the last positions of one sequence attend to, a piece at a time."""
    seq_len = key.shape[2]
    first = seq_len - query.shape[0]
    for edge in range(first - first % _PIECE, seq_len, _PIECE):
        start, end = max(edge, first), min(edge + _PIECE, seq_len)
        rows = slice(start - first, end - first)
        visible = key[:, :, :end], value[:, :, :end]
        if end - start == 1:
            out[rows] = attend_one(query[rows].squeeze(0), *visible, scale)
        else:
            out[rows] = _attend_piece(query[rows], *visible, scale)


def _attend_piece(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    num_rows, end = query.shape[0], key.shape[2]
    mask = None
    if num_rows < end:  # SDPA's `is_causal` aligns the first row, not the last, with the keys
        mask = query.new_ones((num_rows, end), dtype=torch.bool).tril(end - num_rows)
    attended = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),  # [1, H, num_rows, D]
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)
