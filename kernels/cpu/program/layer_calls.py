"""Makes the calls of C kernels for one decoder layer.

The calls become part of a `kernels.cpu.library.Program`, which serves all steps that fit into its
workspaces.

Symbols: `T` tokens, `N` of them whose final hidden states are wanted, `S` sequences, `H` query
heads, `HKV` kv heads, `D` head dim, `E` hidden size, `I` intermediate size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from kernels.cpu.fields import LayerCaches, attention_fields, store_fields
from kernels.cpu.library import DTYPES, Field, KernelCall, Library
from kernels.cpu.linear import PackedLinear
from kernels.cpu.program.inputs import StepField
from kernels.cpu.program.kv_ahead import NOTHING_AHEAD, KvAhead
from kernels.cpu.program.low_rank import MAPS, low_rank_calls
from kernels.cpu.program.workspace import NativeShape, Workspace

_DTYPE: Final = DTYPES[torch.bfloat16]


class RowFields(NamedTuple):
    """Inputs of a step that describe the tokens that a call computes.

    `ALL` stands for all tokens of the step, `WANTED` for the tokens whose final hidden states are
    wanted.
    """

    num: Field
    starts: Field
    adapters: Field


ALL: Final = RowFields(StepField.NUM_TOKENS, StepField.QUERY_START_LOC, StepField.ADAPTERS)
WANTED: Final = RowFields(
    StepField.NUM_WANTED, StepField.WANTED_START_LOC, StepField.WANTED_ADAPTERS
)


@dataclass(frozen=True, slots=True, eq=False)
class NativeLayer:
    """The weights of one layer, in bfloat16."""

    input_norm: torch.Tensor
    """`[E]`, the norm before attention."""
    qkv: PackedLinear
    """The map from E to (H + 2 * HKV) * D features: queries, keys and values."""
    qk_norm: tuple[torch.Tensor, torch.Tensor] | None
    """`[D]` each, the norms of query heads and of key heads before rotation; None: no norms."""
    window: int | None
    """How many tokens a token attends to, itself included; None: all tokens up to itself."""
    attention_output: PackedLinear
    """The map from H * D to E features."""
    mlp_norm: torch.Tensor
    """`[E]`, the norm before the feed-forward part."""
    gate_up: PackedLinear
    """The map from E to 2 * I features: gate, then up."""
    down: PackedLinear
    """The map from I to E features."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCalls:
    """Makes the calls of a program's layers; `StepField` names the inputs of each step."""

    _library: Library
    _shape: NativeShape
    _cos_sin: torch.Tensor
    """float32[max_model_len, R], where R is the number of rotated dims of a head."""

    def of(
        self,
        index: int,
        layer: NativeLayer,
        caches: LayerCaches,
        before: Workspace | None,
        work: Workspace,
        attention: Sequence[KernelCall],
        ahead: Mapping[str, KvAhead],
        wanted: Workspace | None = None,
    ) -> Iterator[KernelCall]:
        """Yield the calls of layer `index`, which read the previous layer's output in `before`.

        Args:
            index: The index of the layer.
            layer: The weights of the layer.
            caches: The layer's keys and values.
            before: The workspace of the previous layer; None for the first layer.
            work: The workspace to which the layer's calls write.
            attention: The calls that `attend` returned for this layer.
            ahead: Which KV each linear map of the layer prefetches for a later call of attention,
                by the name of the linear map (see MAPS).
            wanted: The workspace for the tokens whose final hidden states are wanted; None: all
                tokens are wanted, or this is not the last layer. If it is given, the layer stores
                keys and values of all tokens, but computes attention and all that follows for the
                wanted tokens only.
        """
        residual: Field
        if before is None:
            residual = StepField.HIDDEN
            yield self._norm(residual, 0, 0, layer.input_norm, work.normed.data_ptr(), ALL.num)
        else:
            residual = work.residual.data_ptr()
            out = work.normed.data_ptr()
            yield self.add_norm(before, residual, layer.input_norm, out, ALL.num)
        maps = _Maps(self._library, index, work, ALL, ahead)
        yield from maps.calls("qkv", layer.qkv, work.normed, work.qkv.flatten(1))
        yield from self._store(layer, caches, work)
        rows = ALL
        if wanted is not None:
            if not len(wanted.query):
                return
            rows = WANTED
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
        if self._shape.is_gated:
            yield from maps.calls(
                "gate_up", layer.gate_up, work.mlp_normed, work.gated, is_gated=True
            )
        else:
            yield from maps.calls("gate_up", layer.gate_up, work.mlp_normed, work.gate_up)
            yield KernelCall(self._library.silu_mul, (
                _DTYPE, rows.num, work.gated.shape[1],
                work.gate_up.data_ptr(), work.gated.data_ptr(), work.gate_up.stride(0),
            ))  # fmt: skip
        yield from maps.calls("down", layer.down, work.gated, work.output)

    def attend(
        self,
        layer: NativeLayer,
        caches: LayerCaches,
        work: Workspace,
        rows: RowFields,
        partials: str | None,
    ) -> tuple[KernelCall, ...]:
        """Return the attention calls that read `work.query` and write `work.attended`.

        The attention of one token to a long sequence is computed in splits: one call writes the
        splits' results to the address named `partials`, and another call merges them. If `partials`
        is None, no sequence is long enough to be split.
        """
        if not len(work.query):
            return ()
        fields = attention_fields(
            work.query, caches, work.attended, work.query.shape[2] ** -0.5,
            num_seqs=StepField.NUM_SEQS, num_tokens=rows.num,
            block_tables=StepField.BLOCK_TABLES, table_stride=StepField.TABLE_STRIDE,
            seq_lens=StepField.SEQ_LENS, query_start_loc=rows.starts,
            partials=partials or 0, window=layer.window,
        )  # fmt: skip
        calls = (
            KernelCall(self._library.attention, fields),
            KernelCall(self._library.merge_splits, fields),
        )
        return calls[:1] if partials is None else calls

    def add_norm(
        self, before: Workspace, total: int, weight: torch.Tensor, out: Field, num_rows: Field
    ) -> KernelCall:
        """Return the call that adds a layer's output and residual, and normalises the sum.

        `before` is the layer's workspace. The sum is written to `total` and the normalised sum to
        `out`; both are addresses of bfloat16 `[num_rows, E]`. `weight` is `[E]`.
        """
        output, residual = before.output.data_ptr(), before.mlp_residual.data_ptr()
        return self._norm(output, residual, total, weight, out, num_rows)

    def _norm(
        self,
        x: Field,
        residual: Field,  # it is added to x, and the sum goes to `total`; 0: none
        total: Field,
        weight: torch.Tensor,
        out: Field,
        num_rows: Field,
    ) -> KernelCall:
        width = self._shape.hidden_size
        return KernelCall(self._library.rms_norm, (
            _DTYPE, _DTYPE, num_rows, 1, width, x, residual, weight.data_ptr(), out, total,
            width, 0, width, self._shape.rms_norm_eps,
        ))  # fmt: skip

    def _gather(
        self,
        x: Field,  # the address of [T, *]
        out: torch.Tensor,  # [N, *]
        *,
        joins: bool = False,
    ) -> KernelCall:
        """Return the call that copies the rows of the wanted tokens from `x` to `out`."""
        row_bytes = out.shape[1] * out.element_size()
        return KernelCall(self._library.gather, (
            StepField.NUM_WANTED, row_bytes, row_bytes, x, StepField.PLACES, out.data_ptr(),
        ), joins)  # fmt: skip

    def _store(
        self, layer: NativeLayer, caches: LayerCaches, work: Workspace
    ) -> Iterator[KernelCall]:
        """Yield the calls that rotate queries and keys, and store keys and values."""
        library, shape = self._library, self._shape
        num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        query, key, value = torch.split(work.qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        joins = False
        if layer.qk_norm is not None:
            normed = work.normed_query, work.normed_key
            for x, weight, out in zip((query, key), layer.qk_norm, normed, strict=True):
                yield KernelCall(library.rms_norm, (
                    _DTYPE, _DTYPE, StepField.NUM_TOKENS, x.shape[1], head_dim,
                    x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
                    x.stride(0), x.stride(1), 0, shape.rms_norm_eps,
                ), joins)  # fmt: skip
                joins = True
            query, key = normed
        yield KernelCall(library.rotary, (
            _DTYPE, StepField.NUM_TOKENS, num_heads, num_kv_heads, head_dim,
            self._cos_sin.shape[1] // 2,
            query.data_ptr(), key.data_ptr(), self._cos_sin.data_ptr(), StepField.POSITIONS,
            work.query.data_ptr(), work.key.data_ptr(),
            *query.stride()[:2], *key.stride()[:2], self._cos_sin.stride(0),
        ), joins)  # fmt: skip
        fields = store_fields(
            work.key, value, caches,
            num_tokens=StepField.NUM_TOKENS, slot_mapping=StepField.SLOT_MAPPING,
        )  # fmt: skip
        yield KernelCall(library.store_kv, fields, joins=True)


class _Maps(NamedTuple):
    """Makes the calls of one layer's linear maps, for all tokens or for the wanted tokens."""

    library: Library
    layer: int
    work: Workspace
    rows: RowFields
    ahead: Mapping[str, KvAhead]

    def calls(
        self,
        name: str,  # in MAPS
        linear: PackedLinear,
        x: torch.Tensor,  # [T, K]
        out: torch.Tensor,  # [T, N], or [T, N / 2] if it is gated
        *,
        is_gated: bool = False,
    ) -> Iterator[KernelCall]:
        """Yield the calls that map `x` to `out`, including the calls of adapters if there are any.

        If `is_gated`, the map computes `[gate, up]`, and `silu(gate) * up` is written to `out`.
        """
        adapted = self.work.adapted.get(name)
        alone = out if adapted is None else adapted.alone
        yield linear.call(
            x, alone, self.rows.num, self.ahead.get(name, NOTHING_AHEAD),
            is_gated=is_gated and adapted is None,
        )  # fmt: skip
        if adapted is not None:
            place = self.layer * len(MAPS) + MAPS.index(name)
            yield from low_rank_calls(
                self.library, self.rows.adapters, place, x, alone, adapted.ranks, out,
                is_gated=is_gated,
            )  # fmt: skip
