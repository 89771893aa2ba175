"""Collects a sequence's keys and values from their blocks, for the attention twins.

Symbols: `HKV` kv heads, `D` head dim, `B` blocks, `P` block size, `M` max blocks per sequence.
"""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class KvGather:
    """Reads sequences out of one layer's caches, each time into the same two buffers.

    The buffers, sized for the longest sequence, save allocating and faulting in fresh pages for
    each one: with contexts of a thousand tokens that is 40 % of a decode step's attention.
    """

    key_cache: torch.Tensor  # [B, P, HKV, D]
    value_cache: torch.Tensor  # [B, P, HKV, D]
    key_buffer: torch.Tensor  # [blocks of the longest sequence, P, HKV, D]
    value_buffer: torch.Tensor  # as key_buffer

    @classmethod
    def for_lens(
        cls, key_cache: torch.Tensor, value_cache: torch.Tensor, seq_lens: list[int]
    ) -> Self:
        """Return a reader for sequences of at most `max(seq_lens)` tokens."""
        num_blocks = -(-max(seq_lens, default=0) // key_cache.shape[1])
        shape = (num_blocks, *key_cache.shape[1:])
        return cls(key_cache, value_cache, key_cache.new_empty(shape), value_cache.new_empty(shape))

    def read(self, block_table: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first `seq_len` keys and values, each [1, HKV, seq_len, D].

        `block_table` is int32[M]. The result is valid until the next `read`.
        """
        blocks = block_table[: -(-seq_len // self.key_cache.shape[1])]
        num_blocks = blocks.shape[0]
        key = torch.index_select(self.key_cache, 0, blocks, out=self.key_buffer[:num_blocks])
        value = torch.index_select(self.value_cache, 0, blocks, out=self.value_buffer[:num_blocks])
        return _by_head(key, seq_len), _by_head(value, seq_len)


def _by_head(blocks: torch.Tensor, seq_len: int) -> torch.Tensor:
    return blocks.flatten(0, 1)[:seq_len].transpose(0, 1).unsqueeze(0)
