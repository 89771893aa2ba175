"""The byte layout of a KV block: each layer's keys and values, and their scales if quantized.

Symbols: `P` block size (token slots), `HKV` kv heads, `D` head dim.

A block belongs to one KV group. For each layer of the group in turn, the block holds the keys, then
the values, each `[P][HKV][D]`. If the layer is quantized, the keys are followed by their scales
`[P][HKV]`, and so are the values.
In a quantized layer, each array of numbers or scales is padded to a multiple of 16 bytes, so that
the next array is aligned for any dtype and for wide reads. Blocks of all groups have the size that
the largest group needs.

With multi-head latent attention a block holds keys only. A token's key is its latent, followed by
the rotated key that all heads share. The latent is also the token's value.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

import torch

from gpu_worker.kv.layer_groups import (
    LayerGroups,
    add_states,
    group_layers,
    one_group,
)
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.model_config import ModelConfig
from kernels.kv_formats import LARGEST, SCALE_DTYPE

KvDtypes: TypeAlias = torch.dtype | tuple[torch.dtype, ...]
"""The dtype in which K and V are stored: one for all layers, or one per layer."""

_QUANTIZED: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_ALIGNMENT: Final = 16
_CHECKPOINT_BYTES: Final = 64 * 1024
"""In a model without attention, each block has one copy of the states of all recurrent layers. The
block size is chosen so that the states take at most this many bytes per token, half as many as the
KV of Llama 3 8B. The limit is chosen, not measured."""
_MAX_GROUPS_WITH_STATES: Final = 8
"""The most KV groups of a model with attention and recurrent layers, unless attention alone has as
many. With more groups, blocks could be smaller, but each further group makes steps longer. Chosen,
not measured."""
_MAX_BLOCK_SIZE: Final = 8192
"""The most token slots of a block with states of recurrent layers. The prefix cache keeps only
full blocks, so it never finds a prefix that is shorter than a block. Chosen, not measured."""


def kv_dtypes(
    kv_cache_dtype: str, skip_layers: AbstractSet[int], dtype: torch.dtype, num_layers: int
) -> tuple[torch.dtype, ...]:
    """Return the storage dtype of each layer of a model that computes in `dtype`.

    `kv_cache_dtype` is "auto", "int8" or "fp8"; the layers in `skip_layers` store `dtype`.
    """
    stored = _QUANTIZED.get(kv_cache_dtype, dtype)
    return tuple(dtype if layer in skip_layers else stored for layer in range(num_layers))


@dataclass(frozen=True, slots=True)
class Side:
    """The bytes of a block that hold the keys, or the values, of one layer."""

    dtype: torch.dtype
    numbers: slice
    """`[P][HKV][D]` of `dtype`."""
    scales: slice | None
    """`[P][HKV]` of `SCALE_DTYPE`; None: not quantized."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the keys and values of each layer are in a block."""

    keys: tuple[Side, ...]
    """The keys of each layer."""
    values: tuple[Side, ...] | None
    """The values of each layer. None: a token's value is a part of its key, as in multi-head latent
    attention, or no layer has KV."""
    num_sides: int
    """How many parts a block of the KV group with the most layers has. A part is the keys or the
    values of one layer."""
    block_bytes: int

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Storage dtype of each layer."""
        return tuple(side.dtype for side in self.keys)

    @property
    def is_quantized(self) -> bool:
        """Whether any layer is quantized."""
        return any(side.scales is not None for side in self.keys)

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype of the first layer; the dtype of recurrent states if no layer has KV."""
        return self.keys[0].dtype if self.keys else torch.float32

    @property
    def itemsize(self) -> int:
        """Bytes of a stored number; 1 if any layer is quantized, even if other layers are not."""
        return 1 if self.is_quantized else self.dtype.itemsize


def block_layout(
    config: ModelConfig, block_size: int, dtypes: KvDtypes, groups: LayerGroups | None = None
) -> BlockLayout:
    """Lay out blocks of `block_size` token slots.

    Args:
        config: The model's config, or that of this rank's part.
        block_size: Token slots of a block.
        dtypes: The storage dtypes of K and V.
        groups: The KV groups of the layers; None: one group.

    Raises:
        ValueError: `dtypes` does not have one dtype for each layer.
    """
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,) * config.num_layers
    if len(dtypes) != config.num_layers:
        raise ValueError(f"dtypes has {len(dtypes)} entries; there are {config.num_layers} layers")
    groups = groups or one_group(config.num_layers)
    keys: list[Side] = []
    values: list[Side] = []
    stored = (keys, values) if config.latent_dim is None else (keys,)
    ends = [0] * len(groups.windows)
    for layer, (group, dtype) in enumerate(zip(groups.group_of, dtypes, strict=True)):
        num_kv_heads, head_dim = config.kv_shape(layer)
        for sides in stored:
            side = _side(ends[group], block_size * num_kv_heads, head_dim, dtype)
            sides.append(side)
            end = side.numbers.stop if side.scales is None else side.scales.stop
            ends[group] = end if side.scales is None else _aligned(end)
    num_sides = len(stored) * groups.layers_per_block
    if groups.num_state_groups:
        ends.append(groups.states_per_block * config.state_bytes)
    return BlockLayout(tuple(keys), tuple(values) or None, num_sides, max(ends))


def block_bytes(
    config: ModelConfig, block_size: int, dtypes: KvDtypes, groups: LayerGroups | None = None
) -> int:
    """Return the bytes of one block of `block_size` token slots; see `block_layout`."""
    return block_layout(config, block_size, dtypes, groups).block_bytes


def group_attention(config: ModelConfig, dtypes: KvDtypes, max_model_len: int) -> LayerGroups:
    """Group the layers with attention, if any, by their windows.

    Args:
        config: The model's config.
        dtypes: The dtypes in which K and V are stored.
        max_model_len: A window of at least this length counts as no window.
    """
    if config.num_layers == 0:
        return LayerGroups((), ())
    if not config.windows:
        return one_group(config.num_layers)
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,) * config.num_layers
    sizes = [prod(config.kv_shape(each)) * dtype.itemsize for each, dtype in enumerate(dtypes)]
    return group_layers(config.windows, max_model_len, sizes)


def place_states(
    config: ModelConfig, block_size: int, dtypes: KvDtypes, groups: LayerGroups
) -> tuple[LayerGroups, int]:
    """Return `groups` with the groups of recurrent layers added, and the block size.

    If the model has attention, blocks are so large that `_MAX_GROUPS_WITH_STATES` groups hold all
    layers. Otherwise one group holds the states of all layers.

    Args:
        config: The config of a model with recurrent layers.
        block_size: The least block size; the result is a multiple of it.
        dtypes: The dtypes in which K and V are stored.
        groups: The groups of layers with attention; empty if there are none.

    Raises:
        ModelError: Blocks would be too large.
    """
    num_states, state_bytes = config.num_states, config.state_bytes
    if config.num_layers == 0:
        num_tokens = min(-(-num_states * state_bytes // _CHECKPOINT_BYTES), _MAX_BLOCK_SIZE)
        size = block_size * -(-num_tokens // block_size)
        return add_states(groups, num_states, num_states), size
    per_block = -(-num_states // max(1, _MAX_GROUPS_WITH_STATES - len(groups.windows)))
    least = block_bytes(config, block_size, dtypes, groups)
    size = block_size * -(-per_block * state_bytes // least)
    if size > _MAX_BLOCK_SIZE:
        raise ModelError(
            f"the state of a recurrent layer has {state_bytes} bytes, and a block would need"
            f" {size} tokens to hold as much; at most {_MAX_BLOCK_SIZE} are supported"
        )
    per_block = block_bytes(config, size, dtypes, groups) // state_bytes
    return add_states(groups, min(per_block, num_states), num_states), size


def _side(start: int, num_scales: int, head_dim: int, dtype: torch.dtype) -> Side:
    numbers = slice(start, start + num_scales * head_dim * dtype.itemsize)
    if dtype not in LARGEST:
        return Side(dtype, numbers, None)
    first_scale = _aligned(numbers.stop)
    return Side(dtype, numbers, slice(first_scale, first_scale + num_scales * SCALE_DTYPE.itemsize))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
