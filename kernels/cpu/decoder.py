"""A Llama-shaped decoder's layers as one native program: a whole step in one call.

Called op by op, a step of one token spends a third of its time between the ops: in Python, and in
waking threads.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim, `E` hidden size,
`I` intermediate size, `B` blocks, `P` block size, `M` blocks of the longest block table.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final, TypeAlias

import torch

from kernels.checks import check_tensor
from kernels.cpu.attention import new_partials, scale_strides
from kernels.cpu.library import DTYPES, Call, Program, native
from kernels.cpu.linear import PackedLinear
from kernels.cpu.quantized import QuantizedLinear

NativeLinear: TypeAlias = PackedLinear | QuantizedLinear
"""A linear map that a program can call."""

_MAX_KEPT_TOKENS: Final = 64
"""Steps of so many tokens keep their program; it costs as much as a small step to make."""
_MAX_KEPT: Final = 256
"""So many programs are kept, those that were used last."""
_DTYPE: Final = torch.bfloat16
_UNPADDED: Final = ("hidden", "positions", "slot_mapping", "seq_lens", "query_start_loc")
"""Those of `NativeInputs` whose shapes follow from T and S."""


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


@dataclass(frozen=True, slots=True, eq=False)
class NativeShape:
    """What a decoder's layers have in common."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float


@dataclass(frozen=True, slots=True, eq=False)
class NativeInputs:
    """One step's batch; on the CPU, contiguous."""

    hidden: torch.Tensor
    """bfloat16[T, E]: the tokens' embeddings."""
    positions: torch.Tensor
    """int64[T]."""
    slot_mapping: torch.Tensor
    """int64[T]: `block * P + offset`, or PAD_SLOT."""
    block_tables: torch.Tensor
    """int32[S, M]."""
    seq_lens: torch.Tensor
    """int32[S]."""
    query_start_loc: torch.Tensor
    """int32[S + 1]."""

    def check(self, hidden_size: int) -> None:
        """Raise ValueError if C would read something else than what the fields say."""
        num_tokens, (num_seqs, width) = self.hidden.shape[0], self.block_tables.shape
        check_tensor("hidden", self.hidden, (num_tokens, hidden_size), _DTYPE, self.hidden)
        for name, dtype, shape in (
            ("positions", torch.int64, (num_tokens,)),
            ("slot_mapping", torch.int64, (num_tokens,)),
            ("block_tables", torch.int32, (num_seqs, width)),
            ("seq_lens", torch.int32, (num_seqs,)),
            ("query_start_loc", torch.int32, (num_seqs + 1,)),
        ):
            check_tensor(name, getattr(self, name), shape, dtype, self.hidden)

    def copied(self, width: int) -> "NativeInputs":
        """The same in memory of its own, with room for tables of `width` blocks."""
        room = self.block_tables.new_zeros(len(self.block_tables), width)
        room[:, : self.block_tables.shape[1]] = self.block_tables
        others = (getattr(self, name).clone() for name in _UNPADDED)
        return NativeInputs(block_tables=room, **dict(zip(_UNPADDED, others, strict=True)))

    def fill(self, inputs: "NativeInputs") -> None:
        """Take over what `inputs` of the same T and S, and tables no wider, contain."""
        self.block_tables[:, : inputs.block_tables.shape[1]] = inputs.block_tables
        for name in _UNPADDED:
            getattr(self, name).copy_(getattr(inputs, name))


@dataclass(frozen=True, slots=True, eq=False)
class _Workspace:
    """What a step's calls pass on to one another; all bfloat16."""

    normed: torch.Tensor
    """[T, E]."""
    qkv: torch.Tensor
    """[T, (H + 2 * HKV) * D]."""
    query: torch.Tensor
    """[T, H, D], rotated."""
    key: torch.Tensor
    """[T, HKV, D], rotated."""
    normed_query: torch.Tensor
    normed_key: torch.Tensor
    attended: torch.Tensor
    """[T, H * D]."""
    added: torch.Tensor
    """[T, E]: a branch, before the next norm adds it to the residual."""
    gate_up: torch.Tensor
    """[T, 2 * I]."""
    gated: torch.Tensor
    """[T, I]."""

    @classmethod
    def of(cls, shape: NativeShape, num_tokens: int) -> "_Workspace":
        heads, kv_heads = (num_tokens, shape.num_heads), (num_tokens, shape.num_kv_heads)
        size, dim = shape.head_dim, shape.intermediate_size
        num_qkv = (shape.num_heads + 2 * shape.num_kv_heads) * size

        def empty(*sizes: int) -> torch.Tensor:
            return torch.empty(sizes, dtype=_DTYPE)

        return cls(
            normed=empty(num_tokens, shape.hidden_size),
            qkv=empty(num_tokens, num_qkv),
            query=empty(*heads, size),
            key=empty(*kv_heads, size),
            normed_query=empty(*heads, size),
            normed_key=empty(*kv_heads, size),
            attended=empty(num_tokens, shape.num_heads * size),
            added=empty(num_tokens, shape.hidden_size),
            gate_up=empty(num_tokens, 2 * dim),
            gated=empty(num_tokens, dim),
        )

    def first(self, num_tokens: int) -> "_Workspace":
        """The same memory, for fewer tokens."""
        return _Workspace(*(getattr(self, field.name)[:num_tokens] for field in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A program and the memory that it works on."""

    inputs: NativeInputs
    work: _Workspace
    partials: torch.Tensor
    run: Program


class NativeDecoder:
    """The layers and the final norm; one thread at a time calls it."""

    def __init__(
        self,
        shape: NativeShape,
        layers: Sequence[NativeLayer],
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """`caches` are each layer's keys and values, bfloat16 views [B, P, HKV, D].

        `final_norm` is `[E]`, `cos_sin` float32 `[max_model_len, D]`.
        """
        library = native()
        assert library is not None, "packed linears exist only where native code does"
        self._library = library
        self._shape = shape
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._cos_sin = cos_sin
        self._caches = tuple(caches)
        self._kept: OrderedDict[tuple[int, int, int], _Step] = OrderedDict()
        self._kept_work = _Workspace.of(shape, _MAX_KEPT_TOKENS)

    def forward(self, inputs: NativeInputs) -> torch.Tensor:
        """Compute one step's tokens, storing their K and V in the caches; changes `inputs.hidden`.

        Returns:
            The final hidden states, normalized: bfloat16 `[T, E]`.

        Raises:
            ValueError: a tensor's shape, dtype or strides do not fit.
        """
        inputs.check(self._shape.hidden_size)
        num_tokens, (num_seqs, width) = inputs.hidden.shape[0], inputs.block_tables.shape
        if num_tokens > _MAX_KEPT_TOKENS:
            step = self._step(inputs, _Workspace.of(self._shape, num_tokens))
            step.run()
            return step.work.normed
        width = 1 << (width - 1).bit_length()  # so that few widths occur
        key = num_tokens, num_seqs, width
        kept = self._kept.get(key)
        if kept is None:
            own = inputs.copied(width)
            kept = self._kept[key] = self._step(own, self._kept_work.first(num_tokens))
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
            kept.inputs.fill(inputs)
        kept.run()
        return kept.work.normed.clone()

    def _step(self, inputs: NativeInputs, work: _Workspace) -> _Step:
        num_seqs, width = inputs.block_tables.shape
        partials = new_partials(work.query, num_seqs, width * self._caches[0][0].shape[1])
        calls = list(self._calls(inputs, work, partials))
        return _Step(inputs, work, partials, Program(self._library, calls))

    def _calls(
        self, inputs: NativeInputs, work: _Workspace, partials: torch.Tensor
    ) -> Iterator[Call]:
        added: torch.Tensor | None = None  # the branch that the next norm adds to the residual
        for layer, caches in zip(self._layers, self._caches, strict=True):
            yield self._norm(inputs.hidden, added, layer.input_norm, work.normed)
            yield from self._attend(layer, caches, inputs, work, partials)
            added = work.added
            yield self._norm(inputs.hidden, added, layer.mlp_norm, work.normed)
            yield from self._feed_forward(layer, work)
        yield self._norm(inputs.hidden, added, self._final_norm, work.normed)

    def _norm(
        self,
        residual: torch.Tensor,  # [T, E]; `added` is added to it
        added: torch.Tensor | None,  # [T, E]
        weight: torch.Tensor,  # [E]
        out: torch.Tensor,  # [T, E]
    ) -> Call:
        rms_norm, (num_tokens, width) = self._library.rms_norm, residual.shape
        x = residual if added is None else added
        total = 0 if added is None else residual.data_ptr()
        return Call(rms_norm, rms_norm.pack(
            DTYPES[_DTYPE], num_tokens, 1, width,
            x.data_ptr(), total, weight.data_ptr(), out.data_ptr(), total,
            x.stride(0), 0, width, self._shape.rms_norm_eps,
        ))  # fmt: skip

    def _attend(
        self,
        layer: NativeLayer,
        caches: tuple[torch.Tensor, torch.Tensor],
        inputs: NativeInputs,
        work: _Workspace,
        partials: torch.Tensor,
    ) -> Iterator[Call]:
        """From `work.normed` to `work.added`."""
        library, shape, dtype = self._library, self._shape, DTYPES[_DTYPE]
        num_tokens, num_heads, num_kv_heads = len(work.qkv), shape.num_heads, shape.num_kv_heads
        (key_cache, value_cache), head_dim = caches, shape.head_dim
        yield layer.qkv.call(work.normed, work.qkv)
        heads = work.qkv.view(num_tokens, -1, head_dim)
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        waits = True
        if layer.qk_norm is not None:
            normed = work.normed_query, work.normed_key
            for x, weight, out in zip((query, key), layer.qk_norm, normed, strict=True):
                yield Call(library.rms_norm, library.rms_norm.pack(
                    dtype, num_tokens, x.shape[1], head_dim,
                    x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
                    x.stride(0), x.stride(1), 0, shape.rms_norm_eps,
                ), waits)  # fmt: skip
                waits = False
            query, key = normed
        yield Call(library.rotary, library.rotary.pack(
            dtype, num_tokens, num_heads, num_kv_heads, head_dim // 2,
            query.data_ptr(), key.data_ptr(), self._cos_sin.data_ptr(),
            inputs.positions.data_ptr(), work.query.data_ptr(), work.key.data_ptr(),
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            self._cos_sin.stride(0),
        ), waits)  # fmt: skip
        yield Call(library.store_kv, library.store_kv.pack(
            _DTYPE.itemsize, num_tokens, num_kv_heads, head_dim, key_cache.shape[1],
            work.key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
            inputs.slot_mapping.data_ptr(),
            work.key.stride(0), work.key.stride(1), value.stride(0), value.stride(1),
            *key_cache.stride()[:3], *value_cache.stride()[:3],
        ), waits=False)  # fmt: skip
        yield Call(library.attention, library.attention.pack(
            dtype, 0, len(inputs.seq_lens), num_tokens, num_heads, num_kv_heads, head_dim,
            key_cache.shape[1], layer.window or 0,
            work.query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), 0, 0,
            inputs.block_tables.data_ptr(), inputs.seq_lens.data_ptr(),
            inputs.query_start_loc.data_ptr(), 0, work.attended.data_ptr(), partials.data_ptr(),
            *work.query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
            *scale_strides(None), *scale_strides(None),
            inputs.block_tables.stride(0), head_dim**-0.5, 0.0,
        ))  # fmt: skip
        yield layer.attention_output.call(work.attended, work.added)

    def _feed_forward(self, layer: NativeLayer, work: _Workspace) -> Iterator[Call]:
        """From `work.normed` to `work.added`."""
        silu_mul = self._library.silu_mul
        yield layer.gate_up.call(work.normed, work.gate_up)
        yield Call(silu_mul, silu_mul.pack(
            DTYPES[_DTYPE], *work.gated.shape, work.gate_up.data_ptr(), work.gated.data_ptr(),
            work.gate_up.stride(0),
        ))  # fmt: skip
        yield layer.down.call(work.gated, work.added)
