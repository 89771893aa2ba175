"""A Llama-shaped decoder's layers as one native program: a whole step in one call.

Called op by op, a step of one token spends a third of its time between the ops: in Python, and in
waking threads. A program takes as long to make as a small step, so it serves all steps of about
its size: it is told their counts and addresses.

Symbols: `T` tokens, `N` of them whose final hidden states are wanted, `S` sequences, `H` query
heads, `HKV` kv heads, `D` head dim, `E` hidden size, `I` intermediate size, `B` blocks, `P` block
size, `M` blocks of the longest block table.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from kernels.cpu.library import Call, Program, native
from kernels.cpu.linear import PackedLinear
from kernels.cpu.ops.attention import num_partials
from kernels.cpu.program.caches import LayerCaches
from kernels.cpu.program.inputs import NativeInputs, StepField
from kernels.cpu.program.kv_ahead import KvAhead, share_out
from kernels.cpu.program.layer_calls import LayerCalls, NativeLayer
from kernels.cpu.program.workspace import NativeShape, Workspace

_APART_BYTES: Final = 8 << 20
"""As many layers' workspaces lie apart as this has room for, and two in any case."""
_LARGE_TOKENS: Final = 512
"""Of more tokens than this, so many are the most that a program has too much room for."""
_DTYPE: Final = torch.bfloat16


class _Size(NamedTuple):
    """What a program has room for, and which calls it has."""

    num_tokens: int
    num_wanted: int | None
    """None: all tokens are wanted, and have no memory of their own."""
    has_partials: bool
    """Whether attention may give partial results."""
    num_ranks: int
    """The most of a token's adapter; 0: no token has one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A program and what it works in."""

    run: Program
    partials: tuple[str, ...]
    """Names of the addresses of attention's partial results; some layers share one."""
    memory: tuple[torch.Tensor, ...]
    """What must live as long."""


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
        self._steps: dict[_Size, _Step] = {}
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
        num_tokens, num_wanted = len(inputs.hidden), inputs.num_wanted
        num_partials = self._num_partials(inputs)
        size = _Size(
            num_tokens=_rounded_up(num_tokens),
            num_wanted=None if num_wanted is None else _rounded_up(num_wanted),
            has_partials=num_partials > 0,
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
        numbers.update(self._partials_for(step.partials, num_partials))
        step.run(numbers)
        return out

    def _make(self, size: _Size) -> _Step:
        shape = replace(self._shape, num_ranks=size.num_ranks)
        num_elements = Workspace.num_elements(shape, size.num_tokens)
        num_works = min(max(2, _APART_BYTES // (num_elements * _DTYPE.itemsize)), len(self._layers))
        num_wanted = size.num_wanted or 0
        memory = self._memory_for(
            num_works * num_elements + Workspace.num_elements(shape, num_wanted)
        )
        parts = memory[: num_works * num_elements].view(num_works, num_elements)
        works = [Workspace.of(shape, size.num_tokens, part) for part in parts]
        wanted = None
        if size.num_wanted is not None:
            wanted = Workspace.of(shape, num_wanted, memory[num_works * num_elements :])
        partials = tuple(f"partials_{i}" for i in range(num_works if size.has_partials else 0))
        layer_calls = LayerCalls(self._library, shape, self._cos_sin)
        ends = [works[i % num_works] for i in range(len(self._layers))]
        if wanted is not None:
            ends[-1] = wanted
        attentions = [
            layer_calls.attend(
                layer, caches, end, partials[i % num_works] if partials else None,
                of_wanted=end is wanted,
            )
            for i, (layer, caches, end) in enumerate(
                zip(self._layers, self._caches, ends, strict=True)
            )
        ]  # fmt: skip
        aheads = self._aheads(attentions)

        calls: list[Call] = []
        firsts: list[int] = []  # of each layer's calls
        before: Workspace | None = None
        for i, (layer, caches) in enumerate(zip(self._layers, self._caches, strict=True)):
            firsts.append(len(calls))
            calls += layer_calls.of(
                i, layer, caches, before, works[i % num_works], attentions[i], aheads[i],
                wanted if ends[i] is wanted else None,
            )  # fmt: skip
            before = ends[i]
        assert before is not None, "a decoder has at least one layer"
        total = torch.empty_like(before.output)
        if len(total):
            num_rows = StepField.NUM_TOKENS if wanted is None else StepField.NUM_WANTED
            calls.append(
                layer_calls.add_norm(
                    before, total.data_ptr(), self._final_norm, StepField.OUT, num_rows
                )
            )
        # A layer reads what the one before wrote, until that one's memory is another's.
        again = itertools.islice(firsts, num_works, None)
        num_apart = min(
            (there - here for here, there in zip(firsts[1:], again, strict=False)),
            default=len(calls) + 1,
        )
        return _Step(Program(self._library, calls, num_apart), partials, (memory, total))

    def _aheads(self, attentions: Sequence[Sequence[Call]]) -> list[dict[str, KvAhead]]:
        """What each layer's maps fetch for later, given each layer's attention."""
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
                if isinstance(linear, PackedLinear)
            }
            for (layer, name), ahead in share_out(attention[0], packed).items():
                aheads[layer][name] = ahead
        return aheads

    def _memory_for(self, num_elements: int) -> torch.Tensor:
        """bfloat16, at least so many: programs share it, as no two run at once.

        It stays: the system clears pages that it gives anew, which would take some hundredths of
        the time of a step of 2,048 tokens.
        """
        if self._memory.numel() < num_elements:
            self._steps.clear()  # they would keep what there was before
            self._memory = torch.empty(num_elements, dtype=_DTYPE)
        return self._memory

    def _num_partials(self, inputs: NativeInputs) -> int:
        """How many numbers partial results of attention have at most, in one layer."""
        num_seqs, width = inputs.block_tables.shape
        max_len = width * self._caches[0].keys.shape[1]
        return num_partials(self._shape.num_heads, self._shape.head_dim, num_seqs, max_len)

    def _partials_for(self, names: Sequence[str], num_partials: int) -> dict[str, int]:
        """The addresses of `num_partials` float32 each; the memory stays for other steps."""
        if self._partials.numel() < len(names) * num_partials:
            self._partials = torch.empty(len(names) * num_partials, dtype=torch.float32)
        num_bytes = num_partials * self._partials.itemsize
        return {name: self._partials.data_ptr() + i * num_bytes for i, name in enumerate(names)}


def _rounded_up(count: int) -> int:
    """So that few sizes occur: to a power of two, or a multiple of a large one."""
    power = 1 << (count - 1).bit_length() if count else 0
    return power if power <= _LARGE_TOKENS else -(-count // _LARGE_TOKENS) * _LARGE_TOKENS
