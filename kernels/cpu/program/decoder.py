"""Runs the layers of a decoder like Llama's as one program of C kernels, with one call per step.

If ops are called one by one, a step of one token spends a third of its time between the ops: Python
runs, and threads wake up. A program (`kernels.cpu.library.Program`) saves this time. Making a
program takes as long as a small step. So a program serves all steps of about the same size, and
each run passes the counts and addresses of its step.

Symbols: `T` tokens, `N` of them whose final hidden states are wanted, `D` head dim, `E` hidden
size.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from kernels.cpu.fields import LayerCaches, num_partials
from kernels.cpu.library import KernelCall, Program, native
from kernels.cpu.program.inputs import NativeInputs, StepField
from kernels.cpu.program.kv_ahead import KvAhead, share_out
from kernels.cpu.program.layer_calls import ALL, WANTED, LayerCalls, NativeLayer
from kernels.cpu.program.workspace import NativeShape, Workspace

_APART_BYTES: Final = 8 << 20
"""A program has as many workspaces as fit in this size, but at least two. A workspace is the memory
that one layer's calls write to; the program's layers use the workspaces in turn."""
_LARGE_TOKENS: Final = 512
"""A program's capacity in tokens is a power of two up to this number, and a multiple of this number
above it."""
_DTYPE: Final = torch.bfloat16


class _Size(NamedTuple):
    """The capacity of a program, and the properties that decide which kernels it calls."""

    num_tokens: int
    num_wanted: int | None
    """The number of wanted tokens, rounded up; None: all tokens are wanted."""
    has_partials: bool
    """Whether attention may split sequences, and then merge the splits' partial results."""
    num_ranks: int
    """The highest rank of the tokens' adapters, rounded up; 0: no token has an adapter."""


@dataclass(frozen=True, slots=True, eq=False)
class _StepProgram:
    """A program for all steps whose sizes round up to the same `_Size`, and its memory."""

    run: Program
    partials: tuple[str, ...]
    """Names of the areas of memory for attention's partial results. Each run of the program gets
    the address of each area. The layers use the areas in turn."""
    memory: tuple[torch.Tensor, ...]
    """Tensors that must live as long as the program, whose calls have the tensors' addresses."""


class NativeDecoder:
    """Runs a decoder's layers and final norm; only one thread at a time may call it."""

    def __init__(
        self,
        shape: NativeShape,
        layers: Sequence[NativeLayer],
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
        caches: Sequence[LayerCaches],
    ) -> None:
        """Prepare to run the layers.

        `caches` has one entry per layer, quantized or in bfloat16. `final_norm` is `[E]`, and
        `cos_sin` is float32 `[max_model_len, R]`, where R is the number of rotated dims of a head.
        """
        library = native()
        assert library is not None, "packed linears exist only where native code does"
        self._library = library
        self._shape = shape
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._cos_sin = cos_sin
        self._caches = tuple(caches)
        self._steps: dict[_Size, _StepProgram] = {}
        self._memory = torch.empty(0, dtype=_DTYPE)
        self._partials = torch.empty(0, dtype=torch.float32)

    def forward(self, inputs: NativeInputs) -> torch.Tensor:
        """Compute the tokens of one step, and store their K and V in the caches.

        Returns:
            The normalised final hidden states of the wanted tokens, bfloat16 `[N, E]`.

        Raises:
            ValueError: a tensor's shape, dtype or strides do not fit.
        """
        inputs.check(self._shape.hidden_size)
        num_tokens, num_wanted = len(inputs.hidden), inputs.num_wanted
        num_seqs, table_width = inputs.block_tables.shape
        max_len = table_width * self._caches[0].keys.shape[1]
        num_floats = num_partials(self._shape.num_heads, self._shape.head_dim, num_seqs, max_len)
        size = _Size(
            num_tokens=_rounded_up(num_tokens),
            num_wanted=None if num_wanted is None else _rounded_up(num_wanted),
            has_partials=num_floats > 0,
            num_ranks=_rounded_up(inputs.max_ranks),
        )
        if (step := self._steps.get(size)) is None:
            step = self._make(size)
            self._steps[size] = step
        out = inputs.hidden.new_empty(
            num_tokens if num_wanted is None else num_wanted, self._shape.hidden_size
        )
        numbers = inputs.numbers
        numbers[StepField.OUT] = out.data_ptr()
        numbers.update(self._partials_for(step.partials, num_floats))
        step.run(numbers)
        return out

    def _make(self, size: _Size) -> _StepProgram:
        """Make a program for steps of up to this size.

        Layer i writes to workspace i modulo the number of workspaces. The last layer stores the
        keys and values of all tokens. If some tokens are not wanted, the last layer then
        continues with the wanted tokens only, in a separate workspace.

        The `KernelCall`s of attention are created first, because a map's call refers to the
        attention call for which it prefetches KV: the next attention call that the program runs.
        """
        shape = replace(self._shape, num_ranks=size.num_ranks)
        num_layers = len(self._layers)
        num_elements = Workspace.num_elements(shape, size.num_tokens)
        num_works = min(max(2, _APART_BYTES // (num_elements * _DTYPE.itemsize)), num_layers)
        num_wanted = size.num_wanted or 0
        memory = self._memory_for(
            num_works * num_elements + Workspace.num_elements(shape, num_wanted)
        )
        parts = memory[: num_works * num_elements].view(num_works, num_elements)
        in_turn = [Workspace.of(shape, size.num_tokens, part) for part in parts]
        works = [in_turn[i % num_works] for i in range(num_layers)]
        ends, rows = works.copy(), [ALL] * num_layers
        wanted = None
        if size.num_wanted is not None:
            wanted = Workspace.of(shape, num_wanted, memory[num_works * num_elements :])
            ends[-1], rows[-1] = wanted, WANTED
        partials = tuple(f"partials_{i}" for i in range(num_works if size.has_partials else 0))

        layer_calls = LayerCalls(self._library, shape, self._cos_sin)
        attentions = [
            layer_calls.attend(
                layer, self._caches[i], ends[i], rows[i],
                partials[i % num_works] if partials else None,
            )
            for i, layer in enumerate(self._layers)
        ]  # fmt: skip
        aheads = self._aheads(attentions)
        calls: list[KernelCall] = []
        firsts: list[int] = []  # the index of each layer's first call
        for i, layer in enumerate(self._layers):
            firsts.append(len(calls))
            calls += layer_calls.of(
                i, layer, self._caches[i], ends[i - 1] if i else None, works[i], attentions[i],
                aheads[i], wanted if ends[i] is wanted else None,
            )  # fmt: skip
        total = torch.empty_like(ends[-1].output)
        if len(total):
            norm = self._final_norm
            calls.append(
                layer_calls.add_norm(ends[-1], total.data_ptr(), norm, StepField.OUT, rows[-1].num)
            )
        # A layer reads the output of the previous layer before that layer's memory is reused.
        reused = itertools.islice(firsts, num_works, None)
        num_apart = min(
            (there - here for here, there in zip(firsts[1:], reused, strict=False)),
            default=len(calls) + 1,
        )
        return _StepProgram(Program(self._library, calls, num_apart), partials, (memory, total))

    def _aheads(self, attentions: Sequence[Sequence[KernelCall]]) -> list[dict[str, KvAhead]]:
        """Return the KV that each linear map of each layer prefetches.

        The list has a dict for each layer. The dict's keys are names of maps, as in
        `low_rank.MAPS`. `attentions` has the attention calls of each layer.
        """
        aheads: list[dict[str, KvAhead]] = [{} for _ in attentions]
        for i, attention in enumerate(attentions):
            if not attention:
                continue
            maps = {}
            if i > 0:
                before = self._layers[i - 1]
                maps[i - 1, "attention_output"] = before.attention_output
                maps[i - 1, "gate_up"] = before.gate_up
                maps[i - 1, "down"] = before.down
            maps[i, "qkv"] = self._layers[i].qkv
            packed = {
                place: (linear.num_in, linear.num_out)
                for place, linear in maps.items()
                if linear.can_fetch_ahead
            }
            for (layer, name), ahead in share_out(attention[0], packed).items():
                aheads[layer][name] = ahead
        return aheads

    def _memory_for(self, num_elements: int) -> torch.Tensor:
        """Return memory for at least `num_elements` bfloat16 elements.

        All programs share the memory, because no two programs run at once. The memory is kept for
        later programs, because the system clears new pages, which takes a few percent of a step of
        2,048 tokens.
        """
        if self._memory.numel() < num_elements:
            self._steps.clear()  # the old programs would keep the old memory alive
            self._memory = torch.empty(num_elements, dtype=_DTYPE)
        return self._memory

    def _partials_for(self, names: Sequence[str], num_floats: int) -> dict[str, int]:
        """For each name, return the address of memory for `num_floats` float32 numbers."""
        if self._partials.numel() < len(names) * num_floats:
            self._partials = torch.empty(len(names) * num_floats, dtype=torch.float32)
        num_bytes = num_floats * self._partials.itemsize
        return {name: self._partials.data_ptr() + i * num_bytes for i, name in enumerate(names)}


def _rounded_up(count: int) -> int:
    """Round up, so that few sizes occur.

    Up to `_LARGE_TOKENS` the result is a power of two, above it a multiple of `_LARGE_TOKENS`.
    """
    power = 1 << (count - 1).bit_length() if count else 0
    return power if power <= _LARGE_TOKENS else -(-count // _LARGE_TOKENS) * _LARGE_TOKENS
