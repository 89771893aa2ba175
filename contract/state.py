"""What a worker still holds from an earlier scheduler, in the form in which it tells the next one.

A *label* is the hash of a block's content, as the scheduler has named it.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from contract.arrays import Int32Array, Labels, no_ints, no_labels
from contract.hashing import BlockHash
from contract.step import SearchState, TokenLogprob

Pins: TypeAlias = tuple[tuple[BlockHash, float], ...]
"""Hashes of contents that the scheduler keeps in the prefix cache, and for how many seconds more;
of each prompt from its beginning."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldRow:
    """A sequence that had a row, and whose KV is good."""

    identity: bytes
    """`NewSequence.identity`."""
    token_ids: Int32Array
    """All its tokens, those included that its source does not know."""
    num_computed_tokens: int
    """How many of them have their KV in the blocks; fewer than all."""
    block_ids: Int32Array
    """Distinct; room for the computed tokens at least."""
    has_stopped: bool
    """Whether its last token ends it."""
    had_logprobs: bool
    """Whether log-probabilities came with its tokens."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Those of its last tokens, in order; those of earlier ones are not kept."""
    search: SearchState | None = None
    """How far the beam search is whose best beam it is; read from `note`. Only at the scheduler."""
    note: bytes = b""
    """`NewSequence.note`. Only at the worker."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldBlocks:
    """The labelled blocks of one tier; those whose label is oldest come first."""

    block_ids: Int32Array = field(default_factory=no_ints)
    labels: Labels = field(default_factory=no_labels)
    """Parallel to it."""

    @property
    def hashes(self) -> list[BlockHash]:
        """The labels, as the scheduler names contents."""
        return [BlockHash(label.tobytes()) for label in self.labels]


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """The sequences, the blocks of each tier whose content is known, and the pins."""

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
