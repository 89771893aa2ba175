"""Runs the recurrent layers of a `transformers` model on states in blocks of the KV pool.

To the scheduler, which allocates the blocks, a recurrent layer is a layer with a window of two
tokens. The state after a token is in the block of that token's position. Each token overwrites the
state in its block, so a full block is a checkpoint: the state after the block's last token. A state
cannot be rewound. So a sequence that must compute a token again goes back to an earlier checkpoint
or, without one, to its first token.

In one call of a `transformers` module, all sequences must have the same number of tokens. So
decodes, with one token each, are computed together, but each chunk of a prompt is computed without
other sequences. A chunk is cut into pieces that end at block boundaries.

Symbols: `B` blocks, `T` tokens, `S` sequences, `E` hidden size, `N` numbers of a layer's state.
"""

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.attention import AttentionMetadata
from gpu_worker.models.transformers.scans import token_by_token
from gpu_worker.weights.json_fields import ModelError

_CACHE_NAMES: Final = ("cache_params", "past_key_values")
_STORED: Final = torch.float32
"""States are stored in float32, which represents the states of every dtype exactly."""
_ALIGNMENT: Final = 16

_Key = tuple[str, int]
"""The kind of a state tensor, "conv" or "recurrent", and its index among the layer's tensors of
this kind."""


@dataclass(slots=True)
class StateTensor:
    """One tensor of a layer's state."""

    shape: tuple[int, ...]
    """The shape for one sequence."""
    is_float32: bool
    """Whether its dtype is float32 regardless of the model's dtype."""


@dataclass(slots=True)
class RecurrentLayer:
    """A module that keeps a state."""

    module: str
    """Its name in the model's base."""
    tensors: dict[_Key, StateTensor]

    @property
    def num_bytes(self) -> int:
        size = sum(prod(tensor.shape) for tensor in self.tensors.values()) * _STORED.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class StateRecorder(DynamicCache):
    """The cache for a trial run on the meta device; it records which modules keep which state."""

    def __init__(self, config: PreTrainedConfig, base: nn.Module) -> None:
        super().__init__(config=config)
        self.layers_by_module: dict[str, RecurrentLayer] = {}
        self.attending: set[int] = set()
        """Layers that store keys and values."""
        self._base = base
        self._running: list[str] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record which module runs."""
        handles = []
        for name, module in self._base.named_modules():
            if cache_name(module) is None:
                continue

            def enter(_module: nn.Module, _args: Any, name: str = name) -> None:
                self._running.append(name)

            def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
                self._running.pop()

            handles += [module.register_forward_pre_hook(enter)]
            handles += [module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **_: Any
    ) -> Any:
        del args
        self.attending.add(layer_idx)
        return key_states, value_states

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        size = kwargs.get("conv_kernel_size") or conv_states.shape[-1]
        self._record(("conv", state_idx), (*conv_states.shape[1:-1], size), conv_states.dtype)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        shape, dtype = tuple(recurrent_states.shape[1:]), recurrent_states.dtype
        self._record(("recurrent", state_idx), shape, dtype)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def _record(self, key: _Key, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if not self._running or not self._running[-1]:
            raise ModelError("it keeps a state outside of a module that takes a cache")
        name = self._running[-1]
        layer = self.layers_by_module.setdefault(name, RecurrentLayer(name, {}))
        layer.tensors[key] = StateTensor(shape, dtype == torch.float32)


class RecurrentStates:
    """Connects one model's recurrent layers with their states in the KV pool."""

    def __init__(self, base: nn.Module, layers: tuple[RecurrentLayer, ...]) -> None:
        """Make the modules of `layers` compute with states in the KV pool."""
        self._pool: KvPool | None = None
        self._pieces: list[_Pieces] = []
        self._num_bytes = max(layer.num_bytes for layer in layers)
        for number, layer in enumerate(layers):
            self._take_over(base.get_submodule(layer.module), number, layer)

    def begin_step(self, pool: KvPool, metadata: AttentionMetadata) -> None:
        """Cut the step into pieces, and look up the blocks of their states in the block tables."""
        self._pool = pool
        query_starts = metadata.query_start_loc.tolist()
        seq_lens = metadata.seq_lens.tolist()
        spans = [
            (end - (stop - start), end, start)
            for start, stop, end in zip(query_starts, query_starts[1:], seq_lens, strict=False)
        ]
        first = len(pool.groups.windows) - pool.groups.num_state_groups
        self._pieces = []
        for group in range(first, len(pool.groups.windows)):
            of_group = metadata.by_group[group] if metadata.by_group else metadata
            tables = of_group.block_tables.tolist()
            self._pieces.append(_cut(spans, tables, pool.block_size))

    def end_step(self) -> None:
        self._pool, self._pieces = None, []

    def _take_over(self, module: nn.Module, number: int, layer: RecurrentLayer) -> None:
        name = cache_name(module)
        assert name is not None, "the recorder has seen it"
        original = token_by_token(module)
        signature = inspect.signature(original)
        hidden_name = next(iter(signature.parameters))

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = signature.bind_partial(*args, **kwargs)
            hidden = given.arguments[hidden_name]  # [1, T, E]
            if "attention_mask" in given.arguments:
                given.arguments["attention_mask"] = None

            def compute(part: torch.Tensor, state: "_LayerState") -> torch.Tensor:
                given.arguments[hidden_name] = part
                given.arguments[name] = state
                out: torch.Tensor = original(*given.args, **given.kwargs)
                return out

            return self._run(number, layer, hidden[0], compute)

        module.forward = forward

    def _run(
        self, number: int, layer: RecurrentLayer, hidden: torch.Tensor, compute: Any
    ) -> torch.Tensor:
        """Compute a layer for the step's tokens `[T, E]`; returns `[1, T, E]`."""
        pool = self._pool
        assert pool is not None, "only `forward` runs it"
        group, place = divmod(number, pool.groups.states_per_block)
        start = place * self._num_bytes
        memory = pool.blocks_as_bytes[:, start : start + layer.num_bytes].view(_STORED)  # [B, N]
        pieces = self._pieces[group]
        out: torch.Tensor | None = None

        def put(places: Any, computed: torch.Tensor) -> None:
            nonlocal out
            if out is None:
                out = computed.new_empty(1, len(hidden), computed.shape[-1])
            out[0, places] = computed

        if pieces.together_places:
            state = _LayerState(layer.tensors, memory[pieces.together_reads], hidden.dtype)
            computed = compute(hidden[pieces.together_places].unsqueeze(1), state)  # [S, 1, E]
            put(pieces.together_places, computed[:, 0])
            memory[pieces.together_writes] = state.packed(memory.shape[1])
        for start, stop, read, write in pieces.apart:
            numbers = None if read is None else memory[read : read + 1]
            state = _LayerState(layer.tensors, numbers, hidden.dtype)
            put(slice(start, stop), compute(hidden[start:stop].unsqueeze(0), state)[0])
            memory[write] = state.packed(memory.shape[1])[0]
        assert out is not None, "a step has tokens"
        return out


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A step's tokens, cut into pieces. All tokens of a piece are in one block of one sequence."""

    together_places: list[int]
    """Pieces that are computed together: single tokens that depend on no other piece. Each is given
    by its index in the batch."""
    together_reads: list[int]
    together_writes: list[int]
    apart: list[tuple[int, int, int | None, int]]
    """The other pieces, in the order of computation. For each piece: its start and stop in the
    batch, the block with the state before the piece (None: the sequence begins), and the block for
    the state after the piece."""


def _cut(spans: list[tuple[int, int, int]], tables: list[list[int]], block_size: int) -> _Pieces:
    """Split a step at block boundaries.

    Args:
        spans: For each sequence: the position of its first token in this step, the position after
            its last token, and the index of its first token in the batch.
        tables: For each sequence: its blocks in one KV group.
        block_size: Token slots of a block.
    """
    cut: list[tuple[int, int, int | None, int]] = []
    for (begin, end, place), table in zip(spans, tables, strict=True):
        position = begin
        while position < end:
            stop = min(end, (position // block_size + 1) * block_size)
            read = table[(position - 1) // block_size] if position else None
            at = place + position - begin
            cut.append((at, at + stop - position, read, table[position // block_size]))
            position = stop
    # A piece may read what an earlier piece of this step writes: a piece of its own sequence, or of
    # a sequence whose checkpoint it starts from; plans put that sequence first. Such pieces are
    # computed in order.
    num_writes = Counter(write for *_, write in cut)
    together: list[tuple[int, int, int | None, int]] = []
    apart: list[tuple[int, int, int | None, int]] = []
    for piece in cut:
        start, stop, read, write = piece
        is_free = read is not None and num_writes[read] == (read == write)
        (together if is_free and stop - start == 1 else apart).append(piece)
    return _Pieces(
        [start for start, *_ in together],
        [read for *_, read, _ in together if read is not None],
        [write for *_, write in together],
        apart,
    )


class _LayerState:
    """The cache that one call of a `transformers` module gets: the states of the call's sequences.

    To the module, it looks like a `transformers.cache_utils.LinearAttentionLayer`. The module may
    change the states in place.
    """

    def __init__(
        self, tensors: dict[_Key, StateTensor], numbers: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        """`numbers`: float32[S, N], the stored states; None: the sequence begins."""
        self._tensors = tensors
        self._values: dict[_Key, torch.Tensor] = {}
        if numbers is None:
            return
        start = 0
        for key, tensor in tensors.items():
            size = prod(tensor.shape)
            value = numbers[:, start : start + size].reshape(-1, *tensor.shape)
            self._values[key] = value.to(_STORED if tensor.is_float32 else dtype, copy=True)
            start += size

    def packed(self, num_numbers: int) -> torch.Tensor:
        """Return the states as they are stored: float32[S, N]."""
        parts = [self._values[key].flatten(1).to(_STORED) for key in self._tensors]
        packed = torch.cat(parts, dim=1)
        return nn.functional.pad(packed, (0, num_numbers - packed.shape[1]))

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return bool(self._values)

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._values.get(("conv", state_idx))

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._values.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, _layer: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        key = ("conv", state_idx)
        size = self._tensors[key].shape[-1]
        before = self._values.get(key)
        if before is not None:
            conv_states = torch.cat([before, conv_states], dim=-1)
        elif conv_states.shape[-1] < size:
            conv_states = nn.functional.pad(conv_states, (size - conv_states.shape[-1], 0))
        self._values[key] = conv_states[..., -size:].clone()
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        del layer_idx
        self._values["recurrent", state_idx] = recurrent_states
        return recurrent_states


def cache_name(module: nn.Module) -> str | None:
    """Return the name of the parameter by which a module's forward pass takes a cache, if any."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_NAMES if name in names), None)
