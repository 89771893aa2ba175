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
    """A live request, and the sizes that another core must have to run it."""

    source: SourceId
    first_seq_key: SeqKey
    request_id: str
    num_seqs: int
    """Number of sequences that have not ended."""
    num_host_blocks: int
    """Host blocks that hold the KV of these sequences now."""
    num_device_blocks: int
    """Device blocks that these sequences hold now."""
    max_total_tokens: int
    """The length, prompt and output together, at which a sequence ends."""
    max_device_blocks: int
    """Device blocks of all sequences at their maximum length."""


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of a request whose blocks are copied to another core while it runs."""

    live: MovableRequest
    can_copy: bool
    """Whether `Copies` can copy its blocks, which must be found by their hashes."""
    hashes: tuple[BlockHash, ...]
    """The hashes of its full blocks, including blocks that steps in flight compute."""
    decodes: bool
    """Whether some of its sequences run, each running one has gained a token, and it can leave."""


@dataclass(frozen=True, slots=True)
class MovedSequence:
    """One sequence of a request that moves."""

    output_index: int
    host_block_ids: tuple[HostBlockId, ...]
    """The source core's host blocks with its KV; empty: its tokens are computed again."""
    num_computed_tokens: int
    """Tokens with KV in the blocks; without blocks: tokens that had been computed once."""
    num_charged_tokens: int
    """How many of its first prompt tokens the source core's policy has charged for."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache at its first admission."""
    was_admitted: bool
    """Whether its source has been informed that it left the queue."""


@dataclass(frozen=True, slots=True, eq=False)
class MovedRequest:
    """A request that the source core hands over, with all data that the target core needs."""

    request: Request
    """The request, with the tokens so far as `outputs`."""
    arrived: float
    """When it was submitted; both cores use the same clock."""
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
    """After the result of this step the host blocks hold the KV."""


@dataclass(frozen=True, slots=True)
class Import:
    """Host blocks reserved for an arriving request."""

    import_id: ImportId
    host_block_ids: tuple[HostBlockId, ...]
    """Blocks for its KV, parallel to `MovedRequest.host_block_ids`."""
    ready_step: StepId
    """After the result of this step nothing else reads or writes these blocks."""
