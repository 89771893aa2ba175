"""Divides a model's layers into KV groups; the layers of a group have the same window.

All groups allocate blocks from one pool, so a block has the same size in each. A block holds the KV
of some tokens in the layers of one group. These layers may differ in kv heads and head dim. If a
block has no room for all layers with the same window, these layers form several groups. If the
layers of a group do not fill a block, the rest of the block is unused.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from contract.worker_limits import STATE_WINDOW, Chunk, KvWindow, window_length

MAX_GROUPS: Final = 16
"""The limit on KV groups. It does not apply if the layers of a model have more kinds of windows:
then each kind is one group."""
_NUM_TOKENS: Final = 8192
"""A block size is judged by the memory that a sequence of this length takes. The length is chosen,
not measured."""
_COST_OF_A_GROUP: Final = 0.0075
"""Each further group must save this share of a sequence's memory, because a group takes time. When
64 sequences of 8,192 tokens decode, a group takes 40 us of the worker and 2 us of the scheduler in
each step, together 0.4 % of a step of 10 ms. For a prompt of 8,192 tokens, a group takes 0.6 ms of
the scheduler, which is 0.6 % of the 100 ms that the prompt takes. The times of a group are measured
on a CPU, without graphs. The 10 ms of a step and the 100 ms of a prompt are estimates for a fast
GPU."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The KV groups of a model, and the group of each layer."""

    windows: tuple[KvWindow, ...]
    """The window of each group."""
    group_of: tuple[int, ...]
    """The group of each layer; the layer's KV is in the blocks of this group."""
    num_state_groups: int = 0
    """How many groups hold states of recurrent layers; these groups are the last. Recurrent layers
    are numbered separately, and are not in `group_of`."""
    states_per_block: int = 1
    """Number of recurrent layers whose states one block holds."""

    @property
    def layers_per_block(self) -> int:
        """Number of layers in the largest group."""
        return max(map(self.group_of.count, self.group_of), default=0)


def one_group(num_layers: int, window: KvWindow = None) -> LayerGroups:
    """Put all layers in one group."""
    return LayerGroups((window,), (0,) * num_layers)


def group_layers(
    windows: tuple[KvWindow, ...], max_model_len: int, sizes: Sequence[int] = ()
) -> LayerGroups:
    """Group layers by their windows; groups without a window come first.

    Of the possible block sizes, the function chooses the one with which a sequence takes least
    memory. A group without a window takes most, because it has blocks for all tokens.

    Args:
        windows: The window of each layer.
        max_model_len: A window of at least this length counts as no window.
        sizes: For each layer, the bytes of a token's KV, or a number proportional to these bytes.
            Empty: all layers are equal.
    """
    sizes = sizes or (1,) * len(windows)
    kinds: dict[KvWindow, list[int]] = defaultdict(list)
    for layer, window in enumerate(windows):
        length = window_length(window)
        kinds[None if length is None or length >= max_model_len else window].append(layer)
    if len(kinds) == 1:
        return one_group(len(windows), *kinds)
    # The best block size is the size of some run of consecutive layers of one kind.
    fits = {
        sum(sizes[layer] for layer in layers[start:stop])
        for layers in kinds.values()
        for start in range(len(layers))
        for stop in range(start + 1, len(layers) + 1)
    }
    order = sorted(kinds.items(), key=lambda kind: _order(kind[0]))
    held = {window: min(_NUM_TOKENS, window_length(window) or max_model_len) for window in kinds}
    best: list[tuple[KvWindow, list[int]]] = []
    least = math.inf
    for fit in sorted((fit for fit in fits if fit >= max(sizes)), reverse=True):
        groups = [(window, part) for window, of in order for part in _parts(of, sizes, fit)]
        num_held = fit * sum(held[window] for window, _ in groups)
        cost = num_held * (1 + _COST_OF_A_GROUP * len(groups))
        if len(groups) <= max(MAX_GROUPS, len(kinds)) and cost < least:
            best, least = groups, cost
    group_of = [0] * len(windows)
    for group, (_, layers) in enumerate(best):
        for layer in layers:
            group_of[layer] = group
    return LayerGroups(tuple(window for window, _ in best), tuple(group_of))


def _order(window: KvWindow) -> tuple[bool, int, bool]:
    length = window_length(window)
    return length is not None, length or 0, isinstance(window, Chunk)


def _parts(layers: list[int], sizes: Sequence[int], fit: int) -> list[list[int]]:
    """Split layers into runs whose `sizes` add up to at most `fit`."""
    parts: list[list[int]] = []
    room = 0
    for layer in layers:
        if sizes[layer] > room:
            parts.append([])
            room = fit
        parts[-1].append(layer)
        room -= sizes[layer]
    return parts


def add_states(groups: LayerGroups, per_block: int, num_states: int) -> LayerGroups:
    """Return `groups` with groups of recurrent layers added; a block holds `per_block` states."""
    num_groups = -(-num_states // per_block)
    return replace(
        groups,
        windows=(*groups.windows, *[STATE_WINDOW] * num_groups),
        num_state_groups=num_groups,
        states_per_block=per_block,
    )
