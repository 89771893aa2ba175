"""The sizes of a worker; plans are checked against them.

Limits of requests are beside their fields, in `contract/request.py` and `contract/sampling.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from contract.arrays import Int64Array
from contract.lora import LoraAdapter

STATE_WINDOW = 2
"""The window of a KV group of recurrent layers: a token needs only the state after the one before.
The block that holds a token's place holds the state after it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A window that begins again at each multiple of its length: Llama 4's chunked attention."""

    num_tokens: int


KvWindow: TypeAlias = int | Chunk | None
"""How many tokens a token sees, itself included; or those of its chunk; None: all before it."""


def window_length(window: KvWindow) -> int | None:
    """The most tokens that a token sees; None: all before it."""
    return window.num_tokens if isinstance(window, Chunk) else window


_Positions = TypeVar("_Positions", int, Int64Array)


def first_seen(window: KvWindow, positions: _Positions) -> _Positions:
    """The first position that the token at each position sees."""
    if window is None:
        return positions * 0
    if isinstance(window, Chunk):
        return positions // window.num_tokens * window.num_tokens
    first = positions - window + 1
    return first * (first > 0)


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    """Number of rows."""
    max_model_len: int
    """Most tokens of one row, prompt and output together."""
    max_num_batched_tokens: int
    """Most tokens that one step may compute; at least `max_num_seqs`."""
    num_blocks: int
    block_size: int
    """Token slots of one block."""
    vocab_size: int
    kv_windows: tuple[KvWindow, ...] = (None,)
    """The KV groups, which are sets of layers: for each, what a token sees. Every group has blocks
    of its own, from the same pool."""
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    adapters: Mapping[LoraAdapter, int] = field(default_factory=dict)
    """The loaded LoRA adapters, each with the number, at least 1, that rows use for it."""
    num_saturating_tokens: int | None = None
    """Prompt tokens that keep the device busy with arithmetic; None: `max_num_batched_tokens`."""

    @property
    def has_windows(self) -> bool:
        """Whether a KV group has a window; then block 0 is the null block, which holds no KV."""
        return self.kv_windows != (None,)

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks of a row with `max_model_len` tokens, in each KV group."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_table_len(self) -> int:
        """Entries of the block table of such a row."""
        return self.max_blocks_per_row * len(self.kv_windows)

    @property
    def min_num_blocks(self) -> int:
        """Fewest blocks that a resize may set: enough for such a row, or `num_blocks` if less."""
        return min(self.max_table_len + self.has_windows, self.num_blocks)
