"""An index as a reader of KV events keeps it, written from the comments of `kv.proto` alone."""

from contract.hashing import next_hash, root_hash

HASH = 32


def split(data, size):
    return [data[start : start + size] for start in range(0, len(data), size)]


class ReaderIndex:
    """The blocks of each worker by tier, from the events alone."""

    def __init__(self):
        self.tiers = {}  # worker -> {tier: {hash}}
        self.tokens = {}  # hash -> tokens, if they are known
        self.exact = set()  # workers whose snapshot has ended
        self.sequence = {}
        self.reasons = []

    def apply(self, message):
        worker = message.worker
        found = self.tiers.setdefault(worker, {})
        before = self.sequence.get(worker)
        for event in message.events:
            match event.WhichOneof("event"):
                case "begin":
                    found.clear()
                    self.exact.discard(worker)
                    self.reasons.append(event.begin.reason)
                    before = None  # changes may have been dropped
                case "end":
                    self.exact.add(worker)
                    assert event.end.num_blocks == len(self.hashes(worker))
                case "stored":
                    self._store(found, event.stored, message.block_size)
                case "removed":
                    for block_hash in split(event.removed.block_hashes, HASH):
                        found.get(event.removed.tier, set()).discard(block_hash)
                case "cleared":
                    found.clear()
        if before is not None:
            assert message.sequence in (before, before + 1), "a batch is missing"
        self.sequence[worker] = message.sequence

    def _store(self, found, stored, block_size):
        hashes = split(stored.block_hashes, HASH)
        found.setdefault(stored.tier, set()).update(hashes)
        if not stored.token_ids:
            assert not stored.parent_hashes
            return
        parents = split(stored.parent_hashes, HASH)
        tokens = split(stored.token_ids, 4 * block_size)
        for block_hash, parent, some in zip(hashes, parents, tokens, strict=True):
            above = root_hash(stored.cache_salt) if not any(parent) else parent
            assert stored.adapter or next_hash(above, some) == block_hash
            self.tokens[block_hash] = some

    def hashes(self, worker):
        return set().union(*self.tiers[worker].values())

    def of(self, worker):
        """The hashes by tier, without empty tiers."""
        return {tier: hashes for tier, hashes in self.tiers[worker].items() if hashes}


def truth(core):
    """What the core finds in each tier."""
    pools = {1: core.pool, 2: core.tier.pool, 3: core.tier.disk.pool}
    found = {tier: set(pool.books.hash_to_block) for tier, pool in pools.items()}
    return {tier: hashes for tier, hashes in found.items() if hashes}
