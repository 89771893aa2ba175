"""The native calls of one layer of a decoder, for steps of any size that their memory has room for.

Symbols: `T` tokens, `N` of them whose final hidden states are wanted, `S` sequences, `H` query
heads, `HKV` kv heads, `D` head dim, `E` hidden size, `I` intermediate size, `B` blocks, `P` block
size, `M` blocks of the longest block table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch

from kernels.cpu.library import DTYPES, Call, Field, Library
from kernels.cpu.linear import PackedLinear
from kernels.cpu.ops.store import store_fields
from kernels.cpu.program.caches import LayerCaches, address, kv_format, scale_strides
from kernels.cpu.program.inputs import StepField
from kernels.cpu.program.kv_ahead import KvAhead
from kernels.cpu.program.low_rank import MAPS, low_rank_calls
from kernels.cpu.program.workspace import NativeShape, Workspace
from kernels.cpu.quantized import QuantizedLinear

NativeLinear: TypeAlias = PackedLinear | QuantizedLinear
"""A linear map that a program can call."""

_DTYPE: Final = torch.bfloat16


class _Rows(NamedTuple):
    """What a step says of the rows that calls are for."""

    num: Field
    starts: str
    adapters: Field


_ALL: Final = _Rows(StepField.NUM_TOKENS, StepField.QUERY_START_LOC, StepField.ADAPTERS)
_WANTED: Final = _Rows(StepField.NUM_WANTED, StepField.WANTED_START_LOC, StepField.WANTED_ADAPTERS)


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
    """Makes the calls of a program's layers; `StepField` names what a step must give them."""

    _library: Library
    _shape: NativeShape
    _cos_sin: torch.Tensor
    """float32[max_model_len, D]."""

    def of(
        self,
        index: int,
        layer: NativeLayer,
        caches: LayerCaches,
        before: Workspace | None,
        work: Workspace,
        attention: Sequence[Call],
        ahead: Mapping[str, KvAhead],
        wanted: Workspace | None = None,
    ) -> Iterator[Call]:
        """The calls of layer `index`, from what the one `before` wrote (None: the first) to `work`.

        `attention` are those among them that `attend` gives; `ahead` is what its maps fetch for
        later, by their names in MAPS. Of the last layer `wanted` is where it ends if not all
        tokens' final hidden states are wanted: all are stored, and what comes after that is for
        these alone.
        """
        rows = _ALL
        residual: Field = StepField.HIDDEN
        if before is None:
            yield self._norm(residual, 0, 0, layer.input_norm, work.normed.data_ptr(), rows.num)
        else:
            residual = work.residual.data_ptr()
            yield self.add_norm(
                before, residual, layer.input_norm, work.normed.data_ptr(), rows.num
            )
        maps = _Maps(self._library, index, work, rows, ahead)
        yield from maps.calls("qkv", layer.qkv, work.normed, work.qkv.flatten(1))
        yield from self._store(layer, caches, work)
        if wanted is not None:
            if not len(wanted.query):
                return
            rows = _WANTED
            yield self._gather(work.query.data_ptr(), wanted.query.flatten(1))
            yield self._gather(residual, wanted.residual, joins=True)
            residual, work = wanted.residual.data_ptr(), wanted
            maps = _Maps(self._library, index, work, rows, ahead)
        yield from attention
        yield from maps.calls(
            "attention_output", layer.attention_output, work.attended, work.attention_output
        )
        yield self._norm(
            work.attention_output.data_ptr(), residual, work.mlp_residual.data_ptr(),
            layer.mlp_norm, work.mlp_normed.data_ptr(), rows.num,
        )  # fmt: skip
        yield from self._gate(layer, work, maps)
        yield from maps.calls("down", layer.down, work.gated, work.output)

    def add_norm(
        self, before: Workspace, total: int, weight: torch.Tensor, out: Field, num_rows: Field
    ) -> Call:
        """The call that adds up what the layer `before` wrote, to `total`, and norms it to `out`.

        Both are addresses of bfloat16 `[num_rows, E]`; `weight` is `[E]`.
        """
        output, residual = before.output.data_ptr(), before.mlp_residual.data_ptr()
        return self._norm(output, residual, total, weight, out, num_rows)

    def _norm(
        self,
        x: Field,
        residual: Field,  # 0: none; it and x are added to give `total`
        total: Field,
        weight: torch.Tensor,
        out: Field,
        num_rows: Field,
    ) -> Call:
        width = self._shape.hidden_size
        return Call(self._library.rms_norm, (
            DTYPES[_DTYPE], num_rows, 1, width, x, residual, weight.data_ptr(), out, total,
            width, 0, width, self._shape.rms_norm_eps,
        ))  # fmt: skip

    def _gather(
        self,
        x: Field,  # the address of [T, *]
        out: torch.Tensor,  # [N, *]
        *,
        joins: bool = False,
    ) -> Call:
        """The call that copies the rows of the wanted tokens."""
        row_bytes = out.shape[1] * out.element_size()
        return Call(self._library.gather, (
            StepField.NUM_WANTED, row_bytes, row_bytes, x, StepField.PLACES, out.data_ptr(),
        ), joins)  # fmt: skip

    def _store(self, layer: NativeLayer, caches: LayerCaches, work: Workspace) -> Iterator[Call]:
        """From `work.qkv` to `work.query` and the caches."""
        library, shape = self._library, self._shape
        dtype, num_tokens = DTYPES[_DTYPE], StepField.NUM_TOKENS
        num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        query, key, value = torch.split(work.qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        joins = False
        if layer.qk_norm is not None:
            normed = work.normed_query, work.normed_key
            for x, weight, out in zip((query, key), layer.qk_norm, normed, strict=True):
                yield Call(library.rms_norm, (
                    dtype, num_tokens, x.shape[1], head_dim,
                    x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
                    x.stride(0), x.stride(1), 0, shape.rms_norm_eps,
                ), joins)  # fmt: skip
                joins = True
            query, key = normed
        yield Call(library.rotary, (
            dtype, num_tokens, num_heads, num_kv_heads, head_dim // 2,
            query.data_ptr(), key.data_ptr(), self._cos_sin.data_ptr(),
            StepField.POSITIONS, work.query.data_ptr(), work.key.data_ptr(),
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            self._cos_sin.stride(0),
        ), joins)  # fmt: skip
        fields = store_fields(work.key, value, caches, str(num_tokens), str(StepField.SLOT_MAPPING))
        yield Call(library.store_kv, fields, joins=True)

    def attend(
        self,
        layer: NativeLayer,
        caches: LayerCaches,
        work: Workspace,
        partials: str | None,
        *,
        of_wanted: bool,
    ) -> tuple[Call, ...]:
        """From `work.query` to `work.attended`: of all tokens or the wanted ones.

        `partials` names where partial results go; None: there are none.
        """
        if not len(work.query):
            return ()
        library, rows = self._library, _WANTED if of_wanted else _ALL
        keys, values = caches.keys, caches.values
        _, num_heads, head_dim = work.query.shape
        fields: tuple[Field, ...] = (
            DTYPES[_DTYPE], kv_format(keys, caches.key_scales), StepField.NUM_SEQS,
            rows.num, num_heads, keys.shape[2], head_dim, keys.shape[1], layer.window or 0,
            work.query.data_ptr(), keys.data_ptr(), values.data_ptr(),
            address(caches.key_scales), address(caches.value_scales),
            StepField.BLOCK_TABLES, StepField.SEQ_LENS, rows.starts, 0,
            work.attended.data_ptr(), 0 if partials is None else partials,
            *work.query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
            *scale_strides(caches.key_scales), *scale_strides(caches.value_scales),
            StepField.TABLE_STRIDE, head_dim**-0.5, 0.0,
        )  # fmt: skip
        attention = Call(library.attention, fields)
        return (attention,) if partials is None else (attention, Call(library.merge_splits, fields))

    def _gate(self, layer: NativeLayer, work: Workspace, maps: "_Maps") -> Iterator[Call]:
        """From `work.mlp_normed` to `work.gated`."""
        if self._shape.is_gated:
            yield from maps.gated_calls("gate_up", layer.gate_up, work.mlp_normed, work.gated)
            return
        yield from maps.calls("gate_up", layer.gate_up, work.mlp_normed, work.gate_up)
        yield Call(self._library.silu_mul, (
            DTYPES[_DTYPE], maps.rows.num, work.gated.shape[1],
            work.gate_up.data_ptr(), work.gated.data_ptr(), work.gate_up.stride(0),
        ))  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Maps:
    """Makes the calls of the linear maps of some rows in one layer."""

    library: Library
    layer: int
    work: Workspace
    rows: _Rows
    ahead: Mapping[str, KvAhead]

    def calls(
        self,
        name: str,  # in MAPS
        linear: NativeLinear,
        x: torch.Tensor,  # [T, K]
        out: torch.Tensor,  # [T, N]
    ) -> Iterator[Call]:
        """From `x` to `out`, with what adapters add if there are any."""
        if name not in self.work.adapted:
            yield self._alone(name, linear, x, out)
            return
        yield from self._adapted(name, linear, x, out, is_gated=False)

    def gated_calls(
        self,
        name: str,
        linear: NativeLinear,
        x: torch.Tensor,  # [T, K]
        out: torch.Tensor,  # [T, N / 2]
    ) -> Iterator[Call]:
        """As `calls`, but the map gives `[gate, up]`, and `silu(gate) * up` goes to `out`."""
        if name not in self.work.adapted:
            assert isinstance(linear, PackedLinear), "the shape says that all layers can"
            yield linear.call_gated(x, out, self.rows.num, self.ahead.get(name))
            return
        yield from self._adapted(name, linear, x, out, is_gated=True)

    def _adapted(
        self, name: str, linear: NativeLinear, x: torch.Tensor, out: torch.Tensor, *, is_gated: bool
    ) -> Iterator[Call]:
        alone, ranks = self.work.adapted[name].alone, self.work.adapted[name].ranks
        yield self._alone(name, linear, x, alone)
        place = self.layer * len(MAPS) + MAPS.index(name)
        yield from low_rank_calls(
            self.library, self.rows.adapters, place, x, alone, ranks, out, is_gated=is_gated
        )

    def _alone(self, name: str, linear: NativeLinear, x: torch.Tensor, out: torch.Tensor) -> Call:
        if isinstance(linear, PackedLinear):
            return linear.call(x, out, self.rows.num, self.ahead.get(name))
        return linear.call(x, out, self.rows.num)
