"""An index built from KV events equals the core's after each rule of random histories.

The histories lose workers and schedulers. KV_EVENT_RULES=100000 goes on for so many rules.
"""

import os
from collections import Counter

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.kv_events.feed import WorkerFeed
from scheduler_svc.kv_events.wire import blocks_to_proto
from tests.kv_index import ReaderIndex, truth
from tests.property import test_histories, test_scheduler

NUM_RULES = int(os.environ.get("KV_EVENT_RULES", "9000"))


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
    done = Counter()

    def watched(config):
        core = Scheduler(config)
        core.watch_cache(feed.attach(config.block_size))
        return core

    class Machine(test_scheduler.SchedulerMachine):
        def lose_worker(self):
            done["lost workers"] += 1
            super().lose_worker()

        def lose_scheduler(self, *arguments):
            done["lost schedulers"] += 1
            super().lose_scheduler(*arguments)

        def check_books(self):
            super().check_books()
            done["rules"] += 1
            feed.flush()
            assert reader.index.of("w") == truth(self.core)
            tiers.update(reader.index.of("w").keys())
            if not done["rules"] % 16:
                snapshot = ReaderIndex()
                for drawer in feed.index.drawers():
                    snapshot.apply(feed.message(list(blocks_to_proto(drawer)), 1))
                assert snapshot.tiers.get("w", {}) == truth(self.core)

    monkeypatch.setattr(test_scheduler, "Scheduler", watched)
    monkeypatch.setattr(test_histories, "SchedulerMachine", Machine)
    seed = 0
    while done["rules"] < NUM_RULES:
        test_histories.live_through(seed, Counter())
        seed += 1
    assert min(done["lost workers"], done["lost schedulers"]) > 5
    assert min(tiers[tier] for tier in (1, 2, 3)) > 50, "the histories seldom use a tier"
    assert reader.num_changes > 5_000
    assert reader.index.tokens
