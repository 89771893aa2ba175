"""Makes the full blocks of running sequences findable, by hashes that chain from their prompts."""

from contract.hashing import BlockHash, extend_chain, next_hash, root_hash
from scheduler_svc.core.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence


class Publisher:
    """Publishes what is computed, each block once; without a prefix cache nothing."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool[DeviceBlockId], rows: Rows) -> None:
        self._block_size = config.block_size
        self._is_enabled = config.enable_prefix_caching
        self._pool = pool
        self._rows = rows

    def publish(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Publish the full blocks among the first `num_computed_tokens`."""
        if self._is_enabled:
            self._pool.publish(*self._name(seq, num_computed_tokens // self._block_size))

    def publish_last(self, seqs: list[Sequence], rows: list[int]) -> None:
        """Publish the last block of each table; it is full.

        Its last token is the input of the step before the one being planned, so it was sampled by a
        step that is answered. This is most of what a steady step costs, so the tokens of all are
        read at once, and all are published at once.

        Args:
            seqs: Sequences that decode.
            rows: Theirs.
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
                blocks.append(seq.block_ids[last])
                names.append(name)
            else:  # more than this one, or none for now
                some_blocks, some_names = self._name(seq, last + 1)
                blocks += some_blocks
                names += some_names
        self._pool.publish(blocks, names)

    def _name(self, seq: Sequence, num_full: int) -> tuple[list[DeviceBlockId], list[BlockHash]]:
        """Return those of its first blocks that are to be published now, and their hashes."""
        first = seq.num_published_blocks
        if first >= num_full or seq.loading_block_ids:
            return [], []
        assert seq.row is not None
        tokens = self._rows.tokens(seq.row)[: num_full * self._block_size]
        root = root_hash(seq.request.cache_salt)
        extend_chain(seq.block_hashes, root, tokens, self._block_size)
        seq.num_published_blocks = num_full
        return seq.block_ids[first:num_full], seq.block_hashes[first:num_full]
