"""Fairness between tenants: examples, and a bound that holds for any requests."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from policy_driver import ROUTER, Worker, admission_order, make_core, request

from scheduler_svc.core.policies.fair import TenantFair


def test_fair_gives_each_tenant_its_turn():
    """With equal work `a` and `b` alternate, even if many requests of `a` came first."""
    requests = [(float(i), request(i, tenant="a")) for i in range(4)]
    requests += [(9.0, request(9, tenant="b")), (10.0, request(10, tenant="b"))]
    assert admission_order("fair", requests) == [0, 9, 1, 10, 2, 3]


def test_fair_weighs_what_was_served():
    """An output of `a` costs 1 + 2·8, one of `b` 4 + 2·1: three of `b` cost about one of `a`."""
    requests = [(float(i), request(i, num_tokens=1, max_tokens=8, tenant="a")) for i in range(3)]
    requests += [(9.0, request(10 + i, tenant="b")) for i in range(6)]
    assert admission_order("fair", requests) == [0, 10, 11, 12, 1, 13, 14, 15, 2]


def test_fair_charges_neither_what_the_cache_has_nor_what_is_computed_again():
    core = make_core("fair", num_blocks=4, max_num_seqs=2)
    served = Counter()
    core.policy.charge = lambda account, new, out: served.update({account: new, "out": out})
    core.submit(request(1, num_tokens=7, max_tokens=6, tenant="a"), 0.0)
    core.submit(request(2, num_tokens=7, max_tokens=6, tenant="b"), 1.0)
    Worker(core).run()
    assert core.load().num_preemptions > 0
    assert served == {"a": 7, "b": 7, "out": 12}
    core.submit(request(2, num_tokens=7, max_tokens=1, tenant="c"), 2.0)
    Worker(core).run()
    assert served["c"] == 3, "the other four are in a cached block"


def test_a_tenant_that_comes_back_has_no_credit():
    policy = TenantFair(weight_in=1, weight_out=1)
    policy.began_waiting("busy")
    policy.charge("busy", 1000, 0)
    policy.began_waiting("idle")
    assert policy.num_served("idle") == 1000
    policy.stopped_waiting("busy")
    policy.charge("idle", 500, 0)
    policy.stopped_waiting("idle")
    policy.began_waiting("busy")
    assert policy.num_served("busy") == 1500, "as the last that left"


def test_a_new_tenant_has_no_debt_for_one_that_no_longer_waits():
    core = make_core("fair")
    core.submit(request(0, tenant="a", num_tokens=30), 0.0)
    Worker(core).run()
    core.submit(request(1, tenant="b"), 1.0)
    assert (core.policy.num_served("a"), core.policy.num_served("b")) == (32, 0)


def test_accounts_go_on_in_another_core():
    policy = TenantFair(weight_in=1, weight_out=1)
    served = {"steady": 1000, "burst": 1500, "gone": 10}
    for tenant in served:
        policy.began_waiting(tenant)
    for tenant, num_tokens in served.items():
        policy.charge(tenant, num_tokens, 0)
    policy.stopped_waiting("gone")
    assert policy.accounts() == {"burst": 500}, "the others are where a new one begins"
    after = TenantFair(weight_in=1, weight_out=1)
    after.restore(policy.accounts())
    after.began_waiting("burst")
    after.began_waiting("steady")
    assert (after.num_served("steady"), after.num_served("burst")) == (500, 500)


def test_a_tenant_that_took_much_and_left_is_remembered():
    policy = TenantFair()
    policy.began_waiting("steady")
    policy.began_waiting("burst")
    policy.charge("burst", 1000, 0)
    policy.stopped_waiting("burst")
    policy.began_waiting("burst")
    assert (policy.num_served("steady"), policy.num_served("burst")) == (0, 1000)


def test_tenants_that_come_once_are_forgotten_and_those_that_took_much_are_not():
    policy = TenantFair()
    policy.charge("burst", 1_000_000, 0)
    for index in range(10_000):
        policy.began_waiting(f"tenant {index}")
        policy.charge(f"tenant {index}", 10, 0)
        policy.stopped_waiting(f"tenant {index}")
    assert len(policy._counters) <= 1026
    assert policy.num_served("burst") == 1_000_000


# --- a bound --------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 8))
BACKLOG = st.lists(SIZES, min_size=30, max_size=40)


def gap_between_tenants(policy, backlogs, num_rows) -> float:
    """The greatest difference of service while both tenants have work waiting."""
    core = make_core(policy, max_num_seqs=num_rows, max_num_batched_tokens=32)
    for tenant, backlog in backlogs.items():
        for prompt, output in backlog:
            key = len(core.live.of_source(ROUTER))
            item = request(key, num_tokens=prompt, max_tokens=output, tenant=tenant)
            core.submit(item, float(key))
    worker = Worker(core)
    worst = 0.0
    while worker.step():
        live = core.live.of_source(ROUTER)
        if {seq.request.tenant for seq in live if seq in core.queue} != {"a", "b"}:
            break
        worst = max(worst, abs(worker.service["a"] - worker.service["b"]))
    return worst


def most_apart(num_rows) -> int:
    """The paper's bound, for any requests: twice the largest number of tokens in a batch."""
    return 2 * (12 + 2 * num_rows * 8)


@settings(max_examples=settings().max_examples // 5)  # each has some hundred steps
@given(a=BACKLOG, b=BACKLOG, num_rows=st.integers(1, 4))
def test_two_backlogged_tenants_are_served_alike(a, b, num_rows):
    assert gap_between_tenants("fair", {"a": a, "b": b}, num_rows) <= most_apart(num_rows)


def test_fcfs_serves_one_backlog_after_the_other():
    backlog = [(12, 8)] * 40
    assert gap_between_tenants("fcfs", {"a": backlog, "b": backlog}, 4) > 5 * most_apart(4)
