"""What a worker still holds of the scheduler before, as it tells the next one."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Generic

from contract.arrays import Int32Array
from contract.hashing import BlockHash, root_hash
from contract.step import SearchState
from scheduler_svc.core.blocks import BlockIdT, DeviceBlockId, DiskBlockId, HostBlockId
from scheduler_svc.core.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class HeldRow:
    """A sequence that had a row, and whose KV is good."""

    identity: bytes
    token_ids: Int32Array
    """All of its tokens, those included that its source may not have heard of."""
    num_computed_tokens: int
    """How many of them have their KV in the blocks; less than all."""
    block_ids: tuple[DeviceBlockId, ...]
    """Distinct; room for the computed tokens at least."""
    has_stopped: bool
    """Whether its last token ends it."""
    had_logprobs: bool
    """Whether log-probabilities came with its tokens."""
    logprobs: tuple[bytes, ...] = ()
    """Those of its last tokens, in order: for the source; the core never looks inside."""
    search: SearchState | None = None
    """How far the search is whose best beam it is; of its blocks only the names are of use."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldBlocks(Generic[BlockIdT]):
    """The blocks of one tier whose content is known; whose content became known first, first."""

    block_ids: Sequence[BlockIdT] = ()
    hashes: Sequence[BlockHash] = ()
    """Parallel to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """All of it."""

    rows: tuple[HeldRow, ...] = ()
    device: HeldBlocks[DeviceBlockId] = HeldBlocks()
    host: HeldBlocks[HostBlockId] = HeldBlocks()
    disk: HeldBlocks[DiskBlockId] = HeldBlocks()
    pins: tuple[tuple[BlockHash, float], ...] = ()
    """Names of contents that were kept in the prefix cache, and for how many seconds more; of each
    prompt from its beginning."""

    @property
    def is_anything(self) -> bool:
        """Whether there is any of it."""
        tiers = (self.device, self.host, self.disk)
        return bool(self.rows) or any(tier.block_ids for tier in tiers)


def swap_root(request: Request, output_index: int, *, has_prefix_cache: bool) -> BlockHash:
    """Return the parent of the names by which a later scheduler finds a swapped sequence's KV.

    Without a prefix cache they are the sequence's own, and nobody else's.
    """
    if has_prefix_cache:
        return root_hash(request.cache_salt)
    return BlockHash(identity(request, output_index))


def identity(request: Request, output_index: int) -> bytes:
    """Return 32 bytes by which a later scheduler knows a sequence of `request` again.

    Whoever submits the same under the same request id, and nobody else, draws the same tokens and
    may have them. Which router it comes by, and how many tokens it has by then, does not matter.
    """
    parts = (
        b"quire.v1.sequence\0",
        root_hash(request.cache_salt),
        sha256(request.request_id.encode()).digest(),
        sha256(request.tenant.encode()).digest(),
        sha256(request.sampling).digest(),
        output_index.to_bytes(4, "little"),
        len(request.prompt_token_ids).to_bytes(8, "little"),
        request.max_tokens.to_bytes(8, "little"),
        b"" if request.beam is None else repr((request.beam, request.min_tokens)).encode(),
    )
    return sha256(b"".join(parts)).digest()
