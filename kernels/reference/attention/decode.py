"""Paged attention for one new token per sequence, in plain torch.

Symbols: `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim of queries and keys, `DV` that
of values, `B` blocks, `P` block size, `M` max blocks per sequence.
"""

import torch

from kernels.reference.attention.dense import attend_dense
from kernels.reference.attention.gather import KvGather


def paged_attention_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with `query` [S, H, D] to the first `seq_lens[s]` positions of each sequence s.

    Returns [S, H, DV].

    The caches are [B, P, HKV, D] and [B, P, HKV, DV] views, `block_tables` int32[S, M], `seq_lens`
    int32[S]. A sequence of length 0 is a padding row and gives zeros. Softmax and sums are fp32.
    The values may be a view of the keys' first DV numbers, as in multi-head latent attention.

    SDPA is called once for each sequence, with the sequence's exact length, so no bit of a row
    depends on other rows of the batch. A single padded call for all sequences would take three
    quarters of the time for 8 sequences of equal length, but twice the time for sequences of
    different lengths.

    With `window` only the last `window` positions are read and attended to. With `softcap` each
    score x becomes `softcap * tanh(x / softcap)`. `sinks`, fp32 [H], has one more score for each
    head. This score counts only in the softmax's denominator: it belongs to no position and no V,
    and `scale` and `softcap` do not change it.

    With `key_scales` and `value_scales`, bfloat16 [B, P, HKV] views, the caches are quantized as
    `kernels.kv_formats` says; K and V are the stored numbers times their scales, rounded to the
    dtype of `query`.

    If `out` is given, it is contiguous [T, H, DV], and `query` is [T, H, D], where T is S or more.
    Then the first S rows of `out` are written, and `out` is returned.
    """
    num_seqs = len(seq_lens)
    if out is None:
        out = query.new_empty(num_seqs, query.shape[1], value_cache.shape[3])
    out[:num_seqs] = 0
    lens: list[int] = seq_lens.tolist()
    kv = KvGather(key_cache, value_cache, key_scales, value_scales, query.dtype)
    for seq, seq_len in enumerate(lens):
        if seq_len > 0:
            first = 0 if window is None else max(0, seq_len - window)
            key, value = kv.read(block_tables[seq], first, seq_len)
            out[seq] = attend_dense(
                query[seq : seq + 1], key, value, None, scale, softcap=softcap, sinks=sinks
            )
    return out
