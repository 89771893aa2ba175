"""Groups a step's tokens by adapter, and adds the adapters to the model's layers.

Symbols: `T` tokens of a step, `N` tokens of one adapter, `K` input features and `O` output features
of a map.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from contract.arrays import Int64Array
from gpu_worker.lora.adapted_maps import MapName
from gpu_worker.lora.adapter import Adapter, LowRankMap, with_maps
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.memory.transfer import upload
from gpu_worker.models.decoder_layer import LayerAdapters, LayerT
from gpu_worker.weights.linear import Linear
from kernels.cpu.program.low_rank import RowAdapters

NO_ADAPTERS: Final[Mapping[int, Adapter]] = MappingProxyType({})


class AdapterTable:
    """A worker's adapters, by number.

    The thread that runs the steps changes the table between two steps.

    A removed adapter is kept until no row uses it. The row of a cancelled request decodes until a
    step releases the row, so only the rows show when an adapter is unused.
    """

    def __init__(
        self,
        adapters: Mapping[int, Adapter],
        numbers_in_use: Callable[[], set[int]],
        slots: AdapterSlots | None = None,
    ) -> None:
        self._adapters: dict[int, Adapter] = {}
        self._slots = slots
        for number, adapter in adapters.items():
            self.add(number, adapter)
        self._numbers_in_use = numbers_in_use
        self._leaving: set[int] = set()

    @property
    def by_number(self) -> Mapping[int, Adapter]:
        """A live view of the adapters."""
        return self._adapters

    def add(self, number: int, adapter: Adapter) -> None:
        """Add an adapter, under a number never used before."""
        self._adapters[number] = adapter
        if self._slots is not None:
            self._slots.add(number, adapter)

    def remove(self, number: int) -> None:
        """Free an adapter as soon as no row uses it; new rows must not use it."""
        self._leaving.add(number)
        self.free_unused()

    def free_unused(self) -> None:
        """Free removed adapters that no row uses any more. Call this when rows are released."""
        if not self._leaving:  # true almost always
            return
        for number in self._leaving - self._numbers_in_use():
            self._leaving.remove(number)
            del self._adapters[number]
            if self._slots is not None:
                self._slots.remove(number)


NO_ADAPTER = 0
"""The adapter number of a row without an adapter; adapters are numbered from 1."""


@dataclass(frozen=True, slots=True, eq=False)
class _AdapterTokens:
    """The tokens that use one adapter."""

    adapter: Adapter
    places: torch.Tensor | None
    """int64[N]: the tokens' indexes in the step, ascending; None: all tokens of the step."""


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The adapters of a step's tokens. A token without an adapter gets no additions."""

    _tokens: tuple[_AdapterTokens, ...]
    native: RowAdapters | None
    """The adapters as `NativeDecoder` takes them; None if it lacks code for one of the adapters."""

    def onto(self, index: int, layer: LayerT) -> LayerT:
        """Return a copy of `layer` whose maps include the adapters' additions.

        `index` is the index of the layer in `Adapter.layers`.
        """
        return with_maps(layer, lambda name, base: self._onto(index, name, base))

    def _onto(self, index: int, name: MapName, base: Linear) -> Linear:
        added = [
            (low_rank, tokens.places)
            for tokens in self._tokens
            if (low_rank := tokens.adapter.layers[index].get(name)) is not None
        ]
        return _AdaptedLinear(base, added) if added else base


@dataclass(frozen=True, slots=True, eq=False)
class _AdaptedLinear:
    """A linear map, with additions for the tokens that use adapters."""

    base: Linear
    added: Sequence[tuple[LowRankMap, torch.Tensor | None]]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, K]` to `[T, O]`, row by row."""
        out = self.base(x)
        for low_rank, places in self.added:
            if places is None:
                out += low_rank(x)
            else:
                out.index_add_(0, places, low_rank(x.index_select(0, places)))
        return out


def step_adapters(
    numbers: Int64Array,
    adapters: Mapping[int, Adapter],
    device: torch.device,
    slots: AdapterSlots | None = None,
) -> LayerAdapters | None:
    """Group a step's tokens by adapter, without waiting for the device.

    Args:
        numbers: int64[T], each token's adapter number or `NO_ADAPTER`; empty if there are no
            adapters.
        adapters: All adapters of the worker, by number.
        device: Where the tokens are.
        slots: The adapters' slots; None on a CPU, and on a GPU whose worker started without
            adapters.

    Returns:
        None if no token has an adapter.
    """
    if not numbers.any():  # always true on a worker without adapters
        return None
    if slots is not None and slots.have(numbers):
        order, ends = upload(slots.group(numbers, len(numbers)), device)
        return slots.onto_tokens(order, ends)
    used = [number for number in np.unique(numbers).tolist() if number != NO_ADAPTER]
    native = _native(numbers, {number: adapters[number] for number in used})
    if (numbers == used[0]).all():
        return StepAdapters((_AdapterTokens(adapters[used[0]], None),), native)
    places = upload([np.flatnonzero(numbers == number) for number in used], device)
    return StepAdapters(
        tuple(
            _AdapterTokens(adapters[number], of_one)
            for number, of_one in zip(used, places, strict=True)
        ),
        native,
    )


def _native(numbers: Int64Array, used: Mapping[int, Adapter]) -> RowAdapters | None:
    native = {n: adapter.native for n, adapter in used.items() if adapter.native is not None}
    return RowAdapters(numbers, native) if len(native) == len(used) else None
