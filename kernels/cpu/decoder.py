"""A Llama-shaped decoder's layers as one native program: a whole step in one call.

Called op by op, a step of one token spends a third of its time between the ops: in Python, and in
waking threads.

Symbols: `T` tokens, `N` of them whose final hidden states are wanted, `S` sequences, `H` query
heads, `HKV` kv heads, `D` head dim, `E` hidden size, `I` intermediate size, `B` blocks, `P` block
size, `M` blocks of the longest block table.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kernels.cpu.attention import num_partials
from kernels.cpu.caches import LayerCaches
from kernels.cpu.layer_calls import LayerCalls, NativeLayer
from kernels.cpu.library import Call, Program, native
from kernels.cpu.native_inputs import NativeInputs
from kernels.cpu.workspace import NativeShape, Workspace

_MAX_KEPT_TOKENS: Final = 64
"""Steps of so many tokens keep their program; it costs as much as a small step to make."""
_MAX_KEPT: Final = 256
"""So many programs are kept, those that were used last."""
_APART_BYTES: Final = 8 << 20
"""As many layers' workspaces lie apart as this has room for, and two in any case."""
_DTYPE: Final = torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A program and the memory that it works on."""

    inputs: NativeInputs
    memory: tuple[torch.Tensor, ...]
    """What lives as long as the program, besides."""
    out: torch.Tensor
    """[N, E]."""
    run: Program


class NativeDecoder:
    """The layers and the final norm; one thread at a time calls it."""

    def __init__(
        self,
        shape: NativeShape,
        layers: Sequence[NativeLayer],
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
        caches: Sequence[LayerCaches],
    ) -> None:
        """`caches` are each layer's, quantized or bfloat16; `final_norm` is `[E]`.

        `cos_sin` is float32 `[max_model_len, D]`.
        """
        library = native()
        assert library is not None, "packed linears exist only where native code does"
        self._library = library
        self._shape = shape
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._cos_sin = cos_sin
        self._caches = tuple(caches)
        self._kept: OrderedDict[tuple[int, int, int, int | None], _Step] = OrderedDict()
        self._kept_memory = torch.empty(
            (_num_works(shape, len(layers), _MAX_KEPT_TOKENS) + 1)
            * Workspace.num_elements(shape, _MAX_KEPT_TOKENS)
            + _APART_BYTES // _DTYPE.itemsize,
            dtype=_DTYPE,
        )
        self._memory = torch.empty(0, dtype=_DTYPE)
        self._partials = torch.empty(0, dtype=torch.float32)

    def forward(self, inputs: NativeInputs) -> torch.Tensor:
        """Compute one step's tokens, storing their K and V in the caches.

        Returns:
            The final hidden states of the wanted tokens, normalized: bfloat16 `[N, E]`.

        Raises:
            ValueError: a tensor's shape, dtype or strides do not fit.
        """
        inputs.check(self._shape.hidden_size)
        num_tokens, (num_seqs, width) = inputs.hidden.shape[0], inputs.block_tables.shape
        if num_tokens > _MAX_KEPT_TOKENS:
            step = self._step(inputs, None)
            step.run()
            return step.out
        width = 1 << (width - 1).bit_length()  # so that few widths occur
        key = num_tokens, num_seqs, width, inputs.num_wanted
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = self._step(inputs.copied(width), self._kept_memory)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
            kept.inputs.fill(inputs)
        kept.run()
        return kept.out.clone()

    def _step(self, inputs: NativeInputs, memory: torch.Tensor | None) -> _Step:
        num_tokens, (num_seqs, width) = inputs.hidden.shape[0], inputs.block_tables.shape
        max_len = width * self._caches[0].keys.shape[1]
        size = num_partials(self._shape.num_heads, self._shape.head_dim, num_seqs, max_len)
        num_works = _num_works(self._shape, len(self._layers), num_tokens, size)
        num_elements = Workspace.num_elements(self._shape, num_tokens)
        num_wanted = inputs.num_wanted or 0
        if memory is None:
            memory = self._memory_for(
                num_works * num_elements + Workspace.num_elements(self._shape, num_wanted)
            )
        parts = memory[: num_works * num_elements].view(num_works, num_elements)
        works = [Workspace.of(self._shape, num_tokens, part) for part in parts]
        wanted = None
        if inputs.wanted is not None:
            rest = memory[num_works * num_elements :]
            wanted = Workspace.of(self._shape, num_wanted, rest)
        partials = self._partials_for(num_works, size)
        layer_calls = LayerCalls(self._library, self._shape, inputs, self._cos_sin)

        calls: list[Call] = []
        firsts: list[int] = []  # of each layer's calls
        before: Workspace | None = None
        for i, (layer, caches) in enumerate(zip(self._layers, self._caches, strict=True)):
            work = works[i % num_works]
            firsts.append(len(calls))
            ends_in = wanted if i == len(self._layers) - 1 else None
            calls += layer_calls.of(layer, caches, before, work, partials[i % num_works], ends_in)
            before = work if ends_in is None else ends_in
        assert before is not None, "a decoder has at least one layer"
        out, total = torch.empty_like(before.output), torch.empty_like(before.output)
        if len(out):
            calls.append(
                layer_calls.norm(before.output, before.mlp_residual, total, self._final_norm, out)
            )
        # A layer reads what the one before wrote, until that one's memory is another's.
        again = itertools.islice(firsts, num_works, None)
        num_apart = min(
            (there - here for here, there in zip(firsts[1:], again, strict=False)),
            default=len(calls) + 1,
        )
        program = Program(self._library, calls, num_apart)
        return _Step(inputs, (memory, partials, total), out, program)

    def _memory_for(self, num_elements: int) -> torch.Tensor:
        """bfloat16, at least so many, for a step that is not kept.

        It stays for the next: the system clears pages that it gives anew, which would take some
        hundredths of the time of a step of 2,048 tokens.
        """
        if self._memory.numel() < num_elements:
            self._memory = torch.empty(num_elements, dtype=_DTYPE)
        return self._memory

    def _partials_for(self, num_works: int, size: int) -> torch.Tensor:
        """float32[num_works, size]: for attention's partial results; kept for other steps."""
        if self._partials.numel() < num_works * size:
            self._partials = torch.empty(num_works * size, dtype=torch.float32)
        return self._partials[: num_works * size].view(num_works, size)


def _num_works(shape: NativeShape, num_layers: int, num_tokens: int, num_floats: int = 0) -> int:
    """How many workspaces the layers of a step use in turn, each with its partial results."""
    num_bytes = Workspace.num_elements(shape, num_tokens) * _DTYPE.itemsize
    num_bytes += num_floats * torch.float32.itemsize
    return min(max(2, _APART_BYTES // max(1, num_bytes)), num_layers)
