"""Checks tensors before a launch, because a kernel would misread a tensor that does not fit.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim of queries and
keys, `DV` that of values, `B` blocks, `P` block size, `V` vocabulary, `G` masks.
"""

import torch

from kernels.kv_formats import LARGEST, SCALE_DTYPE

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor
) -> None:
    """Require `tensor` to have this shape and dtype, the device of `like`, and dense rows.

    Rows are dense if the last dimension has stride 1; the other strides may be any.

    Raises:
        ValueError: The tensor does not fit; the message names the actual and required property.
    """
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {like.device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has last stride {tensor.stride(-1)}; it must be 1")


def check_float(name: str, tensor: torch.Tensor, num_dims: int) -> None:
    """Require `tensor` to be fp32, fp16 or bf16, with `num_dims` dimensions and dense rows.

    Raises:
        ValueError: The tensor does not fit; the message names the actual and required property.
    """
    if tensor.dim() != num_dims:
        raise ValueError(f"{name} has {tensor.dim()} dimensions, required are {num_dims}")
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be one of {_FLOATS}")
    check_tensor(name, tensor, tuple(tensor.shape), tensor.dtype, tensor)


def check_norm_weight(weight: torch.Tensor, width: int, x: torch.Tensor) -> None:
    """Require a norm's `weight` to be [width], in fp32 or the dtype of `x`, the norm's input.

    Raises:
        ValueError: A tensor does not fit; the message names it and the required property.
    """
    dtype = torch.float32 if weight.dtype == torch.float32 else x.dtype
    check_tensor("weight", weight, (width,), dtype, x)


def check_cos_sin(cos_sin: torch.Tensor, head_dim: int, like: torch.Tensor) -> None:
    """Require fp32 `cos_sin` [max_pos, R]; R is the number of rotated dims of a head.

    R must be at most `head_dim`. Both R and `head_dim` must be even.

    Raises:
        ValueError: A tensor does not fit; the message names it and the required property.
    """
    if head_dim % 2 != 0:
        raise ValueError(f"query has head dim {head_dim}; it must be a multiple of 2")
    check_tensor("cos_sin", cos_sin, tuple(cos_sin.shape), torch.float32, like)
    rotated = cos_sin.shape[-1]
    if cos_sin.dim() != 2 or rotated % 2 != 0 or rotated > head_dim:  # noqa: PLR2004
        raise ValueError(
            f"cos_sin has shape {tuple(cos_sin.shape)}; it must be (max_pos, R), R even and at most"
            f" {head_dim}"
        )


def check_caches(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    shape: tuple[int, ...],
    like: torch.Tensor,
    value_dim: int | None = None,
) -> None:
    """Require caches of `shape` [B, P, HKV, D], quantized with scales, or of the dtype of `like`.

    `value_dim` is the head dim of values if it differs from D. `value_cache` is None if only keys
    are stored, because the values are a part of the keys.

    Raises:
        ValueError: A tensor does not fit; the message names it and the required property.
    """
    if value_cache is not None and (key_scales is None) != (value_scales is None):
        missing = "key_scales" if key_scales is None else "value_scales"
        raise ValueError(f"{missing} is None, required are both or neither")
    for side, cache, scales in (
        ("key", key_cache, key_scales),
        ("value", value_cache, value_scales),
    ):
        name = f"{side}_cache"
        if cache is None:
            continue
        if side == "value" and value_dim is not None:
            shape = (*shape[:-1], value_dim)
        if scales is None:
            check_tensor(name, cache, shape, like.dtype, like)
            continue
        if cache.dtype not in LARGEST:
            raise ValueError(
                f"{name} has dtype {cache.dtype}, required with {side}_scales is one of "
                f"{tuple(LARGEST)}"
            )
        check_tensor(name, cache, shape, cache.dtype, like)
        check_tensor(f"{side}_scales", scales, shape[:-1], SCALE_DTYPE, like)


def check_values(
    value: torch.Tensor | None, value_cache: torch.Tensor | None, key: torch.Tensor
) -> None:
    """Require both `value` and `value_cache` or neither; `value` has the shape and dtype of `key`.

    Raises:
        ValueError: A tensor does not fit; the message names it and the required property.
    """
    if (value is None) != (value_cache is None):
        missing = "value" if value is None else "value_cache"
        raise ValueError(f"{missing} is None, required are both or neither")
    if value is not None:
        check_tensor("value", value, tuple(key.shape), key.dtype, key)


def check_paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """Require the common arguments of decode and prefill attention to fit together.

    Raises:
        ValueError: A tensor does not fit; the message names it and the required property.
    """
    check_attended(query, key_cache, value_cache, key_scales, value_scales)
    num_seqs, max_blocks = block_tables.shape
    check_tensor("block_tables", block_tables, (num_seqs, max_blocks), torch.int32, query)
    check_tensor("seq_lens", seq_lens, (num_seqs,), torch.int32, query)


def check_attended(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """Make the checks of `check_paged`, except those of `block_tables` and `seq_lens`."""
    check_float("query", query, 3)
    _, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    value_dim = value_cache.shape[-1]
    check_caches(key_cache, value_cache, key_scales, value_scales, cache_shape, query, value_dim)
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"query has {num_heads} heads; it must be a multiple of {num_kv_heads}")


def check_options(
    query: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Require `window` and `softcap` to be positive, and `sinks` to be fp32 [H].

    Raises:
        ValueError: An option does not fit; the message names it and what is required.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be above 0")
    if sinks is not None:
        check_tensor("sinks", sinks, (query.shape[1],), torch.float32, query)


def check_rows(num_seqs: int, num_tokens: int, out: torch.Tensor | None) -> None:
    """Require one query token for each sequence; more tokens may follow only if `out` is given.

    Decode attention reads only the first tokens of `query`, one for each sequence.

    Raises:
        ValueError: The numbers do not fit; the message has both.
    """
    if num_seqs != num_tokens and (out is None or num_seqs > num_tokens):
        raise ValueError(f"block_tables has {num_seqs} rows, required are {num_tokens}")


def attention_out(out: torch.Tensor | None, query: torch.Tensor, value_dim: int) -> torch.Tensor:
    """Return `out`, or a new tensor [T, H, DV] for `query` [T, H, D].

    Raises:
        ValueError: `out` has another shape or dtype, or is not contiguous.
    """
    shape = (*query.shape[:2], value_dim)
    if out is None:
        return query.new_empty(shape)
    check_tensor("out", out, shape, query.dtype, query)
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}; it must be contiguous")
    return out


def check_suppression(logits: torch.Tensor, places: torch.Tensor, admitted: torch.Tensor) -> None:
    """Require float32 `logits` [S, V], int64 `places` [G] and int32 `admitted` [G, ceil(V / 32)].

    `admitted` has masks with one bit for each token of the vocabulary. `places` has, for each mask,
    the index of its row in `logits`.

    Raises:
        ValueError: A tensor does not fit; the message names it and the required property.
    """
    if logits.dim() != 2:  # noqa: PLR2004  [S, V]
        raise ValueError(f"logits has {logits.dim()} dimensions, required are 2")
    num_words = -(-logits.shape[1] // 32)
    check_tensor("logits", logits, tuple(logits.shape), torch.float32, logits)
    check_tensor("places", places, (places.numel(),), torch.int64, logits)
    check_tensor("admitted", admitted, (places.numel(), num_words), torch.int32, logits)
