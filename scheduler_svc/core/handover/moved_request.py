"""What a request is while it moves from one scheduler core to another with its KV."""

from dataclasses import dataclass
from typing import NewType

from contract.step import StepId
from scheduler_svc.core.blocks import HostBlockId
from scheduler_svc.core.request import Request, SeqKey, SourceId

ExportId = NewType("ExportId", int)
"""A request that leaves, as the giving core numbers them."""

ImportId = NewType("ImportId", int)
"""A request that arrives, as the taking core numbers them."""


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A live request by its names, and what it takes to run it elsewhere."""

    source: SourceId
    first_seq_key: SeqKey
    request_id: str
    num_seqs: int
    """Sequences that have not ended."""
    num_host_blocks: int
    """Host blocks that hold their KV now."""
    max_device_blocks: int
    """Device blocks of all of them at their greatest lengths."""


@dataclass(frozen=True, slots=True)
class MovedSequence:
    """One sequence of a request that moves."""

    output_index: int
    host_block_ids: tuple[HostBlockId, ...]
    """Where the giving core has its KV; empty: it has none, and computes its tokens again."""
    num_computed_tokens: int
    """Tokens with KV in the blocks; without blocks: that had KV once."""
    num_charged_tokens: int
    """First tokens of its prompt that the giving core's policy has charged."""
    num_cached_tokens: int
    """Tokens of its prompt that were found when it was first admitted."""
    was_admitted: bool
    """Whether its source has heard that it left the queue."""


@dataclass(frozen=True, slots=True, eq=False)
class MovedRequest:
    """A request as the giving core hands it on: all that a core must know to continue it."""

    request: Request
    """With the tokens so far as `outputs`."""
    arrived: float
    """When it was submitted, in the seconds of both cores."""
    block_size: int
    bytes_per_block: int
    sequences: tuple[MovedSequence, ...]
    """Those that have not ended."""

    @property
    def host_block_ids(self) -> list[HostBlockId]:
        """The giving core's blocks, sequence by sequence."""
        return [block for seq in self.sequences for block in seq.host_block_ids]


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """A request that is ready to leave as soon as its KV is on the host."""

    export_id: ExportId
    moved: MovedRequest
    ready_step: StepId
    """When this step is answered, the host blocks hold the KV."""


@dataclass(frozen=True, slots=True)
class Import:
    """Room that is set aside for a request that arrives."""

    import_id: ImportId
    host_block_ids: tuple[HostBlockId, ...]
    """Where its KV goes, parallel to `MovedRequest.host_block_ids`."""
    ready_step: StepId
    """When this step is answered, nothing else reads or writes them."""
