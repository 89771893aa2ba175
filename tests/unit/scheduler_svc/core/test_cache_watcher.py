"""What a watcher of the prefix cache sees."""

from core_driver import answer, make_core, schedule, submit

from quire.v1.kv_pb2 import KV_TIER_UNSPECIFIED, KvTier
from scheduler_svc.core.space.cache_watcher import CacheTier


def test_tiers_have_the_names_and_values_of_the_message():
    tiers = {f"KV_TIER_{tier.name}": tier.value for tier in CacheTier}
    unspecified = KvTier.Name(KV_TIER_UNSPECIFIED)
    assert tiers | {unspecified: KV_TIER_UNSPECIFIED} == dict(KvTier.items())


class Watch:
    """Notes the tokens of the blocks that are named, and has the tables."""

    def __init__(self):
        self.named = []
        self.tables = {}

    def table(self, tier):
        return self.tables.setdefault(tier, {})

    def on_named(self, seq, first, end, token_ids):
        assert end <= len(seq.block_hashes)
        self.named.append((first, end, token_ids[4 * first : 4 * end].tolist()))


def test_blocks_are_named_once_and_with_their_tokens_and_stand_in_the_table():
    core, watch = make_core(), Watch()
    core.watch_cache(watch)
    submit(core, 0, range(10), max_tokens=8)
    while core.live.of_source(0):
        answer(core, schedule(core), 0)
    assert watch.named == [
        (0, 2, [*range(8)]),
        (2, 3, [8, 9, 7, 7]),
        (3, 4, [7, 7, 7, 7]),
    ]
    assert [*watch.tables[CacheTier.DEVICE].values()] == [0, 1, 2, 3]


def test_a_watcher_sees_the_blocks_of_each_tier():
    core, watch = make_core(num_host_blocks=4, num_disk_blocks=4), Watch()
    core.watch_cache(watch)
    pools = core.pool, core.tier.pool, core.tier.disk.pool
    for pool, tier in zip(pools, CacheTier, strict=True):
        blocks = pool.allocate(1)
        pool.publish(blocks, [bytes(32)])
        assert watch.tables[tier] == {bytes(32): blocks[0]}
