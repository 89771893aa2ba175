"""The queues' metrics: clients cannot grow their number with tenant names."""

from collections import Counter

from scheduler_requests import make_request

from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.reports.load import count_queued
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observers.collectors import MAX_TENANTS, QueueCollector


def samples(queued, ages=None, num_unplaced=0):
    families = QueueCollector(lambda: queued, lambda: ages or {}, lambda: num_unplaced).collect()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_tenants_with_most_are_named_and_the_others_are_one():
    queued = Counter({f"t{i}": 100 - i for i in range(MAX_TENANTS + 3)})
    found = samples(queued)
    name = "quire_num_requests_waiting_by_tenant"
    assert found[name, "t0"] == 100
    assert (name, f"t{MAX_TENANTS}") not in found
    assert found[name, "other"] == sum(100 - i for i in range(MAX_TENANTS, MAX_TENANTS + 3))
    assert len(found) == MAX_TENANTS + 2


def test_few_tenants_leave_no_others():
    assert samples(Counter(a=2), {"w": 0.5}, 3) == {
        ("quire_num_requests_waiting_by_tenant", "a"): 2,
        ("quire_oldest_step_age_seconds", "w"): 0.5,
        ("quire_num_requests_unplaced",): 3,
    }


def test_those_that_run_do_not_wait():
    config = SchedulerConfig(
        num_blocks=8, block_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=32
    )
    core = Scheduler(config)
    for key, tenant in enumerate("aab"):
        core.submit(make_request(key=key, tenant=tenant), 0.0)
    assert count_queued(core) == {"a": 2, "b": 1}
    core.schedule(0.0)
    assert count_queued(core) == {"a": 1, "b": 1}
