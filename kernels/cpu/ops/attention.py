"""Paged attention in C, for decodes and for chunks of many tokens.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim, `B` blocks,
`P` block size, `M` max blocks per sequence.
"""

from typing import Final

import torch

from kernels import reference
from kernels.checks import check_paged, check_tensor
from kernels.cpu.library import DTYPES, Library, native
from kernels.cpu.program.caches import address, kv_format, scale_strides

_SPLIT: Final = 512
"""Positions that a lone token looks at in one piece of work; `SPLIT` in C."""
_LANES: Final = 16


def new_partials(query: torch.Tensor, num_seqs: int, max_len: int) -> torch.Tensor:
    """Room for the pieces of lone tokens' results, for sequences of at most `max_len` tokens.

    `query` is [T, H, D].
    """
    _, num_heads, head_dim = query.shape
    size = num_partials(num_heads, head_dim, num_seqs, max_len)
    return query.new_empty(size, dtype=torch.float32)


def num_partials(num_heads: int, head_dim: int, num_seqs: int, max_len: int) -> int:
    """How many numbers `new_partials` has; none if all results have one piece."""
    num_splits = -(-max_len // _SPLIT)
    if num_splits == 1:
        return 0
    width = -(-head_dim // _LANES) * _LANES + 2
    return num_seqs * num_heads * num_splits * width


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
) -> torch.Tensor:
    """Attend with `query` [S, H, D] to each sequence's first `seq_lens` slots; [S, H, D].

    The caches are [B, P, HKV, D] views, `block_tables` int32[S, M], `seq_lens` int32[S], each at
    most M * P: that is not checked. A sequence of length 0 is a padding row and gives zeros. A row
    depends on no other row of the batch, to the last bit, and is what
    `paged_attention_prefill` gives for it. The options are the twin's.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    library, dtype = native(), DTYPES.get(query.dtype)
    if library is None or dtype is None:
        return reference.paged_attention_decode(
            query, key_cache, value_cache, block_tables, seq_lens, scale,
            window=window, softcap=softcap, sinks=sinks,
            key_scales=key_scales, value_scales=value_scales,
        )  # fmt: skip
    num_seqs = query.shape[0]
    if block_tables.shape[0] != num_seqs:
        raise ValueError(f"block_tables has {block_tables.shape[0]} rows, required are {num_seqs}")
    return _attend(
        library, dtype, query, key_cache, value_cache, block_tables, seq_lens, None, scale,
        window, softcap, sinks, key_scales, value_scales,
    )  # fmt: skip


def paged_attention_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with each query token to its sequence's slots up to its own position; [T, H, D].

    Sequence s owns the rows [query_start_loc[s], query_start_loc[s + 1]) of `query` [T, H, D], its
    last query_len tokens: row i has position seq_len - query_len + i. The keys and values of these
    tokens are already in the caches, [B, P, HKV, D] views. `block_tables` is int32[S, M],
    `seq_lens` int32[S], `query_start_loc` int32[S + 1]; no query_len is above `max_query_len`.
    Rows of no sequence give zeros. A row depends on no other sequence, to the last bit, nor on how
    the prompt was cut into chunks. The options are the twin's.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    library, dtype = native(), DTYPES.get(query.dtype)
    if library is None or dtype is None:
        return reference.paged_attention_prefill(
            query, key_cache, value_cache, block_tables, seq_lens, query_start_loc,
            max_query_len, scale, window=window, softcap=softcap, sinks=sinks,
            key_scales=key_scales, value_scales=value_scales,
        )  # fmt: skip
    num_seqs = seq_lens.shape[0]
    check_tensor("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32, query)
    return _attend(
        library, dtype, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc,
        scale, window, softcap, sinks, key_scales, value_scales,
    )  # fmt: skip


def _attend(
    library: Library,
    dtype: int,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> torch.Tensor:
    check_paged(query, key_cache, value_cache, block_tables, seq_lens, key_scales, value_scales)
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    if sinks is not None:
        check_tensor("sinks", sinks, (num_heads,), torch.float32, query)
    out = query.new_empty(query.shape)
    partials = new_partials(query, seq_lens.shape[0], block_tables.shape[1] * block_size)
    library.attention(
        dtype, kv_format(key_cache, key_scales),
        seq_lens.shape[0], num_tokens, num_heads, num_kv_heads, head_dim, block_size,
        window or 0,
        query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        address(key_scales), address(value_scales), block_tables.data_ptr(),
        seq_lens.data_ptr(), address(query_start_loc), address(sinks),
        out.data_ptr(), partials.data_ptr(),
        query.stride(0), query.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3],
        *scale_strides(key_scales), *scale_strides(value_scales),
        block_tables.stride(0), scale, softcap or 0.0,
    )  # fmt: skip
    return out
