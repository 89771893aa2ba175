"""Policies by example: in which order sequences are admitted, and which one is preempted."""

import sys
from collections import Counter
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import DeadlineError
from scheduler_svc.core.invariants import check
from scheduler_svc.core.plan import StepOutcome
from scheduler_svc.core.policies.fair import TenantFair
from scheduler_svc.core.policies.loading import make_policy
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.rates import Rates
from scheduler_svc.core.request import FinishReason, Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler

ROUTER = SourceId(0)
NONE = np.array([], np.int32)
NO_ARGS = MappingProxyType({})


def make_core(policy="fcfs", args=NO_ARGS, **overrides) -> Scheduler:
    settings = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
        "watermark": 0.0,
        "long_prefill_threshold": 0,
        "policy": policy,
        "policy_args": tuple(args.items()),
    }
    return Scheduler(SchedulerConfig(**(settings | overrides)))


def request(key, *, num_tokens=4, max_tokens=1, **more) -> Request:
    """Prompts differ from the first token on, so that nothing is found in the prefix cache."""
    prompt = np.full(num_tokens, key, np.int32)
    tenant = more.get("tenant", "").encode()  # for the worker to see
    return Request(ROUTER, SeqKey(key), f"r{key}", prompt, 1, max_tokens, tenant, **more)


class Worker:
    """Answers one step after the other; every row that may sample does, and none stops."""

    def __init__(self, core: Scheduler, now: float = 0.0) -> None:
        self.core, self.now = core, now
        self.max_paced_tokens: int | None = None
        self.left: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self.tenant: dict[int, str] = {}
        self.service = Counter()  # by tenant: prompt tokens, and output tokens twice
        self.admitted: list[int] = []
        self.chunks: list[dict[int, int]] = []
        self.ends: dict[int, FinishReason] = {}

    def step(self) -> bool:
        plan = self.core.schedule(self.now, self.max_paced_tokens)
        check(self.core)
        self.ends |= {end.seq_key: end.reason for end in self.core.take_expired()}
        if plan is None:
            return False
        for row in plan.released_rows.tolist():
            del self.left[row]
        for new in plan.new_sequences:
            self.left[new.row] = len(new.token_ids) - new.num_computed_tokens
            self.known[new.row] = len(new.token_ids)
            self.most[new.row] = new.max_total_tokens
            self.tenant[new.row] = new.sampling.decode()
        decoding = [r for r, left in self.left.items() if not left and self.known[r] < self.most[r]]
        assert len(decoding) == plan.num_decodes
        chunks = dict(zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True))
        self.chunks.append(chunks)
        for row, count in chunks.items():
            self.left[row] -= count
            self.service[self.tenant[row]] += count
        rows = decoding + [row for row in chunks if not self.left[row]]
        for row in rows:
            self.known[row] += 1
            self.service[self.tenant[row]] += 2
        sampled = np.array(rows, np.int32)
        news = self.core.update(StepOutcome(plan.step_id, sampled, sampled, NONE, NONE))
        self.admitted += [item.seq_key for item in news.admitted]
        self.ends |= {end.seq_key: end.reason for end in news.finished}
        return True

    def run(self) -> list[int]:
        while self.step():
            pass
        return self.admitted


def admission_order(policy, requests, args=NO_ARGS, now=100.0, **overrides) -> list[int]:
    """The keys in the order of admission to one row; `requests` are (arrival, request)."""
    core = make_core(policy, args, **overrides)
    for arrived, item in requests:
        core.submit(item, arrived)
    return Worker(core, now).run()


def test_fcfs_is_by_arrival_whatever_else_they_ask():
    order = admission_order(
        "fcfs",
        [
            (0.0, request(0, tenant="a")),
            (1.0, request(1, priority=9, deadline=200.0)),
            (2.0, request(2, tenant="b")),
        ],
    )
    assert order == [0, 1, 2]


def test_priority_is_by_priority_then_by_arrival():
    requests = [(float(i), request(i, priority=p)) for i, p in enumerate([0, 2, -1, 2, 1])]
    assert admission_order("priority", requests) == [1, 3, 4, 0, 2]


def test_a_waiting_sequence_gains_a_level_in_each_period():
    # 25 s earlier are 2.5 levels: before one that is 2 higher, behind one that is 3 higher
    requests = [
        (0.0, request(0, priority=0)),
        (25.0, request(1, priority=2)),
        (25.0, request(2, priority=3)),
    ]
    assert admission_order("priority", requests, {"aging_s": "10"}) == [2, 0, 1]


def test_aging_ends_the_wait_of_one_that_is_always_overtaken():
    core = make_core("priority", {"aging_s": "10"})
    core.submit(request(0, priority=-1), 0.0)
    worker = Worker(core)
    for second in range(1, 100):  # one higher each second; each takes the one row
        worker.now = float(second)
        core.submit(request(second, priority=1), worker.now)
        worker.step()
        if 0 in worker.admitted:
            break
    assert 20 <= worker.now <= 22, "two levels are two periods"


def test_deadline_is_by_deadline_and_patience_is_one():
    requests = [
        (0.0, request(0)),
        (1.0, request(1, deadline=500.0)),
        (2.0, request(2, deadline=130.0)),
        (3.0, request(3, deadline=110.0)),
    ]
    args = {"patience_s": "120"}
    assert admission_order("deadline", requests, args) == [3, 0, 1, 2]


def test_fair_gives_each_tenant_its_turn():
    """Equal work: one of `a`, one of `b`, however many of `a` came first."""
    requests = [(float(i), request(i, tenant="a")) for i in range(4)]
    requests += [(9.0, request(9, tenant="b")), (10.0, request(10, tenant="b"))]
    assert admission_order("fair", requests) == [0, 9, 1, 10, 2, 3]


def test_fair_weighs_what_was_served():
    """`a` asks for 1 + 2·8 an output, `b` for 4 + 2·1 each: three of `b` cost one of `a`."""
    requests = [(float(i), request(i, num_tokens=1, max_tokens=8, tenant="a")) for i in range(3)]
    requests += [(9.0, request(10 + i, tenant="b")) for i in range(6)]
    assert admission_order("fair", requests) == [0, 10, 11, 12, 1, 13, 14, 15, 2]


def test_fair_charges_neither_what_the_cache_has_nor_what_is_computed_again():
    core = make_core("fair", num_blocks=4, max_num_seqs=2)
    served = Counter()
    core._policy.served = lambda account, new, out: served.update({account: new, "out": out})
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
    policy.served("busy", 1000, 0)
    policy.began_waiting("idle")
    assert policy.debt("idle") == 1000
    policy.stopped_waiting("busy")
    policy.served("idle", 500, 0)
    policy.stopped_waiting("idle")
    policy.began_waiting("busy")
    assert policy.debt("busy") == 1500, "as the last that left"


def test_a_tenant_that_took_much_and_left_is_remembered():
    policy = TenantFair()
    policy.began_waiting("steady")
    policy.began_waiting("burst")
    policy.served("burst", 1000, 0)
    policy.stopped_waiting("burst")
    policy.began_waiting("burst")
    assert (policy.debt("steady"), policy.debt("burst")) == (0, 1000)


def test_tenants_that_come_once_are_forgotten_and_those_that_took_much_are_not():
    policy = TenantFair()
    policy.served("burst", 1_000_000, 0)
    for index in range(10_000):
        policy.began_waiting(f"tenant {index}")
        policy.served(f"tenant {index}", 10, 0)
        policy.stopped_waiting(f"tenant {index}")
    assert len(policy._counters) <= 1026
    assert policy.debt("burst") == 1_000_000


def test_combined_is_by_level_then_tenant_then_deadline():
    requests = [
        (1.0, request(0, tenant="a")),
        (2.0, request(1, tenant="a", deadline=105.0)),
        (3.0, request(2, tenant="b")),
        (4.0, request(3, tenant="b", deadline=110.0)),
        (5.0, request(4, tenant="a", priority=1)),
    ]
    # `a` has been served 4 when level 0 begins
    order = admission_order("priority+fair+deadline", requests, {"patience_s": "1000"})
    assert order == [4, 3, 1, 2, 0]


def test_combined_ages_in_whole_periods():
    requests = [
        (0.0, request(0, tenant="a", priority=0)),
        (29.0, request(1, tenant="b", priority=1)),  # period 2 of 10 s, one level higher
        (30.0, request(2, tenant="b", priority=4)),  # period 3, four levels higher
    ]
    order = admission_order("priority+fair", requests, {"aging_s": "10"})
    assert order == [2, 0, 1]


@pytest.mark.parametrize(
    ("policy", "worst"),
    [("fcfs", 3), ("priority", 1), ("deadline", 2), ("fair", 2)],
)
def test_the_worst_by_the_policy_is_preempted(policy, worst):
    # all prefill in step 1 and fill a block each; all need one more in the same step
    core = make_core(policy, num_blocks=7, max_num_seqs=4)
    core.submit(request(0, tenant="a", max_tokens=8, priority=1, deadline=40.0), 0.0)
    core.submit(request(1, tenant="b", max_tokens=8, priority=0, deadline=30.0), 1.0)
    core.submit(request(2, tenant="a", max_tokens=8, priority=1, deadline=50.0), 2.0)
    core.submit(request(3, tenant="b", max_tokens=8, priority=2, deadline=20.0), 3.0)
    if policy == "fair":
        core._policy.served("a", 100, 0)
    worker = Worker(core, now=3.0)
    worker.step()
    assert core.load().num_preemptions == 0
    worker.step()
    assert core.load().num_preemptions == 1
    (waiting,) = [seq for seq in core._live if seq in core._waiting]
    assert waiting.seq_key == worst
    worker.run()
    assert set(worker.ends.values()) == {FinishReason.LENGTH}


# --- fairness -------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 8))
BACKLOG = st.lists(SIZES, min_size=30, max_size=40)


def gap_between_tenants(policy, backlogs, num_rows) -> float:
    """The greatest difference of service while both tenants have work waiting."""
    core = make_core(policy, max_num_seqs=num_rows, max_num_batched_tokens=32)
    for tenant, backlog in backlogs.items():
        for prompt, output in backlog:
            key = len(core._live.of_source(ROUTER))
            item = request(key, num_tokens=prompt, max_tokens=output, tenant=tenant)
            core.submit(item, float(key))
    worker = Worker(core)
    worst = 0.0
    while worker.step():
        live = core._live.of_source(ROUTER)
        if {seq.request.tenant for seq in live if seq in core._waiting} != {"a", "b"}:
            break
        worst = max(worst, abs(worker.service["a"] - worker.service["b"]))
    return worst


def most_apart(num_rows) -> int:
    """Twice the most that a batch holds, however much either asks for: the paper's bound."""
    return 2 * (12 + 2 * num_rows * 8)


@given(a=BACKLOG, b=BACKLOG, num_rows=st.integers(1, 4))
def test_two_backlogged_tenants_are_served_alike(a, b, num_rows):
    assert gap_between_tenants("fair", {"a": a, "b": b}, num_rows) <= most_apart(num_rows)


def test_fcfs_serves_one_backlog_after_the_other():
    backlog = [(12, 8)] * 40
    assert gap_between_tenants("fcfs", {"a": backlog, "b": backlog}, 4) > 5 * most_apart(4)


# --- deadlines ------------------------------------------------------------------------------------


def test_one_that_waits_past_its_deadline_ends_without_a_block():
    core = make_core()
    core.submit(request(0, max_tokens=8), 0.0)
    core.submit(request(1, deadline=5.0), 1.0)
    core.submit(request(2, deadline=5.5), 2.0)
    worker = Worker(core, now=4.9)
    worker.step()
    assert worker.ends == {}
    worker.now = 5.0
    worker.step()
    assert worker.ends == {1: FinishReason.DEADLINE}
    assert (worker.admitted, core.load().num_waiting) == ([0], 1)
    worker.now = 6.0
    worker.run()
    assert worker.admitted == [0]
    assert worker.ends[2] is FinishReason.DEADLINE


def test_siblings_of_an_expired_sequence_expire_with_it():
    core = make_core()
    prompt = np.array([1, 2, 3], np.int32)
    core.submit(Request(ROUTER, SeqKey(0), "r", prompt, 3, 5, b"", deadline=1.0), 0.0)
    assert core.schedule(1.0) is None
    assert [end.seq_key for end in core.take_expired()] == [0, 1, 2]
    assert core.take_expired() == ()
    check(core)


def test_what_runs_is_not_expired():
    core = make_core()
    core.submit(request(0, max_tokens=4, deadline=1.0), 0.0)
    worker = Worker(core, now=0.5)
    worker.step()
    worker.now = 2.0
    worker.run()
    assert worker.ends == {0: FinishReason.LENGTH}


RATES = Rates(prefill_tokens_per_s=1000.0, step_s=0.02)


@pytest.mark.parametrize(
    ("num_tokens", "min_tokens", "left_s", "problem"),
    [
        (100, 0, 0.13, None),  # 0.1 s + one step
        (100, 0, 0.11, r"100 prompt tokens at 1000 tokens/s and 1 steps of 0.0200 s take 0.120 s"),
        (100, 10, 0.31, None),
        (100, 10, 0.29, r"deadline is in 0.290 s .* 10 steps .* take 0.300 s"),
        (1, 0, -0.25, "passed 0.250 s ago"),
    ],
)
def test_what_cannot_be_done_in_time_is_refused(num_tokens, min_tokens, left_s, problem):
    core = make_core()
    item = request(
        1, num_tokens=num_tokens, max_tokens=20, min_tokens=min_tokens, deadline=50 + left_s
    )
    if problem is None:
        core.check_deadline(item, 50.0, RATES)
    else:
        with pytest.raises(DeadlineError, match=problem):
            core.check_deadline(item, 50.0, RATES)


def test_nothing_is_refused_for_rates_that_are_not_known():
    item = request(1, num_tokens=100, deadline=0.001)
    for rates in (Rates(), Rates(step_s=1.0), Rates(prefill_tokens_per_s=1.0)):
        make_core().check_deadline(item, 0.0, rates)


def test_what_the_prefix_cache_has_takes_no_time():
    core = make_core()
    item = request(1, num_tokens=101, deadline=0.05)
    with pytest.raises(DeadlineError, match="101 prompt tokens"):
        core.check_deadline(item, 0.0, RATES)
    core.submit(request(1, num_tokens=100), 0.0)
    Worker(core).run()
    core.check_deadline(item, 0.0, RATES)


# --- long prompts ---------------------------------------------------------------------------------


def test_a_long_prompt_leaves_half_of_each_step_to_short_ones():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=60), 0.0)
    for key in range(1, 4):
        core.submit(request(key, num_tokens=4), 1.0)
    worker = Worker(core)
    worker.step()
    assert worker.chunks[0] == {0: 8, 1: 4, 2: 4}


def test_what_short_ones_leave_a_long_prompt_gets():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=60), 0.0)
    core.submit(request(1, num_tokens=3), 1.0)
    worker = Worker(core)
    worker.step()
    worker.step()
    assert worker.chunks[:2] == [{0: 13, 1: 3}, {0: 16}]


def test_what_is_left_over_does_not_exceed_the_largest_chunk():
    core = make_core(max_num_batched_tokens=16, long_prefill_threshold=8, max_prefill_chunk=10)
    core.submit(request(0, num_tokens=60), 0.0)
    worker = Worker(core)
    worker.step()
    assert worker.chunks == [{0: 10}]


def test_short_prompts_overtake_a_long_one_that_waits_for_another():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=60), 0.0)
    core.submit(request(1, num_tokens=40), 1.0)
    core.submit(request(2, num_tokens=4), 2.0)
    worker = Worker(core)
    assert worker.run() == [0, 2, 1]


def test_two_long_prompts_at_once_if_so_many_are_allowed():
    core = make_core(
        max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8, max_long_prefills=2
    )
    core.submit(request(0, num_tokens=60), 0.0)
    core.submit(request(1, num_tokens=40), 1.0)
    worker = Worker(core)
    worker.step()
    assert set(worker.chunks[0]) == {0, 1}


def test_a_stream_of_short_prompts_does_not_hold_up_a_long_one():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=60), 0.0)
    worker = Worker(core)
    for key in range(1, 100):
        core.submit(request(2 * key, num_tokens=8), 1.0)
        core.submit(request(2 * key + 1, num_tokens=8), 1.0)
        worker.step()
        if 0 in worker.ends:
            break
    assert key <= 60 / 8 + 2, "at least half of each step is its"


def test_a_long_prompt_that_is_cached_waits_for_no_other():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(1, num_tokens=40), 0.0)
    worker = Worker(core)
    worker.run()
    core.submit(request(0, num_tokens=60), 1.0)
    core.submit(request(1, num_tokens=44), 2.0)
    worker.step()
    assert worker.admitted == [1, 0, 1]


def test_beside_decodes_a_long_prompt_computes_no_more_than_is_paced():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=4, max_tokens=40), 0.0)
    worker = Worker(core)
    worker.step()
    core.submit(request(1, num_tokens=40), 1.0)
    core.submit(request(2, num_tokens=6), 1.0)
    worker.max_paced_tokens = 3
    while 1 not in worker.ends:
        worker.step()
    assert worker.chunks[1] == {1: 3, 2: 6}, "a short one is not held back"
    assert [chunk[1] for chunk in worker.chunks[1:] if 1 in chunk] == [3] * 13 + [1], (
        "neither is its end computed at once"
    )


def test_nobody_decodes_and_nothing_is_paced():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(1, num_tokens=40), 0.0)
    worker = Worker(core)
    worker.max_paced_tokens = 3
    worker.step()
    assert worker.chunks == [{0: 16}]


# --- policies from outside ------------------------------------------------------------------------

OUTSIDE = '''
from scheduler_svc.core.policies.policy import Place, Policy
from scheduler_svc.core.request import Request


class ShortestFirst(Policy):
    """Short prompts first; a token counts as much as `s_per_token` seconds of waiting."""

    def __init__(self, s_per_token: float = 0.1) -> None:
        self._s_per_token = s_per_token

    def place(self, request: Request, arrived: float) -> Place:
        return Place((arrived + self._s_per_token * len(request.prompt_token_ids),))
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / "house_rules.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "house_rules.ShortestFirst"
    sys.modules.pop("house_rules", None)


def test_a_policy_from_outside_the_tree(outside):
    requests = [(0.0, request(0, num_tokens=30)), (2.0, request(1, num_tokens=4))]
    assert admission_order(outside, requests) == [1, 0]
    assert admission_order(outside, requests, {"s_per_token": "0.01"}) == [0, 1]


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("first", {}, "policy is 'first'; it must be fcfs"),
        ("", {}, "policy is ''"),
        ("fair+priority", {}, "in this order such as priority"),
        ("fair+fair", {}, "in this order"),
        ("fcfs", {"aging_s": "1"}, "Fcfs takes no argument 'aging_s'"),
        ("priority", {"aging_s": "0"}, "aging_s is 0.0; it must be a number above 0"),
        ("priority", {"aging_s": "soon"}, "aging_s is 'soon'; it must be of type float"),
        ("priority+fair", {"patience_s": "1"}, "takes no argument 'patience_s'"),
        ("nowhere.Policy", {}, "cannot be imported"),
        ("collections.Counter", {}, "must be a subclass"),
    ],
)
def test_a_policy_that_cannot_be_is_named(name, args, problem):
    with pytest.raises(ValueError, match=problem):
        make_policy(name, args.items())


def test_places_of_one_policy_compare():
    """Every built-in gives keys that sort, whatever a request asks."""
    for name in ("fcfs", "priority", "fair", "deadline", "priority+fair+deadline"):
        policy = make_policy(name, ())
        assert isinstance(policy, Policy)
        items = [request(i, priority=i % 3 - 1, deadline=9.0 if i % 2 else None) for i in range(6)]
        places = [policy.place(item, float(i)) for i, item in enumerate(items)]
        ordered = sorted(places, key=lambda place: (place.band, place.key))
        assert all((a.band, a.key) <= (b.band, b.key) for a, b in pairwise(ordered))
