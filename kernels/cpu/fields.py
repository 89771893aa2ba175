"""Computes the fields of the C structures `attention` and `store_kv` from tensors.

When an op calls a C function directly, all fields are numbers. In a program
(`kernels.cpu.library.Program`), the same calls run again and again. A field that differs from run
to run is then a name, and each run is given a number for each name.

Symbols: `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim of queries and keys, `DV` that of
values, `B` blocks, `P` block size.
"""

from typing import Final, NamedTuple

import torch

from kernels.cpu.library import DTYPES, KV_FORMATS, Field

_SPLIT: Final = 512
"""The positions per split when a sequence has a single query token; `SPLIT` in C."""
_LANES: Final = 16


class LayerCaches(NamedTuple):
    """The keys and values of one layer, with the scales of `kernels.kv_formats` if quantized."""

    keys: torch.Tensor
    """[B, P, HKV, D]: int8 or float8_e4m3fn if there are scales, else of the model's dtype."""
    values: torch.Tensor | None
    """Like `keys`, perhaps with another head dim; None: only keys are stored."""
    key_scales: torch.Tensor | None = None
    """bfloat16[B, P, HKV]; None: not quantized."""
    value_scales: torch.Tensor | None = None
    """bfloat16[B, P, HKV]; None: not quantized."""


def address(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor's memory; 0, which is C's NULL, for None."""
    return 0 if tensor is None else tensor.data_ptr()


def attention_fields(
    query: torch.Tensor,  # [T, H, D]
    caches: LayerCaches,
    out: torch.Tensor,  # [T, H * DV] or [T, H, DV], contiguous
    scale: float,
    *,
    num_seqs: Field,
    num_tokens: Field,
    block_tables: Field,
    table_stride: Field,
    seq_lens: Field,
    query_start_loc: Field,
    partials: Field,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[Field, ...]:
    """Return the fields of C's `attention`; C's `merge_splits` takes the same fields.

    The arguments are named as in `kernels.ops.paged_attention_prefill`. If a tensor changes from
    step to step, its address is passed instead of the tensor. In a program, a name is passed
    instead of this address, and each run of the program gets the address for the name. If
    `query_start_loc` is 0 (C's NULL), each sequence has one query token. `partials` is the address
    of memory for partial results; the function `num_partials` returns its size.
    """
    keys, values, key_scales, value_scales = caches
    assert values is not None, "attention reads values"
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = keys.shape
    return (
        DTYPES[query.dtype], _kv_format(keys, key_scales),
        num_seqs, num_tokens, num_heads, num_kv_heads, head_dim, values.shape[3], block_size,
        window or 0,
        query.data_ptr(), keys.data_ptr(), values.data_ptr(),
        address(key_scales), address(value_scales),
        block_tables, seq_lens, query_start_loc, address(sinks), out.data_ptr(), partials,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        *_scale_strides(key_scales), *_scale_strides(value_scales),
        table_stride, scale, softcap or 0.0,
    )  # fmt: skip


def num_partials(num_heads: int, value_dim: int, num_seqs: int, max_len: int) -> int:
    """Return the size of the memory for attention's partial results, in float32 numbers.

    The positions of a sequence with a single query token are divided into *splits*, so that
    several threads can compute them. `max_len` is the limit on the length of the sequences. If
    sequences of this length fit in one split, no memory is needed.
    """
    num_splits = -(-max_len // _SPLIT)
    if num_splits == 1:
        return 0
    width = -(-value_dim // _LANES) * _LANES + 2
    return num_seqs * num_heads * num_splits * width


def store_fields(
    key: torch.Tensor,  # [T, HKV, D]
    value: torch.Tensor | None,  # [T, HKV, D]; None if `caches.values` is
    caches: LayerCaches,
    *,
    num_tokens: Field,
    slot_mapping: Field,
) -> tuple[Field, ...]:
    """Return the fields of C's `store_kv`; `slot_mapping` is the address of an int64[T]."""
    return (
        key.element_size(), num_tokens, *key.shape[1:], caches.keys.shape[1], slot_mapping,
        *_side(key, caches.keys, caches.key_scales),
        *_side(value, caches.values, caches.value_scales),
    )  # fmt: skip


def _side(
    new: torch.Tensor | None, cache: torch.Tensor | None, scales: torch.Tensor | None
) -> tuple[int, ...]:
    """Return the fields of C's `struct side`, for the keys or for the values."""
    if new is None or cache is None:
        return (0,) * 12
    return (
        _kv_format(cache, scales), new.data_ptr(), cache.data_ptr(), address(scales),
        *new.stride()[:2], *cache.stride()[:3], *_scale_strides(scales),
    )  # fmt: skip


def _kv_format(cache: torch.Tensor, scales: torch.Tensor | None) -> int:
    return 0 if scales is None else KV_FORMATS[cache.dtype]


def _scale_strides(scales: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if scales is None else scales.stride()
