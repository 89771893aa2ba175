"""Keeps adapters in slots, where kernels find them, so that one graph works with any adapters.

Symbols: `T` tokens, `K` input features of a map, `N` its output features, `R` the limit on the rank
of an adapter in a map (`MAX_RANKS`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch

from contract.arrays import Int32Array, Int64Array
from gpu_worker.lora.adapted_maps import AdaptableConfig, AdaptedMap, MapName, adapted_maps
from gpu_worker.lora.adapter import Adapter, LowRankMap, with_maps
from gpu_worker.memory.transfer import upload
from gpu_worker.models.decoder_layer import LayerT
from gpu_worker.ranks.shards import ALONE, Place
from gpu_worker.weights.linear import Linear, PlainLinear
from kernels import ops
from kernels.grouped_maps import GroupedMaps
from kernels.triton.linear.tile_sizes import fewest_rows

NUM_SLOTS: Final = 64
"""Each slot holds one adapter. A step with an adapter that has no slot runs without graphs."""
MAX_RANKS: Final = 192
"""R: 3 * 64, because q, k and v are one fused map, and an adapter may have rank 64 in each; in the
fused map these ranks add up. An adapter whose rank in some map is above R gets no slot."""


@dataclass(frozen=True, slots=True, eq=False)
class SlottedMap:
    """The A and B of each slot's adapter, for one map of a layer."""

    down: GroupedMaps
    """Every A: from the map's inputs to R."""
    up: GroupedMaps
    """Every B: from R to the map's outputs."""

    def add_to(
        self, out: torch.Tensor, x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor
    ) -> None:
        """Add B A x to `out`, the map's result. `AdapterSlots.group` makes `order` and `ends`."""
        num_rows = len(order)
        ranks = ops.grouped_linear(x, self.down, ends, order, None, num_rows, None)  # [T, R]
        ops.grouped_linear(ranks, self.up, ends, None, order, num_rows, out)


_Maps: TypeAlias = tuple[Mapping[MapName, SlottedMap], ...]
"""The maps of each layer, by name."""


class AdapterSlots:
    """The slots of a worker.

    Only the thread that runs the steps may change the slots, and only between two steps.
    """

    def __init__(self, config: AdaptableConfig, device: torch.device, place: Place = ALONE) -> None:
        """Make empty slots for this rank's layers. `config` is that of the whole model."""
        self._device = device
        self._slot_of: dict[int, int] = {}
        layers = place.layers(config.num_layers)
        by_layer = [tuple(adapted_maps(config, layer, place)) for layer in layers]
        num_weights = 2 * sum(map(len, by_layer))
        self._addresses = torch.zeros(num_weights, NUM_SLOTS, dtype=torch.int64, device=device)
        self._sizes = torch.zeros(num_weights, NUM_SLOTS, dtype=torch.int32, device=device)
        tables = iter(zip(self._addresses, self._sizes, strict=True))

        def halves(of: AdaptedMap) -> SlottedMap:
            num_in, num_out = len(of.inputs), of.num_local_out
            nothing: list[torch.Tensor | None] = [None] * NUM_SLOTS
            down = GroupedMaps(num_in, MAX_RANKS, nothing, *next(tables))
            up = GroupedMaps(MAX_RANKS, num_out, nothing.copy(), *next(tables), is_by_input=True)
            return SlottedMap(down, up)

        self._maps: _Maps = tuple({of.name: halves(of) for of in maps} for maps in by_layer)

    def add(self, number: int, adapter: Adapter) -> None:
        """Give an adapter a slot, if one is free and the adapter can be in a slot.

        An adapter can be in a slot if each A and B is a `PlainLinear`, and the adapter's rank is at
        most R in every map of the whole model. All devices of a model decide alike. They must,
        because a step with the adapter replays a graph on all devices or on none.
        """
        free = set(range(NUM_SLOTS)) - set(self._slot_of.values())
        if (
            free
            and adapter.max_ranks <= MAX_RANKS
            and all(_fits(each) for maps in adapter.layers for each in maps.values())
        ):
            self._slot_of[number] = slot = min(free)
            self._put(slot, adapter)

    def remove(self, number: int) -> None:
        """Free an adapter's slot, if it has one. No later step may have rows with the adapter."""
        slot = self._slot_of.pop(number, None)
        if slot is not None:
            self._put(slot, None)

    def have(self, numbers: Int64Array) -> bool:
        """Whether all adapters with these numbers have slots. The number 0 means no adapter."""
        return set(numbers.tolist()) - {0} <= self._slot_of.keys()

    def group(self, numbers: Int64Array, size: int) -> tuple[Int64Array, Int32Array]:
        """Order tokens by slot; tokens without an adapter come last.

        Args:
            numbers: For each token, the number of its adapter; 0: none. `have(numbers)` must be
                true. If `numbers` is shorter than `size`, the remaining tokens have no adapter.
            size: T, the number of tokens.

        Returns:
            int64[T], the tokens' indexes in the order of their slots; and int32[NUM_SLOTS], where
            each slot's tokens end in that order.
        """
        slots = np.full(size, NUM_SLOTS)
        for number in set(numbers.tolist()) - {0}:
            slots[: len(numbers)][numbers == number] = self._slot_of[number]
        counts = np.bincount(slots, minlength=NUM_SLOTS)[:NUM_SLOTS]
        return slots.argsort(kind="stable"), counts.cumsum().astype(np.int32)

    def onto_tokens(self, order: torch.Tensor, ends: torch.Tensor) -> "SlottedAdapters":
        """Return the adapters of a step's tokens, which `group` has ordered by slot.

        `order` and `ends` are what `group` has returned, copied to the device.
        """
        return SlottedAdapters(self._maps, order, ends)

    def compile(self, dtype: torch.dtype) -> None:
        """Launch each variant of `grouped_linear` once, so that none is compiled while serving."""
        ends = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=self._device)
        # Layers with experts have fewer maps than those without.
        all_maps = {name: each for maps in self._maps for name, each in maps.items()}
        for num_rows in fewest_rows(NUM_SLOTS):
            order = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
            for each in all_maps.values():
                x = torch.zeros(1, each.down.num_in, dtype=dtype, device=self._device)
                out = torch.zeros(1, each.up.num_out, dtype=dtype, device=self._device)
                each.add_to(out, x, order, ends)

    def _put(self, slot: int, adapter: Adapter | None) -> None:
        """Fill a slot, or empty it. The change takes effect after all steps launched so far."""
        weights: list[torch.Tensor | None] = []
        for layer, maps in enumerate(self._maps):
            for name, each in maps.items():
                low_rank = None if adapter is None else adapter.layers[layer].get(name)
                pair = _pair(low_rank)
                each.down.weights[slot], each.up.weights[slot] = pair
                weights += pair
        addresses = [0 if weight is None else weight.data_ptr() for weight in weights]
        sizes = [0 if weight is None else len(weight) for weight in weights]
        on_device = upload([np.array(addresses), np.array(sizes, np.int32)], self._device)
        for table, values in zip((self._addresses, self._sizes), on_device, strict=True):
            table[:, slot].copy_(values)


@dataclass(frozen=True, slots=True, eq=False)
class SlottedAdapters:
    """The adapters of the tokens of a step or of a graph."""

    _maps: _Maps
    _order: torch.Tensor
    """int64[T]: indexes of the tokens, in the order of their slots."""
    _ends: torch.Tensor
    """int32[NUM_SLOTS]: where each slot's tokens end in `_order`."""

    @property
    def native(self) -> None:
        """None: `NativeDecoder` has no code for adapters in slots."""

    def onto(self, index: int, layer: LayerT) -> LayerT:
        """Return a copy of `layer`, the layer at `index`, with the adapters added to its maps."""
        maps = self._maps[index]

        def adapted(name: MapName, base: Linear) -> Linear:
            def apply(x: torch.Tensor) -> torch.Tensor:
                out = base(x)
                maps[name].add_to(out, x, self._order, self._ends)
                return out

            return apply

        return with_maps(layer, adapted)


def _fits(low_rank: LowRankMap) -> bool:
    is_plain = isinstance(low_rank.down, PlainLinear) and isinstance(low_rank.up, PlainLinear)
    return is_plain and low_rank.num_ranks <= MAX_RANKS


def _pair(low_rank: LowRankMap | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A as `[ranks, K]`, and B, transposed, as `[ranks, N]`."""
    if low_rank is None:
        return None, None
    down, up = low_rank.down, low_rank.up
    assert isinstance(down, PlainLinear), "it fits"
    assert isinstance(up, PlainLinear), "it fits"
    return down.weight.contiguous(), up.weight.t().contiguous()
