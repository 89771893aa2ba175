"""The KV memory of one device: blocks, each a contiguous run of bytes for the layers of a KV group.

Symbols: `B` the largest number of blocks that the pool can grow to, `P` block size (token slots),
`HKV` kv heads, `D` head dim, `Y` bytes of a block.
"""

from dataclasses import dataclass

import torch

from gpu_worker.kv.layer_groups import LayerGroups, one_group
from gpu_worker.kv.layout import KvDtypes, Side, block_layout
from gpu_worker.memory.elastic import ElasticMemory
from gpu_worker.weights.model_config import ModelConfig
from kernels import ops
from kernels.kv_formats import SCALE_DTYPE
from kernels.ops import AttentionBackend


@dataclass(frozen=True, slots=True, eq=False)
class _Cache:
    """The keys or the values of one layer in all blocks, as views."""

    numbers: torch.Tensor
    scales: torch.Tensor | None


class KvPool:
    """Keys and values of `num_blocks` blocks, numbered [0, num_blocks).

    The memory is block-major, so that moving a block is one contiguous transfer; `layout.py`
    defines the inside of a block. The scheduler allocates the blocks; the pool does not know which
    sequences use them. `copy` and `resize` change the contents of blocks; all other changes are
    made through the views that the pool returns.

    A pool over elastic memory can be resized. Its views cover all blocks that may ever exist, so
    the views never change. Blocks from `num_blocks` on must not be read or written.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtypes: KvDtypes,
        device: torch.device,
        memory: ElasticMemory | None = None,
        groups: LayerGroups | None = None,
        attention: AttentionBackend = ops,
    ) -> None:
        """Allocate zeroed memory.

        Attention may multiply an unwritten slot by 0. If the slot held NaN, the product would be
        NaN.

        Args:
            config: The config of the model or of this rank's part.
            num_blocks: Number of blocks at first.
            block_size: Token slots of a block.
            dtypes: The dtypes in which K and V are stored.
            device: Where the memory is.
            memory: Elastic memory on `device`, with `num_blocks` blocks at first. None: the pool
                allocates its memory itself, and its size is fixed.
            groups: The KV groups of the model's layers; None: one group.
            attention: The kernels that compute attention over the blocks.
        """
        self.attention = attention
        self.groups = groups or one_group(config.num_layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.layout = block_layout(config, block_size, dtypes, self.groups)
        self.block_bytes = self.layout.block_bytes
        self._memory = memory
        if memory is None:
            self._blocks = torch.zeros(  # [B, Y]
                num_blocks, self.block_bytes, dtype=torch.uint8, device=device
            )
        else:
            max_blocks = len(memory.bytes) // self.block_bytes
            whole = memory.bytes[: max_blocks * self.block_bytes]
            self._blocks = whole.view(max_blocks, self.block_bytes)
        shapes = [(block_size, *config.kv_shape(each)) for each in range(config.num_layers)]
        self._keys = tuple(map(self._cache, self.layout.keys, shapes))
        if self.layout.values is None:
            latent = slice(config.latent_dim)
            self._values = tuple(_Cache(k.numbers[..., latent], k.scales) for k in self._keys)
        else:
            self._values = tuple(map(self._cache, self.layout.values, shapes))

    def key_cache(self, layer: int) -> torch.Tensor:
        """Return the keys of one layer, a strided view `[B, P, HKV, D]`.

        The layers of a KV group may read only the blocks of that group.
        """
        return self._keys[layer].numbers

    def value_cache(self, layer: int) -> torch.Tensor:
        """Return the values of one layer, a strided view `[B, P, HKV, D]`.

        With multi-head latent attention, they are the first `latent_dim` numbers of the keys.
        """
        return self._values[layer].numbers

    def key_scales(self, layer: int) -> torch.Tensor | None:
        """Return the scales of one layer's keys, a view `[B, P, HKV]`; None if not quantized."""
        return self._keys[layer].scales

    def value_scales(self, layer: int) -> torch.Tensor | None:
        """Return the scales of one layer's values; see `key_scales`."""
        return self._values[layer].scales

    @property
    def blocks_as_bytes(self) -> torch.Tensor:
        """All blocks as bytes, a view uint8[B, Y] for copies of whole blocks."""
        return self._blocks

    def resize(self, num_blocks: int) -> None:
        """Resize to `num_blocks` blocks, at least 1. New blocks are zero; removed ones are lost.

        Raises:
            OutOfMemoryError: There is no room. Nothing has changed.
        """
        assert self._memory is not None, "the pool's size is fixed"
        self._memory.resize(num_blocks * self.block_bytes)
        self.num_blocks = num_blocks

    def close(self) -> None:
        """Free elastic memory. Views of it must no longer be used."""
        if self._memory is not None:
            self._memory.close()

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole blocks `src` to `dst`; all reads come before all writes.

        Args:
            src: int64[N] block numbers, on the pool's device.
            dst: int64[N] distinct block numbers, parallel to `src`.
        """
        ops.copy_blocks(self._blocks, src, dst)

    def _cache(self, side: Side, shape: tuple[int, int, int]) -> _Cache:  # [P, HKV, D]
        numbers = self._blocks[:, side.numbers].view(side.dtype).view(-1, *shape)
        if side.scales is None:
            return _Cache(numbers, None)
        return _Cache(numbers, self._blocks[:, side.scales].view(SCALE_DTYPE).view(-1, *shape[:2]))
