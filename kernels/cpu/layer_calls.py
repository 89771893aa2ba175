"""The native calls of one layer of a decoder.

Symbols: `T` tokens, `N` of them whose final hidden states are wanted, `S` sequences, `H` query
heads, `HKV` kv heads, `D` head dim, `E` hidden size, `I` intermediate size, `B` blocks, `P` block
size, `M` blocks of the longest block table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from kernels.cpu.caches import LayerCaches, address, kv_format, scale_strides
from kernels.cpu.library import DTYPES, Call, Library
from kernels.cpu.linear import PackedLinear
from kernels.cpu.native_inputs import NativeInputs
from kernels.cpu.quantized import QuantizedLinear
from kernels.cpu.store import store_fields
from kernels.cpu.workspace import NativeShape, Workspace

NativeLinear: TypeAlias = PackedLinear | QuantizedLinear
"""A linear map that a program can call."""

_DTYPE: Final = torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class NativeLayer:
    """The weights of one layer, bfloat16."""

    input_norm: torch.Tensor
    """`[E]`, before attention."""
    qkv: NativeLinear
    """E to (H + 2 * HKV) * D: queries, keys, values."""
    qk_norm: tuple[torch.Tensor, torch.Tensor] | None
    """`[D]` each: norms of each head of queries and keys before rotation."""
    window: int | None
    """How many tokens a token sees, itself included; None for all before it."""
    attention_output: NativeLinear
    """H * D to E."""
    mlp_norm: torch.Tensor
    """`[E]`, before the feed-forward part."""
    gate_up: NativeLinear
    """E to 2 * I: gate, then up."""
    down: NativeLinear
    """I to E."""


def can_gate(gate_up: NativeLinear) -> bool:
    """Whether a map to gate and up can give their product."""
    return isinstance(gate_up, PackedLinear) and gate_up.can_gate


@dataclass(frozen=True, slots=True, eq=False)
class LayerCalls:
    """Makes the calls of a step's layers."""

    _library: Library
    _shape: NativeShape
    _inputs: NativeInputs
    _cos_sin: torch.Tensor
    """float32[max_model_len, D]."""

    def of(
        self,
        layer: NativeLayer,
        caches: LayerCaches,
        before: Workspace | None,
        work: Workspace,
        partials: torch.Tensor,
        wanted: Workspace | None = None,
    ) -> Iterator[Call]:
        """A layer's calls, from what the layer `before` wrote (None: it is the first) to `work`.

        `partials` is `new_partials`. Of the last layer `wanted` [N] is where it ends if not all
        tokens' final hidden states are wanted: all are stored, and what comes after that is for
        these alone.
        """
        if before is None:
            residual = self._inputs.hidden
            yield self.norm(residual, None, None, layer.input_norm, work.normed)
        else:
            residual = work.residual
            yield self.norm(
                before.output, before.mlp_residual, residual, layer.input_norm, work.normed
            )
        yield layer.qkv.call(work.normed, work.qkv.flatten(1))
        yield from self._store(layer, caches, work)
        starts = self._inputs.query_start_loc
        if wanted is not None:
            assert self._inputs.wanted is not None, "it is for these"
            if not len(wanted.query):
                return
            places, starts = self._inputs.wanted.places, self._inputs.wanted.query_start_loc
            yield self._gather(work.query.flatten(1), places, wanted.query.flatten(1))
            yield self._gather(residual, places, wanted.residual, joins=True)
            residual, work = wanted.residual, wanted
        yield from self._attend(layer, caches, work, partials, starts)
        yield layer.attention_output.call(work.attended, work.attention_output)
        yield self.norm(
            work.attention_output, residual, work.mlp_residual, layer.mlp_norm, work.mlp_normed
        )
        yield from self._gate(layer, work)
        yield layer.down.call(work.gated, work.output)

    def norm(
        self,
        x: torch.Tensor,  # [T, E]
        residual: torch.Tensor | None,  # [T, E]; it and x are added to give `total`
        total: torch.Tensor | None,
        weight: torch.Tensor,  # [E]
        out: torch.Tensor,  # [T, E]
    ) -> Call:
        """The call that norms each token of the sum."""
        rms_norm, (num_tokens, width) = self._library.rms_norm, x.shape
        return Call(rms_norm, rms_norm.pack(
            DTYPES[_DTYPE], num_tokens, 1, width,
            x.data_ptr(), 0 if residual is None else residual.data_ptr(), weight.data_ptr(),
            out.data_ptr(), 0 if total is None else total.data_ptr(),
            x.stride(0), 0, width, self._shape.rms_norm_eps,
        ))  # fmt: skip

    def _gather(
        self,
        x: torch.Tensor,  # [T, *]
        places: torch.Tensor,  # int64[N]
        out: torch.Tensor,  # [N, *]
        *,
        joins: bool = False,
    ) -> Call:
        """The call that copies the rows at `places`."""
        gather, size = self._library.gather, x.element_size()
        return Call(gather, gather.pack(
            len(places), x.shape[1] * size, x.stride(0) * size,
            x.data_ptr(), places.data_ptr(), out.data_ptr(),
        ), joins)  # fmt: skip

    def _store(self, layer: NativeLayer, caches: LayerCaches, work: Workspace) -> Iterator[Call]:
        """From `work.qkv` to `work.query` and the caches."""
        library, shape, inputs = self._library, self._shape, self._inputs
        dtype, num_tokens = DTYPES[_DTYPE], len(work.qkv)
        num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        query, key, value = torch.split(work.qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        joins = False
        if layer.qk_norm is not None:
            normed = work.normed_query, work.normed_key
            for x, weight, out in zip((query, key), layer.qk_norm, normed, strict=True):
                yield Call(library.rms_norm, library.rms_norm.pack(
                    dtype, num_tokens, x.shape[1], head_dim,
                    x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
                    x.stride(0), x.stride(1), 0, shape.rms_norm_eps,
                ), joins)  # fmt: skip
                joins = True
            query, key = normed
        yield Call(library.rotary, library.rotary.pack(
            dtype, num_tokens, num_heads, num_kv_heads, head_dim // 2,
            query.data_ptr(), key.data_ptr(), self._cos_sin.data_ptr(),
            inputs.positions.data_ptr(), work.query.data_ptr(), work.key.data_ptr(),
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            self._cos_sin.stride(0),
        ), joins)  # fmt: skip
        yield Call(library.store_kv, library.store_kv.pack(
            *store_fields(work.key, value, caches, inputs.slot_mapping),
        ), joins=True)  # fmt: skip

    def _attend(
        self,
        layer: NativeLayer,
        caches: LayerCaches,
        work: Workspace,
        partials: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> Iterator[Call]:
        """From `work.query`, of which each sequence's rows start there, to `work.attended`."""
        library, inputs = self._library, self._inputs
        keys, values = caches.keys, caches.values
        num_tokens, num_heads, head_dim = work.query.shape
        attention = library.attention.pack(
            DTYPES[_DTYPE], kv_format(keys, caches.key_scales), len(inputs.seq_lens),
            num_tokens, num_heads, keys.shape[2], head_dim, keys.shape[1], layer.window or 0,
            work.query.data_ptr(), keys.data_ptr(), values.data_ptr(),
            address(caches.key_scales), address(caches.value_scales),
            inputs.block_tables.data_ptr(), inputs.seq_lens.data_ptr(),
            query_start_loc.data_ptr(), 0, work.attended.data_ptr(), partials.data_ptr(),
            *work.query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
            *scale_strides(caches.key_scales), *scale_strides(caches.value_scales),
            inputs.block_tables.stride(0), head_dim**-0.5, 0.0,
        )  # fmt: skip
        yield Call(library.attention, attention)
        if partials.numel():
            yield Call(library.merge_splits, attention)

    def _gate(self, layer: NativeLayer, work: Workspace) -> Iterator[Call]:
        """From `work.mlp_normed` to `work.gated`."""
        if self._shape.is_gated:
            assert isinstance(layer.gate_up, PackedLinear), "the shape says that all layers can"
            yield layer.gate_up.call_gated(work.mlp_normed, work.gated)
            return
        silu_mul = self._library.silu_mul
        yield layer.gate_up.call(work.mlp_normed, work.gate_up)
        yield Call(silu_mul, silu_mul.pack(
            DTYPES[_DTYPE], *work.gated.shape, work.gate_up.data_ptr(), work.gated.data_ptr(),
            work.gate_up.stride(0),
        ))  # fmt: skip
