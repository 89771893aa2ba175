"""The ops in C: each checks its tensors, allocates its result and calls a kernel in C.

The compiled C code is the *library*. Each op has a *twin* in `kernels.reference`: a function in
plain torch that defines the op's result. Most ops take the library, and then the arguments of their
twin. An op raises ValueError if shapes, dtypes, devices or strides do not fit. `kernels.ops` calls
an op of this module for tensors on a CPU if the library supports the dtype of the op's first
tensor. `draw`, `selective_scan` and `delta_scan` exist only for CPUs, so models and the sampler
call these three directly. These three find the library themselves, and call their twin if there is
no library; the two scans also call their twin if the library does not support the dtype.

A call of a kernel passes the fields of the kernel's C structure, in the order in which
`kernels.cpu.library` lists them.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim, `N` width of a
norm, `I` intermediate size, `P` block size, `M` max blocks per sequence, `V` vocabulary.
"""

from typing import Final

import torch

from kernels.checks import (
    attention_out,
    check_caches,
    check_cos_sin,
    check_norm_weight,
    check_options,
    check_paged,
    check_rows,
    check_suppression,
    check_tensor,
    check_values,
)
from kernels.cpu.fields import LayerCaches, address, attention_fields, num_partials, store_fields
from kernels.cpu.library import DTYPES, Library, native
from kernels.reference import scan as in_torch
from kernels.reference.draw import draw as draw_in_torch

_TOKENS_AND_HEADS: Final = 3  # dimensions of [T, H, N]


def rms_norm(library: Library, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x` [T, N] or [T, H, N], normalised; its strides over T and H may be any."""
    rows = x if x.dim() == _TOKENS_AND_HEADS else x.unsqueeze(1)
    num_tokens, num_heads, width = rows.shape
    check_tensor("x", rows, (num_tokens, num_heads, width), x.dtype, weight)
    check_norm_weight(weight, width, x)
    out = x.new_empty(x.shape)
    library.rms_norm(
        DTYPES[x.dtype], DTYPES[weight.dtype], num_tokens, num_heads, width,
        rows.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
        rows.stride(0), rows.stride(1), 0, eps,
    )  # fmt: skip
    return out


def add_rms_norm(
    library: Library, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised sum of `x` and `residual` [T, N], and the sum.

    The strides of `x` and `residual` over T may be any.
    """
    num_tokens, width = x.shape
    check_tensor("x", x, (num_tokens, width), x.dtype, weight)
    check_tensor("residual", residual, (num_tokens, width), x.dtype, x)
    check_norm_weight(weight, width, x)
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    library.rms_norm(
        DTYPES[x.dtype], DTYPES[weight.dtype], num_tokens, 1, width,
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(),
        x.stride(0), 0, residual.stride(0), eps,
    )  # fmt: skip
    return out, total


def silu_mul(library: Library, gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` [T, I] for `gate_up` [T, 2 * I]; the stride over T may be any."""
    out = _gated(gate_up)
    library.silu_mul(
        DTYPES[gate_up.dtype], *out.shape,
        gate_up.data_ptr(), out.data_ptr(), gate_up.stride(0),
    )  # fmt: skip
    return out


def tanh_gelu_mul(library: Library, gate_up: torch.Tensor) -> torch.Tensor:
    """Return `tanh_gelu(gate) * up` [T, I] for `gate_up` [T, 2 * I].

    The stride of `gate_up` over T may be any.
    """
    out = _gated(gate_up)
    library.tanh_gelu_mul(
        DTYPES[gate_up.dtype], *out.shape,
        gate_up.data_ptr(), out.data_ptr(), gate_up.stride(0),
    )  # fmt: skip
    return out


def clamped_swiglu(
    library: Library, gate_up: torch.Tensor, alpha: float, limit: float
) -> torch.Tensor:
    """Return `(up + 1) * gate * sigmoid(alpha * gate)` [T, I] for `gate_up` [T, 2 * I].

    `gate` is clamped to at most `limit`, and `up` is clamped to [-limit, limit]. The stride of
    `gate_up` over T may be any.
    """
    out = _gated(gate_up)
    library.clamped_swiglu(
        DTYPES[gate_up.dtype], *out.shape,
        gate_up.data_ptr(), out.data_ptr(), gate_up.stride(0), alpha, limit,
    )  # fmt: skip
    return out


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Check `gate_up` [T, 2 * I]; return memory for its gated product [T, I]."""
    num_tokens, width = gate_up.shape
    if width % 2 != 0:
        raise ValueError(f"gate_up has width {width}; it must be a multiple of 2")
    check_tensor("gate_up", gate_up, (num_tokens, width), gate_up.dtype, gate_up)
    return gate_up.new_empty((num_tokens, width // 2))


def rotary(
    library: Library,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `query` [T, H, D] and `key` [T, HKV, D]; strides over tokens and heads may be any.

    `cos_sin` is float32 [max_pos, R]; the dims of a head after the first R are copied. Positions
    are not checked against max_pos.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    check_tensor("query", query, (num_tokens, num_heads, head_dim), query.dtype, cos_sin)
    check_tensor("key", key, (num_tokens, num_kv_heads, head_dim), query.dtype, query)
    check_cos_sin(cos_sin, head_dim, query)
    check_tensor("positions", positions, (num_tokens,), torch.int64, query)
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    library.rotary(
        DTYPES[query.dtype], num_tokens, num_heads, num_kv_heads, head_dim, cos_sin.shape[1] // 2,
        query.data_ptr(), key.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(),
        query_out.data_ptr(), key_out.data_ptr(),
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), cos_sin.stride(0),
    )  # fmt: skip
    return query_out, key_out


def store_kv(
    library: Library,
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Store `key` and `value` [T, HKV, D], or only keys, bit for bit as the twin does.

    The slots in `slot_mapping` are not checked against the number of blocks.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    num_blocks, block_size = key_cache.shape[:2]
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    check_tensor("key", key, (num_tokens, num_kv_heads, head_dim), key.dtype, key_cache)
    check_values(value, value_cache, key)
    check_caches(key_cache, value_cache, key_scales, value_scales, cache_shape, key)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, key)
    caches = LayerCaches(key_cache, value_cache, key_scales, value_scales)
    library.store_kv(
        *store_fields(
            key, value, caches, num_tokens=num_tokens, slot_mapping=slot_mapping.data_ptr()
        )
    )


def rotary_store_kv(
    library: Library,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call `rotary`, and then `store_kv` with the rotated keys; return the rotated queries."""
    query, key = rotary(library, query, key, cos_sin, positions)
    store_kv(
        library, key, value, key_cache, value_cache, slot_mapping,
        key_scales=key_scales, value_scales=value_scales,
    )  # fmt: skip
    return query


def paged_attention_decode(
    library: Library,
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
    """Attend with `query` [S, H, D], which has one token of each sequence.

    No bit of a token's result depends on other sequences. `paged_attention_prefill` computes the
    same result for the token, bit for bit. Lengths are not checked against M * P.
    """
    num_seqs = block_tables.shape[0]
    check_rows(num_seqs, len(query), out)
    out = attention_out(out, query, value_cache.shape[3])
    caches = LayerCaches(key_cache, value_cache, key_scales, value_scales)
    _attend(
        library, query[:num_seqs], caches, block_tables, seq_lens, None, scale,
        window, softcap, sinks, out[:num_seqs],
    )  # fmt: skip
    return out


def paged_attention_prefill(
    library: Library,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,  # noqa: ARG001  a GPU's launcher sizes its grid by it
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with `query` [T, H, D], which has the last tokens of each sequence, at least one each.

    No bit of a token's result depends on other sequences, or on how the prompt was cut into chunks.
    """
    check_tensor("query_start_loc", query_start_loc, (len(seq_lens) + 1,), torch.int32, query)
    out = attention_out(out, query, value_cache.shape[3])
    caches = LayerCaches(key_cache, value_cache, key_scales, value_scales)
    _attend(
        library, query, caches, block_tables, seq_lens, query_start_loc, scale,
        window, softcap, sinks, out,
    )  # fmt: skip
    return out


def _attend(
    library: Library,
    query: torch.Tensor,
    caches: LayerCaches,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    keys, values, key_scales, value_scales = caches
    assert values is not None, "attention reads values"
    check_paged(query, keys, values, block_tables, seq_lens, key_scales, value_scales)
    check_options(query, window, softcap, sinks)
    num_tokens, num_heads, _ = query.shape
    value_dim = values.shape[3]
    num_seqs, max_len = len(seq_lens), block_tables.shape[1] * keys.shape[1]
    partials = query.new_empty(
        num_partials(num_heads, value_dim, num_seqs, max_len), dtype=torch.float32
    )
    library.attention(
        *attention_fields(
            query, caches, out, scale,
            num_seqs=num_seqs, num_tokens=num_tokens,
            block_tables=block_tables.data_ptr(), table_stride=block_tables.stride(0),
            seq_lens=seq_lens.data_ptr(), query_start_loc=address(query_start_loc),
            partials=partials.data_ptr(), window=window, softcap=softcap, sinks=sinks,
        )
    )  # fmt: skip


def suppress(
    library: Library, logits: torch.Tensor, places: torch.Tensor, admitted: torch.Tensor
) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    A token is forbidden in a row of `logits` if the token's bit in the row's mask is 0. `admitted`
    has the masks, and `places` has the index of the row for each mask.
    """
    check_suppression(logits, places, admitted)
    library.suppress(
        len(places), logits.shape[1],
        logits.data_ptr(), places.data_ptr(), admitted.data_ptr(),
        logits.stride(0), admitted.stride(0),
    )  # fmt: skip


def draw(
    logits: torch.Tensor, places: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Draw one token from each of the rows `places` of `logits`; return the token ids, int64[N].

    A token's weight is `exp((logit - max) / temperature)`, where max is the row's largest logit.
    The drawn token is the first at which the running sum of weights, in token order, exceeds
    `uniform` times the sum of all weights. Each row has its own sums, in float64. A token of weight
    0 can be drawn only from a row without a finite maximum; from such a row, any valid id may be
    drawn.

    Symbols: `N` draws.

    Args:
        logits: float32[S, V]; not changed.
        places: int64[N]: the numbers of the rows.
        temperature: float32[N], above 0.
        uniform: float64[N] in [0, 1).
    """
    check_tensor("logits", logits, tuple(logits.shape[:2]), torch.float32, logits)
    num_draws = (len(places),)
    check_tensor("places", places, num_draws, torch.int64, logits)
    check_tensor("temperature", temperature, num_draws, torch.float32, logits)
    check_tensor("uniform", uniform, num_draws, torch.float64, logits)
    library = native()
    if library is None:
        return draw_in_torch(logits, places, temperature, uniform)
    token_ids = torch.empty(num_draws, dtype=torch.int64)
    library.draw(
        len(places), logits.shape[1],
        logits.data_ptr(), places.data_ptr(), temperature.data_ptr(), uniform.data_ptr(),
        token_ids.data_ptr(), logits.stride(0),
    )  # fmt: skip
    return token_ids


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the state of each sequence in a Mamba layer by `T` tokens.

    For each token, `state = state * exp(dt * a) + dt * x * b`, and the output is the sum over `N`
    of `state * c`, plus `d * x`. Everything is computed in float32, token by token. So no bit of a
    result depends on other sequences, or on how the tokens are divided among calls.

    Symbols: `P` head dim, `N` numbers of the state per dim of a head, `G` groups of heads.

    Args:
        x: [S, T, H, P], `T` tokens of each sequence.
        dt: float32[S, T, H].
        a: float32[H, N], negative; or [H, 1] if the `N` numbers of each head are equal.
        b: [S, T, G, N], of the dtype of `x`.
        c: [S, T, G, N], of the dtype of `x`.
        d: float32[H].
        state: float32[S, H, P, N], not changed; None: zeros.

    Returns:
        The output, with the shape and dtype of `x`; and the new state.
    """
    x, dt, a, b, c, d = (each.contiguous() for each in (x, dt, a, b, c, d))
    state = None if state is None else state.contiguous()
    num_seqs, num_tokens, num_heads, head_dim = x.shape
    num_groups, width = b.shape[2:]
    states = (num_seqs, num_heads, head_dim, width)
    check_tensor("dt", dt, (num_seqs, num_tokens, num_heads), torch.float32, x)
    check_tensor("a", a, (num_heads, width if a.shape[1] > 1 else 1), torch.float32, x)
    check_tensor("b", b, (num_seqs, num_tokens, num_groups, width), x.dtype, x)
    check_tensor("c", c, tuple(b.shape), x.dtype, x)
    check_tensor("d", d, (num_heads,), torch.float32, x)
    if state is not None:
        check_tensor("state", state, states, torch.float32, x)
    if num_heads % num_groups:
        raise ValueError(f"b has {num_groups} groups; they must divide x's {num_heads} heads")
    library = native()
    if library is None or x.dtype not in DTYPES:
        return in_torch.selective_scan(x, dt, a, b, c, d, state)
    out, state_out = torch.empty_like(x), x.new_empty(states, dtype=torch.float32)
    library.selective_scan(
        DTYPES[x.dtype], num_seqs, num_tokens, num_heads, head_dim, num_groups, width, a.shape[1],
        x.data_ptr(), dt.data_ptr(), a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(),
        0 if state is None else state.data_ptr(), out.data_ptr(), state_out.data_ptr(),
    )  # fmt: skip
    return out, state_out


def delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the state of each sequence in a gated-delta-net layer by `T` tokens.

    First, queries `q` and keys `k` are scaled to length 1, and then queries are divided by the
    square root of `K`. After that, for each token, `state = state * exp(g)`, then
    `state = state + k (v - k state) * beta`, and the output is `q state`. As in `selective_scan`,
    results do not depend on how tokens are divided among calls.

    Symbols: `HK` heads of queries and keys, `K` their dim, `P` the dim of values.

    Args:
        q: [S, T, HK, K].
        k: [S, T, HK, K].
        v: [S, T, H, P].
        g: float32[S, T, H], not positive.
        beta: float32[S, T, H].
        state: float32[S, H, K, P], not changed; None: zeros.

    Returns:
        The output, with the shape and dtype of `v`; and the new state.
    """
    q, k, v, g, beta = (each.contiguous() for each in (q, k, v, g, beta))
    state = None if state is None else state.contiguous()
    num_seqs, num_tokens, num_key_heads, key_dim = k.shape
    num_heads, head_dim = v.shape[2:]
    states = (num_seqs, num_heads, key_dim, head_dim)
    check_tensor("q", q, tuple(k.shape), v.dtype, v)
    check_tensor("k", k, (num_seqs, num_tokens, num_key_heads, key_dim), v.dtype, v)
    check_tensor("v", v, (num_seqs, num_tokens, num_heads, head_dim), v.dtype, v)
    check_tensor("g", g, (num_seqs, num_tokens, num_heads), torch.float32, v)
    check_tensor("beta", beta, (num_seqs, num_tokens, num_heads), torch.float32, v)
    if state is not None:
        check_tensor("state", state, states, torch.float32, v)
    if num_heads % num_key_heads:
        raise ValueError(f"k has {num_key_heads} heads; they must divide v's {num_heads}")
    library = native()
    if library is None or v.dtype not in DTYPES:
        return in_torch.delta_scan(q, k, v, g, beta, state)
    out, state_out = torch.empty_like(v), v.new_empty(states, dtype=torch.float32)
    library.delta_scan(
        DTYPES[v.dtype], num_seqs, num_tokens, num_key_heads, num_heads, key_dim, head_dim,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(),
        0 if state is None else state.data_ptr(), out.data_ptr(), state_out.data_ptr(),
        key_dim**-0.5,
    )  # fmt: skip
    return out, state_out
