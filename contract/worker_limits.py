"""The sizes of a worker, against which the worker checks each plan.

The limits of a request's fields are in `contract/request.py` and `contract/sampling.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from contract.arrays import Int64Array
from contract.lora import LoraAdapter

STATE_WINDOW = 2
"""The window of a KV group of recurrent layers, in tokens. A token sees itself and the token before
it, because a recurrent layer needs only the state after the previous token. The state after a token
is in the block that the token's position belongs to."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunked attention, as in Llama 4: a token sees the tokens of its own chunk up to itself."""

    num_tokens: int


KvWindow: TypeAlias = int | Chunk | None
"""Which tokens a token sees. A number N: itself and the N - 1 tokens before it. A `Chunk`: the
tokens of its own chunk up to itself. None: itself and all tokens before it."""


def window_length(window: KvWindow) -> int | None:
    """Return the greatest number of tokens that a token sees; None: there is no limit."""
    return window.num_tokens if isinstance(window, Chunk) else window


_Positions = TypeVar("_Positions", int, Int64Array)


def first_seen(window: KvWindow, positions: _Positions) -> _Positions:
    """Return, for the token at each of `positions`, the first position that this token sees."""
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
    """The limit on tokens of one row, prompt and output together."""
    max_num_batched_tokens: int
    """The limit on tokens that one step computes; at least `max_num_seqs`, so that all rows can
    decode in one step."""
    num_blocks: int
    block_size: int
    """Token slots of one block."""
    vocab_size: int
    kv_windows: tuple[KvWindow, ...] = (None,)
    """The window of each KV group. A KV group is a set of layers with its own blocks; the blocks of
    all groups come from one pool."""
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    adapters: Mapping[LoraAdapter, int] = field(default_factory=dict)
    """Maps each loaded LoRA adapter to its number, as in `NewSequence.adapter`. Numbers begin at 1,
    because 0 stands for no adapter."""
    num_saturating_tokens: int | None = None
    """A step with this many prompt tokens, or more, keeps the device busy with arithmetic. None: a
    step needs `max_num_batched_tokens` prompt tokens for that."""
    min_prompt_tokens: int = 0
    """How many prompt tokens a step with decodes may have even if they make the step longer than
    the scheduler's settings allow. A low `--max-decode-slowdown` reduces this number."""

    @property
    def has_windows(self) -> bool:
        """Whether there is more than one KV group, or the only KV group has a window.

        If so, block 0 is the null block, which holds no KV.
        """
        return self.kv_windows != (None,)

    @property
    def max_blocks_per_row(self) -> int:
        """Number of blocks that a row with `max_model_len` tokens has in each KV group."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_table_len(self) -> int:
        """Number of entries in the block table of a row with `max_model_len` tokens."""
        return self.max_blocks_per_row * len(self.kv_windows)

    @property
    def min_num_blocks(self) -> int:
        """The least number of blocks that a resize may set.

        This is the number that the longest row needs, but at most `num_blocks`.
        """
        return min(self.max_table_len + self.has_windows, self.num_blocks)
