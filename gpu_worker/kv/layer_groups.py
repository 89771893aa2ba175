"""Divides a model's layers into KV groups: layers with the same window, equally many in each group.

All groups allocate blocks from one pool, so a block has the same size in each: it holds the KV of
as many layers as a group has. If the layers of a kind do not fill their last group, its blocks
have room to spare.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Final

from contract.limits import STATE_WINDOW

MAX_GROUPS: Final = 8
"""More groups waste less memory, but each costs the scheduler time. Chosen, not measured."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Where the KV of each layer is."""

    windows: tuple[int | None, ...]
    """By group: tokens that a token sees, itself included; None: all."""
    group_of: tuple[int, ...]
    """By layer: its group, which says in which blocks its KV is."""
    place_of: tuple[int, ...]
    """By layer: its place in the blocks of its group."""
    num_state_groups: int = 0
    """The last so many groups hold the states of recurrent layers, which are numbered apart."""
    states_per_block: int = 1
    """Recurrent layers whose states a block holds."""

    @property
    def layers_per_block(self) -> int:
        return max(self.place_of, default=-1) + 1


def one_group(num_layers: int, window: int | None = None) -> LayerGroups:
    """All layers in one group."""
    return LayerGroups((window,), (0,) * num_layers, tuple(range(num_layers)))


def group_layers(windows: tuple[int | None, ...], max_model_len: int) -> LayerGroups:
    """Group layers by their windows; groups without a window come first.

    The size of a group is the one that wastes least memory with at most `MAX_GROUPS` groups.

    Args:
        windows: By layer: tokens that a token sees, itself included; None: all.
        max_model_len: A window at least as long counts as none.
    """
    kinds: dict[int | None, list[int]] = defaultdict(list)
    for layer, window in enumerate(windows):
        kinds[None if window is None or window >= max_model_len else window].append(layer)
    if len(kinds) == 1:
        return one_group(len(windows), *kinds)
    sizes = range(max(map(len, kinds.values())), 0, -1)
    counts = {size: sum(-(-len(layers) // size) for layers in kinds.values()) for size in sizes}
    allowed = [size for size in sizes if counts[size] <= max(MAX_GROUPS, len(kinds))]
    size = min(allowed, key=lambda each: counts[each] * each)
    group_of, place_of = [0] * len(windows), [0] * len(windows)
    of_groups: list[int | None] = []
    for window, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0])):
        for index, layer in enumerate(layers):
            if index % size == 0:
                of_groups.append(window)
            group_of[layer], place_of[layer] = len(of_groups) - 1, index % size
    return LayerGroups(tuple(of_groups), tuple(group_of), tuple(place_of))


def fitting_block_size(
    block_size: int, block_bytes: int, state_bytes: int, num_states: int, num_groups: int
) -> int:
    """Return the least multiple of `block_size` with which `MAX_GROUPS` groups hold all states.

    Args:
        block_size: Token slots of a block.
        block_bytes: Bytes of such a block.
        state_bytes: The state of one recurrent layer.
        num_states: Recurrent layers.
        num_groups: The groups of attention.
    """
    per_block = -(-num_states // max(1, MAX_GROUPS - num_groups))
    return block_size * -(-per_block * state_bytes // block_bytes)


def add_states(groups: LayerGroups, per_block: int, num_states: int) -> LayerGroups:
    """Add the groups of recurrent layers, with the states of `per_block` layers in a block."""
    num_groups = -(-num_states // per_block)
    return replace(
        groups,
        windows=(*groups.windows, *[STATE_WINDOW] * num_groups),
        num_state_groups=num_groups,
        states_per_block=per_block,
    )
