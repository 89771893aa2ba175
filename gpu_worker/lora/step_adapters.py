"""Which adapters a step's tokens have, and the layers of the model with what these add.

Symbols: `T` tokens, `N` of one adapter, `K` input features of a map, `O` its output features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from contract.arrays import Int64Array
from gpu_worker.lora.adapter import (
    ATTENTION_OUTPUT,
    DOWN,
    GATE_UP,
    QKV,
    Adapter,
    LowRankMap,
    MapName,
)
from gpu_worker.memory.transfer import upload
from gpu_worker.models.decoder_layer import DecoderLayer, GatedMlp
from gpu_worker.step.rows import Rows
from gpu_worker.weights.linear import Linear
from kernels.cpu.program.low_rank import RowAdapters

NO_ADAPTERS: Final[Mapping[int, Adapter]] = MappingProxyType({})


class AdapterTable:
    """A worker's adapters; changed between steps, by the thread that runs them.

    A row may outlive the scheduler's knowledge of it: one that is cancelled decodes until a step
    releases it. So nobody but the table can tell when an adapter is of no more use.
    """

    def __init__(self, adapters: Mapping[int, Adapter], rows: Rows) -> None:
        self._adapters = dict(adapters)
        self._rows = rows
        self._leaving: set[int] = set()

    @property
    def by_number(self) -> Mapping[int, Adapter]:
        """Those that rows may have, as they are at each moment."""
        return self._adapters

    def add(self, number: int, adapter: Adapter) -> None:
        """Take one in, by a number that none has had."""
        self._adapters[number] = adapter

    def remove(self, number: int) -> None:
        """Let go of one as soon as no row has it; from now on no new one may."""
        self._leaving.add(number)
        self.free_unused()

    def free_unused(self) -> None:
        """Free those that go and that no row has; to be called when rows are released."""
        if not self._leaving:  # as nearly always
            return
        used = set(self._rows.adapter[self._rows.is_used].tolist())
        for number in self._leaving - used:
            self._leaving.remove(number)
            del self._adapters[number]


NO_ADAPTER = 0
"""What a row has instead of the number of an adapter: they count from 1."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """The tokens of one adapter."""

    adapter: Adapter
    places: torch.Tensor | None
    """int64[N]: among the step's tokens, ascending; None: it has them all."""


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The adapters of a step's tokens; tokens that no adapter has are the model's alone."""

    _tokens: tuple[_Tokens, ...]
    native: RowAdapters | None
    """The same for a native decoder; None: it has no code for one of them."""

    def onto(self, index: int, layer: DecoderLayer) -> DecoderLayer:
        """The layer of this index, with what the adapters add to its maps."""
        mlp = layer.feed_forward
        if isinstance(mlp, GatedMlp):
            mlp = replace(
                mlp,
                gate_up=self._onto(index, GATE_UP, mlp.gate_up),
                down=self._onto(index, DOWN, mlp.down),
            )
        return replace(
            layer,
            qkv=self._onto(index, QKV, layer.qkv),
            attention_output=self._onto(index, ATTENTION_OUTPUT, layer.attention_output),
            feed_forward=mlp,
        )

    def _onto(self, index: int, name: MapName, base: Linear) -> Linear:
        added = [
            (low_rank, tokens.places)
            for tokens in self._tokens
            if (low_rank := tokens.adapter.layers[index].get(name)) is not None
        ]
        return _AdaptedLinear(base, added) if added else base


@dataclass(frozen=True, slots=True, eq=False)
class _AdaptedLinear:
    """A linear map and what is added to some of its rows."""

    base: Linear
    added: Sequence[tuple[LowRankMap, torch.Tensor | None]]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, K]` to `[T, O]`; a row's result depends on no other row."""
        out = self.base(x)
        for low_rank, places in self.added:
            if places is None:
                out += low_rank(x)
            else:
                out.index_add_(0, places, low_rank(x.index_select(0, places)))
        return out


def step_adapters(
    numbers: Int64Array, adapters: Mapping[int, Adapter], device: torch.device
) -> StepAdapters | None:
    """Group a step's tokens by their adapters; nothing here waits for the device.

    Args:
        numbers: int64[T]: of each token the number of its adapter, or `NO_ADAPTER`; empty if there
            are none.
        adapters: all of the worker's, by their numbers.
        device: where the tokens are.

    Returns:
        None if no token has one.
    """
    if not numbers.any():  # as in every step of a worker without adapters
        return None
    used = [number for number in np.unique(numbers).tolist() if number != NO_ADAPTER]
    native = _native(numbers, {number: adapters[number] for number in used})
    if (numbers == used[0]).all():
        return StepAdapters((_Tokens(adapters[used[0]], None),), native)
    places = upload([np.flatnonzero(numbers == number) for number in used], device)
    return StepAdapters(
        tuple(
            _Tokens(adapters[number], of_one) for number, of_one in zip(used, places, strict=True)
        ),
        native,
    )


def _native(numbers: Int64Array, used: Mapping[int, Adapter]) -> RowAdapters | None:
    native = {n: adapter.native for n, adapter in used.items() if adapter.native is not None}
    return RowAdapters(numbers, native) if len(native) == len(used) else None
