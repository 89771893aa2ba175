"""The prefix cache: finds KV that a sequence can reuse, and publishes the KV that it computes.

A full block is found by its hash, which covers all tokens up to its end. Lookups search the device,
then the host, then the disk.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from contract.hashing import BlockHash, extend_chain, next_hash, root_hash
from scheduler_svc.core.blocks import BlockPool, DeviceBlockId, HostBlockId
from scheduler_svc.core.cache.watch import CacheWatch
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.tiers.host_tier import HostTier


@dataclass(frozen=True, slots=True)
class FoundKv:
    """KV that a sequence can reuse: the first blocks of its table, tier by tier."""

    ready: list[DeviceBlockId]
    """Device blocks to share."""
    loading: list[DeviceBlockId]
    """Device blocks to share that are still being swapped in."""
    sources: list[HostBlockId]
    """Host blocks to swap in."""
    num_tokens: int
    """Tokens with KV in these blocks; the last source may be partly filled."""


class KvLookup:
    """Looks up blocks; changes nothing except `Sequence.block_hashes`."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool[DeviceBlockId], tier: HostTier
    ) -> None:
        self._block_size = config.block_size
        self._is_enabled = config.enable_prefix_caching
        self._pool = pool
        self._tier = tier

    def find(self, seq: Sequence) -> FoundKv:
        """Look up the KV that a queued sequence can reuse.

        At least one token stays to be computed, because its logits are needed.
        """
        is_swapped = seq.status is SeqStatus.SWAPPED
        num_known = seq.num_computed_tokens if is_swapped else len(seq.token_ids) - 1
        hashes = self._hashes(seq, num_known)
        ready = self._pool.find(hashes)
        if is_swapped:
            return FoundKv(ready, [], list(seq.host_block_ids[len(ready) :]), num_known)
        loading, sources = self._tier.find(hashes[len(ready) :])
        num_found = len(ready) + len(loading) + len(sources)
        return FoundKv(ready, loading, sources, num_found * self._block_size)

    def past_device(self, seq: Sequence) -> list[BlockHash]:
        """Return the hashes of the blocks that a waiting sequence needs and the device lacks."""
        hashes = self._hashes(seq, len(seq.token_ids) - 1)
        return hashes[len(self._pool.find(hashes)) :]

    def _hashes(self, seq: Sequence, num_tokens: int) -> list[BlockHash]:
        """Return the hashes of the full blocks of the first tokens; empty without a cache."""
        may_find = seq.status is SeqStatus.SWAPPED or seq.request.reads_prefix_cache
        if not (self._is_enabled and may_find):
            return []
        root = root_hash(seq.request.cache_salt)
        extend_chain(seq.block_hashes, root, seq.token_ids, self._block_size)
        return seq.block_hashes[: num_tokens // self._block_size]

    def find_beyond(self, seq: Sequence, shared: list[DeviceBlockId]) -> FoundKv:
        """Look up KV beyond the full blocks `shared`, which a sequence shares in any case."""
        found = self.find(seq)
        if len(found.ready) < len(shared):
            return FoundKv(shared, [], [], len(shared) * self._block_size)
        ready = shared + found.ready[len(shared) :]
        return FoundKv(ready, found.loading, found.sources, found.num_tokens)

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many prompt tokens, without the last, are in the prefix cache."""
        if not (self._is_enabled and request.reads_prefix_cache):
            return 0
        hashes: list[BlockHash] = []
        root = root_hash(request.cache_salt)
        extend_chain(hashes, root, request.prompt_token_ids[:-1], self._block_size)
        return self.num_cached_blocks(hashes) * self._block_size

    def num_cached_blocks(self, hashes: Seq[BlockHash]) -> int:
        """Return the length of the prefix of `hashes` that is in the prefix cache, in any tier."""
        num_found = len(self._pool.find(hashes))
        loading, sources = self._tier.find(hashes[num_found:])
        num_found += len(loading) + len(sources)
        return num_found + len(self._tier.disk.pool.find(hashes[num_found:]))


class Publisher:
    """Publishes the full blocks of running sequences, each once, if there is a prefix cache."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool[DeviceBlockId], rows: Rows) -> None:
        self._block_size = config.block_size
        self._is_enabled = config.enable_prefix_caching
        self._pool = pool
        self._rows = rows
        self.watch: CacheWatch | None = None

    def publish(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Publish the full blocks of the first `num_computed_tokens` tokens."""
        if self._is_enabled:
            self._pool.publish(*self._name(seq, num_computed_tokens // self._block_size))

    def publish_last(self, seqs: list[Sequence], rows: list[int]) -> None:
        """Publish the last block of each table, which is full.

        The block's last token is the input of the step before the one being planned, so its value
        is known. This call is most of the cost of a steady step, so it reads and publishes the
        blocks of all sequences at once.

        Args:
            seqs: Sequences that decode.
            rows: Their rows, parallel to `seqs`.
        """
        if not self._is_enabled:
            return
        blocks: list[DeviceBlockId] = []
        names: list[BlockHash] = []
        lasts = [len(seq.block_ids) - 1 for seq in seqs]
        for seq, last, tokens in zip(seqs, lasts, self._rows.read_blocks(rows, lasts), strict=True):
            hashes = seq.block_hashes
            if seq.num_published_blocks == last == len(hashes) and not seq.loading_block_ids:
                parent = hashes[-1] if hashes else root_hash(seq.request.cache_salt)
                name = next_hash(parent, tokens)
                hashes.append(name)
                seq.num_published_blocks = last + 1
                self._tell(seq, last, last + 1)
                blocks.append(seq.block_ids[last])
                names.append(name)
            else:  # the sequence has more blocks to publish, or none yet
                some_blocks, some_names = self._name(seq, last + 1)
                blocks += some_blocks
                names += some_names
        self._pool.publish(blocks, names)

    def _name(self, seq: Sequence, num_full: int) -> tuple[list[DeviceBlockId], list[BlockHash]]:
        """Mark the first `num_full` blocks as published; return the new ones and their hashes."""
        first = seq.num_published_blocks
        if first >= num_full or seq.loading_block_ids:
            return [], []
        assert seq.row is not None
        tokens = self._rows.tokens(seq.row)[: num_full * self._block_size]
        root = root_hash(seq.request.cache_salt)
        extend_chain(seq.block_hashes, root, tokens, self._block_size)
        seq.num_published_blocks = num_full
        self._tell(seq, first, num_full)
        return seq.block_ids[first:num_full], seq.block_hashes[first:num_full]

    def _tell(self, seq: Sequence, first: int, end: int) -> None:
        if self.watch is not None and seq.row is not None:
            self.watch.on_named(seq, first, end, self._rows.tokens(seq.row))
