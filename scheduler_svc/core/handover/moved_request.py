"""Data of a request that moves from one scheduler core to another with its KV."""

from dataclasses import dataclass
from typing import NewType

from contract.hashing import BlockHash
from contract.step import StepId
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.space.blocks import HostBlockId

ExportId = NewType("ExportId", int)
"""Identifies a leaving request at the source core."""

ImportId = NewType("ImportId", int)
"""Identifies an arriving request at the target core."""


@dataclass(frozen=True, slots=True)
class MovableRequest:
    """A live request, and the sizes that decide whether another core has room for it."""

    source: SourceId
    first_seq_key: SeqKey
    request_id: str
    num_seqs: int
    """Number of sequences that have not ended."""
    num_host_blocks: int
    """Host blocks that hold the KV of the unfinished sequences now."""
    num_device_blocks: int
    """Device blocks that the unfinished sequences hold now."""
    max_total_tokens: int
    """The limit on the tokens of each sequence, prompt and output together."""
    max_device_blocks: int
    """Device blocks that all sequences together need at their maximum length."""


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of a request whose blocks are copied to another core while it runs."""

    live: MovableRequest
    can_copy: bool
    """Whether the request's blocks can be copied while it runs. `Copies` finds blocks by their
    hashes, so it can copy only blocks that are in the prefix cache."""
    hashes: tuple[BlockHash, ...]
    """The hashes of the request's full blocks, including blocks that steps in flight compute."""
    decodes: bool
    """Whether the request decodes and can leave now. The request decodes if at least one of its
    sequences runs, each running sequence has gained a token since it started, and no step in flight
    samples a sequence's last token."""


@dataclass(frozen=True, slots=True)
class MovedSequence:
    """One sequence of a request that moves."""

    output_index: int
    host_block_ids: tuple[HostBlockId, ...]
    """The source core's host blocks with the sequence's KV; empty: the target core computes its
    tokens again."""
    num_computed_tokens: int
    """Tokens with KV in the blocks. Without blocks: tokens that the source core had computed."""
    num_charged_tokens: int
    """The `Sequence.num_charged_tokens` of the source core: the target core does not charge these
    prompt tokens."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache when the sequence was first admitted."""
    was_admitted: bool
    """Whether the router has been told that the sequence left the queue."""


@dataclass(frozen=True, slots=True, eq=False)
class MovedRequest:
    """A request that the source core hands over, with all data that the target core needs."""

    request: Request
    """The request; its `outputs` are the tokens generated so far."""
    arrived: float
    """When the request was submitted; both cores use the same clock."""
    block_size: int
    bytes_per_block: int
    sequences: tuple[MovedSequence, ...]
    """The sequences that have not ended."""

    @property
    def host_block_ids(self) -> list[HostBlockId]:
        """The source core's host blocks, sequence by sequence."""
        return [block for seq in self.sequences for block in seq.host_block_ids]


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """A request that can leave as soon as its KV is on the host."""

    export_id: ExportId
    moved: MovedRequest
    ready_step: StepId
    """Once the result of this step has arrived, the host blocks hold the KV."""


@dataclass(frozen=True, slots=True)
class Import:
    """Host blocks reserved for an arriving request."""

    import_id: ImportId
    host_block_ids: tuple[HostBlockId, ...]
    """Blocks for the request's KV, parallel to `MovedRequest.host_block_ids`."""
    ready_step: StepId
    """Once the result of this step has arrived, no step reads or writes the host blocks."""
