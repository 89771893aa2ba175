"""A worker's report to a new scheduler: what the worker still holds for an earlier scheduler.

A *label* is the hash of a block's content, as the scheduler computed it.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from contract.arrays import Int32Array, Labels, no_ints, no_labels
from contract.hashing import BlockHash
from contract.step import SearchState, StepLogprob

Pins: TypeAlias = tuple[tuple[BlockHash, float], ...]
"""Pinned blocks: each block's hash, and for how many more seconds it stays in the prefix cache.
Blocks of one prompt are in the prompt's order."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldRow:
    """A sequence that had a row and whose KV is valid."""

    identity: bytes
    """As in `NewSequence`."""
    token_ids: Int32Array
    """All tokens of the sequence, including tokens that no router has received yet."""
    num_computed_tokens: int
    """How many of `token_ids` have their KV in `block_ids`; fewer than `len(token_ids)`."""
    block_ids: Int32Array
    """The block table. The blocks are distinct, and have room for at least the computed tokens. In
    a KV group with a window, the entry of a block whose tokens have all left the window is 0."""
    has_stopped: bool
    """Whether the last token ends the sequence."""
    had_logprobs: bool
    """Whether the sequence's request asked for log-probabilities."""
    logprobs: tuple[StepLogprob, ...] = ()
    """The log-probabilities of the sequence's last tokens, in order; the worker drops older ones.
    """
    search: SearchState | None = None
    """If the sequence is the best beam of a search: the state of that search, parsed from `note`.
    Set only at the scheduler."""
    note: bytes = b""
    """As in `NewSequence`. Set only at the worker."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldBlocks:
    """The labelled blocks of one tier, from the oldest label to the newest."""

    block_ids: Int32Array = field(default_factory=no_ints)
    labels: Labels = field(default_factory=no_labels)
    """Parallel to `block_ids`."""

    @property
    def hashes(self) -> list[BlockHash]:
        """The labels as hashes."""
        return [BlockHash(label.tobytes()) for label in self.labels]


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """Everything that a worker holds: sequences, labelled blocks of each tier, and pins."""

    rows: tuple[HeldRow, ...] = ()
    device: HeldBlocks = field(default_factory=HeldBlocks)
    host: HeldBlocks = field(default_factory=HeldBlocks)
    disk: HeldBlocks = field(default_factory=HeldBlocks)
    pins: Pins = ()

    @property
    def is_anything(self) -> bool:
        """Whether there is a sequence or a labelled block."""
        tiers = (self.device, self.host, self.disk)
        return bool(self.rows) or any(tier.block_ids.size for tier in tiers)
