"""What the scheduler's shell speaks about, beyond what its core decides."""

from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_svc.core.compact.defragment import DefragmentationReport
from scheduler_svc.core.request import Request, SeqKey, SourceId


@dataclass(frozen=True, slots=True, eq=False)
class SubmitRequest:
    """A request that an engine is to take on."""

    request: Request
    was_accepted: bool = False
    """Whether it was live before, so that it can no longer be refused."""
    num_losses: int = 0
    """How many workers in a row were lost while they ran it, and it gained no token at them."""


@dataclass(frozen=True, slots=True)
class CancelSequences:
    """Sequences that their source wants to end early; unknown ones are ignored."""

    source: SourceId
    seq_keys: Sequence[SeqKey]


@dataclass(frozen=True, slots=True)
class DropSource:
    """A router's stream ended: all its sequences go, and nobody is told."""

    source: SourceId


@dataclass(frozen=True, slots=True, eq=False)
class DefragmentBlocks:
    """The held blocks are to be moved together; `done` is set when they are, or cannot be."""

    done: Future[DefragmentationReport]


Command: TypeAlias = SubmitRequest | CancelSequences | DropSource | DefragmentBlocks
"""What an engine is asked to do between two steps."""
