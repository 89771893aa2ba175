"""An index built from KV events equals the core's after each rule of random histories."""

from collections import Counter

from hypothesis import settings

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.kv_events.feed import WorkerFeed
from scheduler_svc.kv_events.wire import blocks_to_proto
from tests.kv_index import ReaderIndex, truth
from tests.property import test_histories, test_scheduler


class EagerReader:
    def __init__(self):
        self.index = ReaderIndex()
        self.num_changes = 0

    def push(self, message, num_changes):
        self.index.apply(message)
        self.num_changes += num_changes


async def test_an_index_from_events_equals_the_core_at_any_time(monkeypatch):
    reader, tiers = EagerReader(), Counter()
    feed = WorkerFeed("w", 1, {reader})
    machines = []

    def watched(config):
        core = Scheduler(config)
        core.watch_cache(feed.attach(config.block_size))
        return core

    class Machine(test_scheduler.SchedulerMachine):
        def __init__(self):
            super().__init__()
            machines.append(self)

        def check_books(self):
            super().check_books()
            feed.flush()
            assert reader.index.of("w") == truth(self.core)
            tiers.update(reader.index.of("w").keys())
            if not self.num_rule_steps["histories"] % 16:
                snapshot = ReaderIndex()
                for drawer in feed.index.drawers():
                    snapshot.apply(feed.message(list(blocks_to_proto(drawer)), 1))
                assert snapshot.tiers.get("w", {}) == truth(self.core)

    monkeypatch.setattr(test_scheduler, "Scheduler", watched)
    monkeypatch.setattr(test_histories, "SchedulerMachine", Machine)
    for seed in range(max(20, settings().max_examples // 4)):
        test_histories.live_through(seed, Counter())
    assert min(tiers[tier] for tier in (1, 2, 3)) > 50, "the histories seldom use a tier"
    assert reader.num_changes > 5_000
    assert reader.index.tokens
