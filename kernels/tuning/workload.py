"""Makes random paged inputs for attention in the worker's layout, for measurements.

Symbols: `S` sequences, `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim, `B` blocks,
`P` block size, `M` max blocks per sequence, `L` layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

from kernels.kv_formats import SCALE_DTYPE

_NUM_LAYERS: Final = 4  # several, so that a layer's blocks lie apart; few, so that they fit
_LAYER: Final = 1
_LARGEST_BYTE: Final = 0x70  # of e4m3: finite


class PoolLayout(Enum):
    """Which dimension of a KV pool is the outermost one: block or layer."""

    BLOCK_MAJOR = "block"
    LAYER_MAJOR = "layer"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The properties of a model on which the speed of attention depends."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    stored: torch.dtype | None = None
    """The dtype of a quantized cache; None: not quantized."""

    def slot_bytes(self) -> int:
        """Return how many bytes one token's KV has in one layer, scales included."""
        if self.stored is None:
            return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return 2 * self.num_kv_heads * (self.head_dim + SCALE_DTYPE.itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class PagedInputs:
    """Arguments for an attention kernel: one layer of a KV pool, and sequences' block tables."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None

    @property
    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments that follow the query in a call that launches the kernel."""
        return self.key_cache, self.value_cache, self.block_tables, self.seq_lens


def paged_inputs(
    model: ModelSizes,
    seq_lens: Sequence[int],
    device: torch.device,
    layout: PoolLayout = PoolLayout.BLOCK_MAJOR,
    num_layers: int = _NUM_LAYERS,
) -> PagedInputs:
    """Return inputs for sequences of these lengths; the blocks are shuffled, and none is shared.

    The caches are one layer of a pool that has memory for `num_layers` layers; the other layers are
    not written.
    """
    counts = [-(-seq_len // model.block_size) for seq_len in seq_lens]
    num_blocks = max(1, sum(counts))
    order = torch.randperm(num_blocks, dtype=torch.int32)
    tables = torch.zeros(len(counts), max(1, *counts), dtype=torch.int32)
    start = 0
    for seq, count in enumerate(counts):
        tables[seq, :count] = order[start : start + count]
        start += count
    slots = num_blocks, model.block_size, model.num_kv_heads
    numbers = _pool(
        (*slots, model.head_dim), model.stored or model.dtype, device, layout, num_layers
    )
    scales = None
    if model.stored is not None:
        scales = _pool(slots, SCALE_DTYPE, device, layout, num_layers)[_LAYER].mul_(0.01)
    return PagedInputs(
        key_cache=numbers[_LAYER, 0],
        value_cache=numbers[_LAYER, 1],
        block_tables=tables.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        key_scales=None if scales is None else scales[0],
        value_scales=None if scales is None else scales[1],
    )


def queries(model: ModelSizes, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return random queries [T, H, D]."""
    shape = num_tokens, model.num_heads, model.head_dim
    return torch.randn(shape, device=device).to(model.dtype)


def _pool(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    layout: PoolLayout,
    num_layers: int,
) -> torch.Tensor:
    """Return a pool as a view [L, 2, B, ...], with random numbers in one layer."""
    num_blocks, *rest = shape
    if layout is PoolLayout.BLOCK_MAJOR:
        whole = torch.empty(num_blocks, num_layers, 2, *rest, dtype=dtype, device=device)
        view = whole.permute(1, 2, 0, *range(3, whole.dim()))
    else:
        view = torch.empty(num_layers, 2, num_blocks, *rest, dtype=dtype, device=device)
    layer = view[_LAYER]  # only this layer is read
    if dtype.itemsize == 1:
        layer.view(torch.uint8).random_(0, _LARGEST_BYTE)
    else:
        layer.normal_()
    return view
