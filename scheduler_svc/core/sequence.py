"""One token stream with its own block table, and the states it goes through."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from contract.hashing import BlockHash
from contract.step import StepId
from scheduler_svc.core.blocks import DeviceBlockId, DiskBlockId, HostBlockId
from scheduler_svc.core.errors import BrokenInvariantError
from scheduler_svc.core.policies.policy import Key, Rank
from scheduler_svc.core.request import Request, SeqId, SeqKey

if TYPE_CHECKING:  # it is made of sequences
    from scheduler_svc.core.beams.group import BeamGroup


class SeqStatus(Enum):
    """The states of a sequence."""

    WAITING = "waiting"
    """In the queue; holds no row, no device block, and no KV of its own."""
    SWAPPED = "swapped"
    """In the queue, preempted; its computed tokens' KV is in host and disk blocks; holds no row."""
    FETCHING = "fetching"
    """Waits for loads from the disk, to go back to the queue as WAITING or as SWAPPED."""
    SIBLING = "sibling"
    """Waits for the sequence that computes its request's prompt, to fork from it."""
    SPARE = "spare"
    """Not a beam of its request's search now, but may become one; holds nothing."""
    PREFILL = "prefill"
    """Running: holds a row and blocks for all its known tokens, computes them chunk by chunk."""
    DECODE = "decode"
    """Running: gains a token in every step, and accepted drafts. A beam gains none here: when all
    beams of a search have been computed, the search picks which continue."""
    MIGRATING = "migrating"
    """On its way to another core, KV in host blocks or none; in no queue, holds no row."""
    FINISHED = "finished"
    """Ended; what it held is free as soon as no step in flight can touch it."""


TRANSITIONS: dict[SeqStatus, frozenset[SeqStatus]] = {
    SeqStatus.WAITING: frozenset(
        {
            SeqStatus.PREFILL,
            SeqStatus.SIBLING,
            SeqStatus.SPARE,
            SeqStatus.FETCHING,
            SeqStatus.SWAPPED,  # it comes with KV: from another core, or from the scheduler before
            SeqStatus.MIGRATING,
            SeqStatus.FINISHED,
        }
    ),
    SeqStatus.SIBLING: frozenset({SeqStatus.WAITING, SeqStatus.PREFILL, SeqStatus.FINISHED}),
    SeqStatus.SPARE: frozenset({SeqStatus.WAITING, SeqStatus.PREFILL, SeqStatus.FINISHED}),
    SeqStatus.SWAPPED: frozenset(
        {
            SeqStatus.PREFILL,
            SeqStatus.FETCHING,
            SeqStatus.WAITING,  # its KV is lost, or given up for another's
            SeqStatus.MIGRATING,
            SeqStatus.FINISHED,
        }
    ),
    SeqStatus.FETCHING: frozenset({SeqStatus.WAITING, SeqStatus.SWAPPED, SeqStatus.FINISHED}),
    SeqStatus.PREFILL: frozenset(
        {
            SeqStatus.DECODE,
            SeqStatus.WAITING,  # preempted, its KV dropped
            SeqStatus.SWAPPED,  # preempted, its KV kept
            SeqStatus.SPARE,
            SeqStatus.FINISHED,
        }
    ),
    SeqStatus.DECODE: frozenset(
        {
            SeqStatus.PREFILL,  # a beam's next step
            SeqStatus.WAITING,
            SeqStatus.SWAPPED,
            SeqStatus.SPARE,
            SeqStatus.FINISHED,
        }
    ),
    SeqStatus.MIGRATING: frozenset({SeqStatus.WAITING, SeqStatus.SWAPPED, SeqStatus.FINISHED}),
    SeqStatus.FINISHED: frozenset(),
}
"""The transitions that the core makes, and no other: `tests/property` compares."""

QUEUED = frozenset({SeqStatus.WAITING, SeqStatus.SWAPPED})
"""The states in which a sequence is in the queue."""

RUNNING = frozenset({SeqStatus.PREFILL, SeqStatus.DECODE})
"""The states in which a sequence holds a row and device blocks."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence. Only parts of the core change it."""

    seq_id: SeqId
    request: Request
    output_index: int
    arrived: float
    """When its request was submitted, in the caller's seconds."""
    rank: Rank
    """Its place in the policy's order."""
    token_ids: npt.NDArray[np.int32]
    """Its known tokens, while it does not run. A running one's are in its row (`Rows`)."""
    max_total_tokens: int
    """The length at which it ends."""
    status: SeqStatus = SeqStatus.WAITING
    was_admitted: bool = False
    """Whether it has left the queue at least once, and its source was told."""
    row: int | None = None
    block_ids: list[DeviceBlockId] = field(default_factory=list)
    """Its block table. While the sequence runs, blocks are only appended to the table, except that
    the defragmenter may replace some."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of its first full blocks, as far as they were needed; empty without prefix cache."""
    num_published_blocks: int = 0
    """How many of its first blocks have been published, or were found."""
    num_computed_tokens: int = 0
    """In PREFILL: tokens whose KV is valid once the steps scheduled so far are done. With KV on the
    host or disk: tokens that are there. In WAITING: those it had computed when it was preempted, or
    was live elsewhere."""
    num_cached_tokens: int = 0
    """Tokens of its prompt that it found in the prefix cache when it was first admitted."""
    num_charged_tokens: int = 0
    """First tokens of its prompt that the policy has charged; kept through preemption."""
    announced: bool = False
    """Whether the worker has been sent it since it got its row."""
    copy_from: DeviceBlockId | None = None
    """Until it is announced: the block of which its last block starts as a copy. The sequence holds
    a reference to it."""
    host_block_ids: tuple[HostBlockId, ...] = ()
    """Where its computed tokens' KV is on the host, or will be when its loads have ended: from its
    swap-out until its swap-in is known to have succeeded."""
    disk_block_ids: tuple[DiskBlockId, ...] = ()
    """In SWAPPED: where the rest of it is, past `host_block_ids`. In FETCHING: its copies there."""
    fetched_block_ids: tuple[HostBlockId, ...] = ()
    """In FETCHING and WAITING: blocks of the host's prefix cache that it will find when its turn
    comes; some were loaded for it. In no particular order. Another sequence that needs the room may
    take them."""
    loading_block_ids: tuple[DeviceBlockId, ...] = ()
    """Blocks with its KV that are still being swapped in, as far as is known. Until then nothing of
    its own is published."""
    last_step: StepId | None = None
    """In DECODE: the step that samples its last token, unless a stop token comes first. None: this
    cannot be known, because it depends on the drafts."""
    siblings: list["Sequence"] = field(default_factory=list)
    """Sequences of its request that fork from it when its prompt is computed."""
    group: "BeamGroup | None" = None
    """The search that it may be a beam of."""

    @property
    def seq_key(self) -> SeqKey:
        """Its name at its source."""
        return SeqKey(self.request.first_seq_key + self.output_index)

    @property
    def outputs(self) -> "tuple[Sequence, ...]":
        """The sequences that end with it: itself, or those that bear its search's outputs."""
        return (self,) if self.group is None else self.group.outputs

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens_left(self) -> int:
        """In PREFILL: known tokens to compute."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def traceparent(self) -> str:
        """Its request's. Not of a beam's steps: to the worker each is a sequence, with spans."""
        is_one_step = self.group is not None and len(self.token_ids) > self.num_prompt_tokens
        return "" if is_one_step else self.request.traceparent

    @property
    def order(self) -> tuple[Key, Key, SeqId]:
        """Its order without regard to accounts: smaller goes first. Kept through preemption."""
        return (self.rank.level, self.rank.key, self.seq_id)

    def move(self, status: SeqStatus) -> None:
        """Change the status.

        Raises:
            BrokenInvariantError: The life of a sequence has no such transition.
        """
        if status not in TRANSITIONS[self.status]:
            raise BrokenInvariantError(f"sequence {self.seq_id}: {self.status} to {status}")
        self.status = status
