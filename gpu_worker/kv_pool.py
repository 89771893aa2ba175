"""The KV memory of one device: blocks, each one contiguous run of bytes over all layers.

Symbols: `B` blocks, `L` layers, `P` block size (token slots), `HKV` kv heads, `D` head dim.
"""

import torch

from gpu_worker.model_config import ModelConfig
from kernels import ops


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """The size of one block over all layers, in bytes, for `block_size` token slots."""
    return _block_elems(config, block_size) * dtype.itemsize


class KvPool:
    """Key and value memory of `num_blocks` blocks; block numbers are [0, num_blocks).

    Block-major, so that moving a block is one contiguous transfer: a block holds
    `[layer][k|v][block_size][num_kv_heads][head_dim]`. The pool gives out no block and knows no
    owner; whoever writes obeys the scheduler's block numbers. It changes by `store_kv` through the
    views and by `copy`.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate it zeroed: an unwritten slot may be read and multiplied by 0."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.block_bytes = block_bytes(config, block_size, dtype)
        self._blocks = torch.zeros(  # [B, L * 2 * P * HKV * D]
            num_blocks, _block_elems(config, block_size), dtype=dtype, device=device
        )
        layers = self._blocks.view(
            num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim
        )
        self._key_caches = tuple(layers[:, layer, 0] for layer in range(config.num_layers))
        self._value_caches = tuple(layers[:, layer, 1] for layer in range(config.num_layers))

    def key_cache(self, layer: int) -> torch.Tensor:
        """The keys of one layer: a strided view `[B, P, HKV, D]`."""
        return self._key_caches[layer]

    def value_cache(self, layer: int) -> torch.Tensor:
        """The values of one layer: a strided view `[B, P, HKV, D]`."""
        return self._value_caches[layer]

    @property
    def blocks_as_bytes(self) -> torch.Tensor:
        """All blocks, as moving them sees them: a view uint8[B, block_bytes]."""
        return self._blocks.view(torch.uint8)

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole blocks `src` to `dst`, as if every read came before every write.

        Args:
            src: int64[N] block numbers, on the pool's device.
            dst: int64[N] block numbers, parallel to `src`, each at most once.
        """
        ops.copy_blocks(self._blocks, src, dst)


def _block_elems(config: ModelConfig, block_size: int) -> int:
    return config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim
