"""The prefix cache: finds KV that a sequence can reuse, and publishes KV that sequences compute.

A full block is found by its *name*, a hash that covers all tokens up to the block's end.
`Sequence.block_hashes` has one hash for each block index. In KV group 0, this hash is the block's
name. In each other KV group, the name is made from this hash and the number of the group
(`KvGroups.names`). Lookups search the device, then the host, then the disk. A KV group with a
window needs only the blocks that the window still sees (`KvGroups.longest_prefix`).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from contract.hashing import BlockHash, extend_chain, group_hash, next_hash, root_hash
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId, HostBlockId
from scheduler_svc.core.space.cache_watcher import CacheWatch
from scheduler_svc.core.space.kv_groups import NULL_BLOCK, KvGroups
from scheduler_svc.core.tiers.host_tier import HostTier


@dataclass(frozen=True, slots=True)
class FoundKv:
    """KV that a sequence can reuse, tier by tier."""

    ready: list[DeviceBlockId]
    """Device blocks to share."""
    loading: list[DeviceBlockId]
    """Device blocks to share that are still being swapped in."""
    sources: list[HostBlockId]
    """Host blocks to swap in."""
    num_tokens: int
    """Number of tokens with KV in the blocks of `ready`, `loading` and `sources`. In `sources`, the
    last block of each KV group may be partial."""
    places: list[int] | None = None
    """The places of the blocks in the block table: first those of `ready`, then of `loading`, then
    of `sources`. None: the blocks are the first blocks of the table."""
    num_indices: int = 0
    """If `places` is set, the number of block indices that the reused prefix covers."""


class KvLookup:
    """Looks up blocks by their hashes; changes nothing except `Sequence.block_hashes`."""

    def __init__(
        self,
        config: SchedulerConfig,
        groups: KvGroups,
        pool: BlockPool[DeviceBlockId],
        tier: HostTier,
    ) -> None:
        self._groups = groups
        self._block_size = config.block_size
        self._is_enabled = config.enable_prefix_caching
        self._pool = pool
        self._tier = tier

    def find(self, seq: Sequence) -> FoundKv:
        """Look up the KV that a queued sequence can reuse.

        The result never has the KV of all known tokens: the last one must be computed, because its
        logits are needed to sample the next token.
        """
        is_swapped = seq.status is SeqStatus.SWAPPED
        # The sequence may find the KV of all known tokens but the last one. If it was swapped out,
        # it needs the KV that its host blocks have.
        num_wanted = seq.num_computed_tokens if is_swapped else len(seq.token_ids) - 1
        hashes = self._hashes(seq, num_wanted)
        if not self._groups.is_plain:
            return self._find_places(seq, hashes, num_wanted if is_swapped else None)
        ready = self._pool.find(hashes)
        if is_swapped:
            return FoundKv(ready, [], list(seq.host_block_ids[len(ready) :]), num_wanted)
        loading, sources = self._tier.find(hashes[len(ready) :])
        num_found = len(ready) + len(loading) + len(sources)
        return FoundKv(ready, loading, sources, num_found * self._block_size)

    def _find_places(
        self, seq: Sequence, hashes: list[BlockHash], num_swapped: int | None
    ) -> FoundKv:
        """Do the work of `find` for a model with several KV groups or windows.

        Args:
            seq: The sequence.
            hashes: The hashes of the sequence's full blocks.
            num_swapped: Number of tokens with KV in `seq.host_block_ids`; None: the sequence is not
                swapped.
        """
        if num_swapped is None:
            num_indices = self._groups.longest_prefix(hashes, self._has)
            num_tokens = num_indices * self._block_size
        else:
            num_indices, num_tokens = -(-num_swapped // self._block_size), num_swapped
        places = self._groups.kept(num_tokens)
        num_named = len(hashes) * self._groups.num
        names = self._groups.names(hashes, [place for place in places if place < num_named])
        ready: dict[int, DeviceBlockId] = {}
        loading: dict[int, DeviceBlockId] = {}
        sources: dict[int, HostBlockId] = {}
        for index, place in enumerate(places):
            name = names[index : index + 1]
            if found := self._pool.find(name):
                ready[place] = found[0]
            elif num_swapped is not None:
                sources[place] = seq.host_block_ids[index]
            else:
                arriving, on_host = self._tier.find(name)
                loading.update((place, block) for block in arriving)
                sources.update((place, block) for block in on_host)
        return FoundKv(
            [*ready.values()],
            [*loading.values()],
            [*sources.values()],
            num_tokens,
            [*ready, *loading, *sources],
            num_indices,
        )

    def _has(self, name: BlockHash) -> bool:
        return bool(self._pool.find([name]) or self._tier.pool.find([name]))

    def _has_anywhere(self, name: BlockHash) -> bool:
        return self._has(name) or bool(self._tier.disk.pool.find([name]))

    def past_device(self, seq: Sequence) -> list[BlockHash]:
        """Return the hashes of blocks that a waiting sequence could reuse but the device lacks."""
        hashes = self._hashes(seq, len(seq.token_ids) - 1)
        if self._groups.is_plain:
            return hashes[len(self._pool.find(hashes)) :]
        num_indices = self._groups.longest_prefix(hashes, self._has_anywhere)
        names = self._groups.names(hashes, self._groups.kept(num_indices * self._block_size))
        return [name for name in names if not self._pool.find([name])]

    def _hashes(self, seq: Sequence, num_tokens: int) -> list[BlockHash]:
        """Return the hashes of the full blocks of the first `num_tokens` tokens.

        Return no hashes if there is no prefix cache, or the sequence may not read it.
        """
        may_find = seq.status is SeqStatus.SWAPPED or seq.request.reads_prefix_cache
        if not (self._is_enabled and may_find):
            return []
        root = root_hash(seq.request.cache_salt)
        extend_chain(seq.block_hashes, root, seq.token_ids, self._block_size)
        return seq.block_hashes[: num_tokens // self._block_size]

    def find_beyond(self, seq: Sequence, shared: list[DeviceBlockId]) -> FoundKv:
        """Look up the KV that a beam can reuse, if another beam has `shared` for the same tokens.

        The result has KV for at least as many tokens as `shared`. With windows there is an
        exception: if `shared` lacks a block that the beam needs, the result is that of `find`.
        """
        found = self.find(seq)
        if not self._groups.is_plain:
            return self._beyond_places(found, shared)
        if len(found.ready) < len(shared):
            return FoundKv(shared, [], [], len(shared) * self._block_size)
        ready = shared + found.ready[len(shared) :]
        return FoundKv(ready, found.loading, found.sources, found.num_tokens)

    def _beyond_places(self, found: FoundKv, shared: list[DeviceBlockId]) -> FoundKv:
        num_indices = len(shared) // self._groups.num
        places = self._groups.kept(num_indices * self._block_size)
        blocks = [shared[place] for place in places]
        if found.num_indices >= num_indices or NULL_BLOCK in blocks:
            return found
        return FoundKv(blocks, [], [], num_indices * self._block_size, places, num_indices)

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a prompt have KV in the prefix cache.

        The last token is not counted, because it is computed even if the cache has its KV.
        """
        if not (self._is_enabled and request.reads_prefix_cache):
            return 0
        hashes: list[BlockHash] = []
        root = root_hash(request.cache_salt)
        extend_chain(hashes, root, request.prompt_token_ids[:-1], self._block_size)
        return self.num_cached_blocks(hashes) * self._block_size

    def num_cached_blocks(self, hashes: Seq[BlockHash]) -> int:
        """Return the length of the longest prefix of `hashes` that the tiers together have."""
        if not self._groups.is_plain:
            return self._groups.longest_prefix(hashes, self._has_anywhere)
        num_found = len(self._pool.find(hashes))
        loading, sources = self._tier.find(hashes[num_found:])
        num_found += len(loading) + len(sources)
        return num_found + len(self._tier.disk.pool.find(hashes[num_found:]))


class Publisher:
    """Publishes each full block of running sequences once, if there is a prefix cache."""

    def __init__(
        self,
        config: SchedulerConfig,
        groups: KvGroups,
        pool: BlockPool[DeviceBlockId],
        rows: Rows,
    ) -> None:
        self._groups = groups
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
        """Publish the last block of each sequence in each KV group; these blocks are full.

        Groups with a window are an exception: their blocks are published when the sequence stops
        (`publish_windows`). A sequence can use such a block only if the prefix that it reuses ends
        at most one window after the block, and few prefixes end there. But blocks of recurrent
        layers are published here: when a sequence stops, it usually holds no full block of these
        layers any more, and other sequences can resume only from the state in a full block.

        A block can be hashed only if all its tokens are known. In these blocks, the newest tokens
        were sampled two steps before the step being planned. While a step is planned, at most one
        step is in flight, so the result with these tokens has arrived.

        While sequences only decode, this call is most of the cost of a step. So it reads and
        publishes the blocks of all sequences together.

        Args:
            seqs: Decoding sequences.
            rows: The rows of these sequences, parallel to `seqs`.
        """
        if not (self._is_enabled and self._groups.published):
            return
        blocks: list[DeviceBlockId] = []
        names: list[BlockHash] = []
        num_groups, is_watched = self._groups.num, self.watch is not None
        is_first_only = self._groups.published == [0]  # group 0 uses the token hashes themselves
        lasts = [len(seq.block_ids) // num_groups - 1 for seq in seqs]
        for seq, last, tokens in zip(seqs, lasts, self._rows.read_blocks(rows, lasts), strict=True):
            hashes = seq.block_hashes
            if seq.num_published_blocks == last == len(hashes) and not seq.loading_block_ids:
                parent = hashes[-1] if hashes else root_hash(seq.request.cache_salt)
                name = next_hash(parent, tokens)
                hashes.append(name)
                seq.num_published_blocks = last + 1
                if is_watched:
                    self._tell(seq, last, last + 1)
                if is_first_only:
                    blocks.append(seq.block_ids[last * num_groups])
                    names.append(name)
                else:
                    for group in self._groups.published:
                        blocks.append(seq.block_ids[last * num_groups + group])
                        names.append(group_hash(name, group))
            else:  # the sequence has more blocks to publish, or none yet
                some_blocks, some_names = self._name(seq, last + 1)
                blocks += some_blocks
                names += some_names
        self._pool.publish(blocks, names)

    def publish_windows(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Publish the full blocks of groups with a window when a sequence stops.

        Only the blocks that the sequence's next token would see are published, because a sequence
        that continues from here needs no others.
        """
        num_full, num_groups = num_computed_tokens // self._block_size, self._groups.num
        if len(seq.block_hashes) < num_full:  # there is no prefix cache, or its KV is wrong
            return
        # Blocks of the tokens with which the sequence started were published when they were
        # computed. They are not published again, because another sequence may have found them to be
        # wrong.
        first = len(seq.token_ids) // self._block_size
        kept = self._groups.kept(num_computed_tokens)
        places = [
            place
            for place in kept
            if first <= place // num_groups < num_full
            and place % num_groups not in self._groups.published
        ]
        names = self._groups.names(seq.block_hashes, places)
        self._pool.publish([seq.block_ids[place] for place in places], names)

    def _name(self, seq: Sequence, num_full: int) -> tuple[list[DeviceBlockId], list[BlockHash]]:
        """Mark the first `num_full` block indices as published.

        Return the blocks that were not published before, and their hashes.
        """
        first = seq.num_published_blocks
        if first >= num_full or seq.loading_block_ids:
            return [], []
        assert seq.row is not None
        tokens = self._rows.tokens(seq.row)[: num_full * self._block_size]
        root = root_hash(seq.request.cache_salt)
        extend_chain(seq.block_hashes, root, tokens, self._block_size)
        seq.num_published_blocks = num_full
        self._tell(seq, first, num_full)
        if self._groups.is_plain:
            return seq.block_ids[first:num_full], seq.block_hashes[first:num_full]
        num, table = self._groups.num, seq.block_ids
        places = [p for p in range(first * num, num_full * num) if table[p] != NULL_BLOCK]
        blocks = [table[place] for place in places]
        return blocks, self._groups.names(seq.block_hashes, places)

    def _tell(self, seq: Sequence, first: int, end: int) -> None:
        if self.watch is not None and seq.row is not None:
            self.watch.on_named(seq, first, end, self._rows.tokens(seq.row))
