"""What a worker has room for; plans are checked against it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from contract.lora import LoraAdapter


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of a worker."""

    max_num_seqs: int
    """Rows."""
    max_model_len: int
    """Tokens of one row, prompt and output."""
    max_num_batched_tokens: int
    """Tokens that one step may compute; at least `max_num_seqs`."""
    num_blocks: int
    block_size: int
    """Token slots of one block."""
    vocab_size: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    adapters: Mapping[LoraAdapter, int] = field(default_factory=dict)
    """The LoRA adapters that a new row may have, and the number of each, at least 1."""
    num_saturating_tokens: int | None = None
    """Prompt tokens that keep the device busy with arithmetic; None: `max_num_batched_tokens`."""

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks of a row that has `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)
