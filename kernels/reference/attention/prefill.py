"""Causal paged attention for chunks of many tokens, in plain torch.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim of queries and
keys, `DV` that of values, `B` blocks, `P` block size, `M` max blocks per sequence.
"""

from typing import Final

import torch

from kernels.reference.attention.dense import attend_dense
from kernels.reference.attention.gather import KvGather

# Query tokens are cut into pieces at multiples of this number, and SDPA is called for each piece.
# So the keys after a piece are left out, which saves 0.3 of the time for a prompt of 512 tokens,
# and masks stay small.
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
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with each query token to its sequence, up to the token's own position.

    Returns [T, H, DV]. The rows [query_start_loc[s], query_start_loc[s + 1]) of `query` [T, H, D]
    are the last tokens of sequence s. If there are q such rows, the i-th of them has the position
    seq_lens[s] - q + i. The keys and values of these tokens are already in the caches, which are
    [B, P, HKV, D] and [B, P, HKV, DV] views. `block_tables` is int32[S, M], `seq_lens` int32[S] and
    `query_start_loc` int32[S + 1]. The first number of `query_start_loc` may be above 0. No
    sequence has more than `max_query_len` query tokens. Softmax and sums are fp32.

    No bit of a row depends on other sequences. If prompts are cut into chunks only at multiples of
    64 tokens, no bit depends on the cuts either; with other cuts, results agree up to rounding. A
    chunk of one token gives the same result as `paged_attention_decode`.

    `window`, `softcap`, `sinks` and the scales are as in `paged_attention_decode`.

    If `out` is given, contiguous [T, H, DV], the result is written to `out`, and `out` is returned.
    Rows that belong to no sequence are undefined if `out` is given, and zero otherwise.
    """
    if out is None:
        out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    starts: list[int] = query_start_loc.tolist()
    lens: list[int] = seq_lens.tolist()
    kv = KvGather(key_cache, value_cache, key_scales, value_scales, query.dtype)
    for seq, seq_len in enumerate(lens):
        start, end = starts[seq], starts[seq + 1]
        first = seq_len - (end - start)
        if start == end or seq_len == 0:
            continue
        low = _first_visible(first, window)
        key, value = kv.read(block_tables[seq], low, seq_len)
        # Attend with one piece at a time, which has the positions [begin, stop).
        for edge in range(first - first % _PIECE, seq_len, _PIECE):
            begin, stop = max(edge, first), min(edge + _PIECE, seq_len)
            visible = slice(_first_visible(begin, window) - low, stop - low)
            rows = slice(start + begin - first, start + stop - first)
            out[rows] = attend_dense(
                query[rows],
                key[:, :, visible],
                value[:, :, visible],
                window,
                scale,
                softcap=softcap,
                sinks=sinks,
            )
    return out


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)
