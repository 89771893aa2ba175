"""The tiers that a watcher of the prefix cache sees are those of KV events."""

from quire.v1.kv_pb2 import KV_TIER_UNSPECIFIED, KvTier
from scheduler_svc.core.space.cache_watcher import CacheTier


def test_tiers_have_the_names_and_values_of_the_message():
    tiers = {f"KV_TIER_{tier.name}": tier.value for tier in CacheTier}
    unspecified = KvTier.Name(KV_TIER_UNSPECIFIED)
    assert tiers | {unspecified: KV_TIER_UNSPECIFIED} == dict(KvTier.items())
