"""A sequence (one stream of tokens with its own block table), and the states of sequences."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from contract.hashing import BlockHash
from contract.step import StepId
from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.interface.request import Request, SeqId, SeqKey
from scheduler_svc.core.policies.policy import Key, Rank
from scheduler_svc.core.space.blocks import DeviceBlockId, DiskBlockId, HostBlockId

if TYPE_CHECKING:  # `BeamGroup` imports this module
    from scheduler_svc.core.beams.group import BeamGroup


class SeqStatus(Enum):
    """The states of a sequence."""

    WAITING = "waiting"
    """In the queue, without a row, device blocks or KV of its own."""
    SWAPPED = "swapped"
    """In the queue, without a row; its KV is in host and disk blocks, mostly after a preemption."""
    FETCHING = "fetching"
    """Waits for loads from the disk; then it is queued as WAITING or SWAPPED."""
    SIBLING = "sibling"
    """Waits to fork from the sequence that computes the request's prompt."""
    SPARE = "spare"
    """Belongs to a search, but is no beam now; it holds no blocks."""
    PREFILL = "prefill"
    """Running: has a row, and computes its known tokens chunk by chunk. It has blocks for all known
    tokens, except in KV groups with a window: there it has blocks only for the tokens that the
    window still sees and for the next chunk."""
    DECODE = "decode"
    """Running: every step adds a token, and any draft tokens that are accepted. A beam gains no
    token in this state: it waits until the search chooses the next beams."""
    MIGRATING = "migrating"
    """Moving to another core, with its KV in host blocks or without KV; not in the queue."""
    FINISHED = "finished"
    """Ended; its blocks become free when no step in flight can touch them."""


TRANSITIONS: dict[SeqStatus, frozenset[SeqStatus]] = {
    SeqStatus.WAITING: frozenset(
        {
            SeqStatus.PREFILL,
            SeqStatus.SIBLING,
            SeqStatus.SPARE,
            SeqStatus.FETCHING,
            SeqStatus.SWAPPED,  # arrives with KV from another core or an earlier scheduler
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
            SeqStatus.WAITING,  # its KV was lost, or dropped to make room
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
"""All transitions that the core makes. `tests/property` checks that each of them occurs."""

QUEUED = frozenset({SeqStatus.WAITING, SeqStatus.SWAPPED})
"""The states in which a sequence is in the queue."""

RUNNING = frozenset({SeqStatus.PREFILL, SeqStatus.DECODE})
"""The states in which a sequence holds a row and device blocks."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence with all its data. Only code of the core changes the data."""

    seq_id: SeqId
    request: Request
    output_index: int
    arrived: float
    """When the request was submitted, in seconds by the clock of the core's caller."""
    rank: Rank
    token_ids: npt.NDArray[np.int32]
    """The tokens known when the sequence last started or stopped. While it runs, `Rows` has the
    current tokens."""
    max_total_tokens: int
    """The length of prompt and output together at which the sequence ends."""
    status: SeqStatus = SeqStatus.WAITING
    was_admitted: bool = False
    """Whether the sequence has started before. When it first starts, its source gets an `Admitted`
    event."""
    row: int | None = None
    block_ids: list[DeviceBlockId] = field(default_factory=list)
    """The block table, with an entry per KV group for every `block_size` tokens; see `KvGroups`.
    While the sequence runs, entries are added at the end and none is removed. But the block of an
    entry may change: the defragmenter moves blocks, and in a KV group with a window, an entry has a
    block only while the window needs it."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the tokens of full blocks, from the first block on, computed when needed; empty
    without a prefix cache."""
    num_published_blocks: int = 0
    """Number of block indices whose blocks were published, or found in the prefix cache."""
    num_computed_tokens: int = 0
    """In PREFILL: tokens with valid KV after the steps scheduled so far. In DECODE: out of date;
    see `RunningSet.num_computed_tokens`. In states that keep KV on the host or the disk, such as
    SWAPPED: tokens whose KV is there. In WAITING: tokens that were computed before a preemption or
    a move from another core."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the sequence was first admitted."""
    num_charged_tokens: int = 0
    """How many of the prompt's tokens, from the first on, will not be charged to the request's
    account (`Policy.charge`), because they have been charged or were found in the prefix cache. A
    sequence that computes them again after a preemption is not charged again."""
    announced: bool = False
    """Whether a plan has announced the sequence to the worker, with a `NewSequence`. A sequence
    that starts again is announced again. A beam is announced in each of its steps."""
    copy_from: tuple[DeviceBlockId, ...] = ()
    """For each KV group, a block that the sequence shares and so must not write to. The worker
    copies it to the sequence's last block of the same group. Empty if no block must be copied, or
    if the sequence has been announced. The sequence holds a reference to each shared block."""
    host_block_ids: tuple[HostBlockId, ...] = ()
    """Host blocks with the sequence's KV, in the order of `KvGroups.kept`. In FETCHING, some are
    still being loaded. The sequence holds these blocks from its swap-out until a result confirms
    its swap-in."""
    disk_block_ids: tuple[DiskBlockId, ...] = ()
    """In SWAPPED: disk blocks with the KV that follows `host_block_ids`. In FETCHING: the disk
    copies of blocks that are being loaded."""
    fetched_block_ids: tuple[HostBlockId, ...] = ()
    """In FETCHING and WAITING: host blocks with KV of the sequence's prefix, in no particular
    order. Some of them are loaded from the disk. The sequence holds the blocks so that they stay in
    the prefix cache until it starts. But in WAITING it lets go of them if another sequence needs
    the room."""
    loading_block_ids: tuple[DeviceBlockId, ...] = ()
    """Blocks of the table whose swap-in is not confirmed yet. While there are any, the sequence
    publishes no blocks."""
    last_step: StepId | None = None
    """In DECODE: the step that samples the last token unless a stop token comes first. None: which
    step this is depends on how many draft tokens are accepted."""
    siblings: list["Sequence"] = field(default_factory=list)
    """Sequences of the same request that will fork from this one when the prompt is computed."""
    group: "BeamGroup | None" = None
    """The beam search that the sequence belongs to, if any."""

    @property
    def seq_key(self) -> SeqKey:
        return SeqKey(self.request.first_seq_key + self.output_index)

    @property
    def outputs(self) -> "tuple[Sequence, ...]":
        """The sequences that end when this one ends: itself, or all outputs of its beam search."""
        return (self,) if self.group is None else self.group.outputs

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens_left(self) -> int:
        """In PREFILL: number of known tokens to compute."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def traceparent(self) -> str:
        """The request's traceparent; empty for the later steps of a beam.

        To the worker, each step of a beam is a new sequence. If each had a traceparent, the worker
        would record a span for each step.
        """
        is_one_step = self.group is not None and len(self.token_ids) > self.num_prompt_tokens
        return "" if is_one_step else self.request.traceparent

    @property
    def order(self) -> tuple[Key, Key, SeqId]:
        """The policy's sort key without `num_served`, the only part that may change.

        So this key never changes. The sequence with the smallest key goes first.
        """
        return (self.rank.level, self.rank.key, self.seq_id)

    def set_status(self, status: SeqStatus) -> None:
        """Change the status.

        Raises:
            BrokenInvariantError: `TRANSITIONS` does not allow this change.
        """
        if status not in TRANSITIONS[self.status]:
            raise BrokenInvariantError(f"sequence {self.seq_id}: {self.status} to {status}")
        self.status = status
