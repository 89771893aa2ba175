"""Attention by FlashAttention-3, if an operator asks for it and the arguments are supported.

FlashAttention reads a paged KV cache in Quire's layout: caches `[B, P, HKV, D]`, and a block table
int32[S, M]. A cache may have any block size, and any strides except the last, which is 1. Only the
names of arguments differ from those of `kernels.ops`. This module has not run on a GPU yet: the
tests use a fake that follows FlashAttention's documentation and checks its arguments.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim, `B` blocks, `P`
block size, `M` max blocks per sequence.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from kernels import ops
from kernels.sequences import Sequences

_MAX_HEAD_DIM: Final = 256
_DTYPES: Final = (torch.float16, torch.bfloat16)


class FlashAttention:
    """Prepares attention: by FlashAttention-3 for supported arguments, else by `kernels.ops`."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        """`attend` is `flash_attn_interface.flash_attn_with_kvcache` (version 3)."""
        self._attend = attend

    def prepare_decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        **options: Any,
    ) -> Callable[[Sequences], object]:
        """Do as `ops.prepare_decode`, with FlashAttention-3 if it supports the arguments."""
        if not supports(query, key_cache, value_cache, **options):
            return ops.prepare_decode(query, key_cache, value_cache, scale, **options)
        fixed = _fixed(key_cache, value_cache, scale, **options)
        out = options["out"]

        def attend(sequences: Sequences) -> None:
            num_seqs = len(sequences.seq_lens)
            attended = self._attend(
                query[:num_seqs].unsqueeze(1),  # [S, 1, H, D]
                cache_seqlens=sequences.seq_lens,
                page_table=sequences.block_tables,
                **fixed,
            )
            out[:num_seqs] = attended.squeeze(1)

        return attend

    def prepare_prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        **options: Any,
    ) -> Callable[[Sequences], object]:
        """Do as `ops.prepare_prefill`, with FlashAttention-3 if it supports the arguments.

        FlashAttention-3 also overwrites rows of `out` that belong to no sequence.
        """
        if not supports(query, key_cache, value_cache, **options):
            return ops.prepare_prefill(query, key_cache, value_cache, scale, **options)
        fixed = _fixed(key_cache, value_cache, scale, **options)
        out = options["out"]

        def attend(sequences: Sequences) -> None:
            attended = self._attend(
                query,
                cache_seqlens=sequences.seq_lens,
                page_table=sequences.block_tables,
                cu_seqlens_q=sequences.query_start_loc,
                max_seqlen_q=sequences.max_query_len,
                **fixed,
            )
            out.copy_(attended)

        return attend


def supports(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    **_: Any,
) -> bool:
    """Return whether FlashAttention-3 supports these arguments.

    FlashAttention-3 needs queries and caches in fp16 or bf16, not quantized, and takes no sinks.
    Keys and values must have the same head dim, a multiple of 8 up to 256. So multi-head latent
    attention, whose values are narrower than its keys, is not supported.
    """
    head_dim = query.shape[2]
    return (
        sinks is None
        and key_scales is None
        and query.dtype in _DTYPES
        and key_cache.dtype == query.dtype
        and value_cache.shape == key_cache.shape
        and head_dim % 8 == 0
        and head_dim <= _MAX_HEAD_DIM
    )


def _fixed(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return the arguments that are the same in each step, under FlashAttention's names."""
    return {
        "k_cache": key_cache,
        "v_cache": value_cache,
        "softmax_scale": scale,
        "causal": True,
        # How many tokens before and after itself a token attends to; -1: no limit.
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "softcap": softcap or 0.0,
    }
