"""Examples of policies: the order of admission, and the preempted sequence."""

import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from policy_driver import ROUTER, Worker, admission_order, make_core, request

from scheduler_svc.core.interface.request import FinishReason
from scheduler_svc.core.policies.make_policy import make_policy
from scheduler_svc.core.policies.policy import Policy


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
    # 25 s count as 2.5 levels: it is served before one that is 2 higher, after one that is 3 higher
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
    # each second a request of a higher priority arrives, and takes the only row
    for second in range(1, 100):
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


POLICIES = ["fcfs", "fair", "deadline", "fair+deadline", "priority", "priority+fair"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_lowest_priority_comes_last_by_every_policy(policy):
    requests = [
        (0.0, request(0, tenant="a", priority=-100, deadline=500.0)),
        (1.0, request(1, tenant="b", priority=0)),
        (2.0, request(2, tenant="b", priority=0)),
    ]
    assert admission_order(policy, requests) == [1, 2, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_lowest_priority_is_preempted_first_by_every_policy(policy):
    core = make_core(policy, num_blocks=7, max_num_seqs=4)
    for key, priority in enumerate((0, -100, 0, 0)):
        core.submit(request(key, max_tokens=8, priority=priority, deadline=50.0), float(key))
    worker = Worker(core, now=3.0)
    worker.step()
    worker.step()
    (waiting,) = [seq for seq in core.live if seq in core.queue]
    assert waiting.seq_key == 1
    worker.run()
    assert set(worker.ends.values()) == {FinishReason.LENGTH}


def test_prompts_of_the_lowest_priority_hardly_delay_others():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=33)
    core.submit(request(0, max_tokens=20), 0.0)
    worker = Worker(core)
    worker.step()
    core.submit(request(1, num_tokens=40, priority=-100), 1.0)
    core.submit(request(2, num_tokens=10), 2.0)
    core.submit(request(3, num_tokens=40, priority=-100), 3.0)
    worker.chunks.clear()
    for _ in range(3):
        worker.step()
    assert [sum(chunk.values()) for chunk in worker.chunks] == [10 + 4, 4, 4]  # an eighth of 32
    assert worker.admitted == [0, 2, 1], "together; 3 would hold blocks without computing"
    core.cancel(ROUTER, [0])
    worker.run()  # alone, it gets the whole of each step
    assert set(worker.ends.values()) == {FinishReason.LENGTH}


def test_prompts_of_the_lowest_priority_get_all_that_delays_nobody():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=33)
    core.submit(request(0, num_tokens=40, max_tokens=9, priority=-100), 0.0)
    core.submit(request(1, num_tokens=4), 1.0)
    worker = Worker(core)
    worker.step()
    assert worker.chunks == [{0: 4, 1: 29}], "nothing decodes"
    worker.step()
    core.submit(request(2, num_tokens=40, priority=-100), 2.0)
    worker.step()
    assert worker.chunks[-1] == {0: 32}, "only a batch decodes"


def test_an_output_of_the_lowest_priority_that_forks_is_no_prompt():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=17, max_prefill_chunk=4)
    core.submit(request(0, max_tokens=9), 0.0)
    core.submit(request(1, num_tokens=40, priority=-100), 1.0)
    core.submit(replace(request(2, num_tokens=2, priority=-100, max_tokens=9), n=2), 2.0)
    worker = Worker(core)
    worker.step()
    assert worker.chunks == [{0: 4, 1: 4, 2: 2}]
    worker.step()
    assert worker.chunks[-1] == {1: 2, 3: 1}, "the batch has an eighth of the step"


@pytest.mark.parametrize(
    ("policy", "worst"),
    [("fcfs", 3), ("priority", 1), ("deadline", 2), ("fair", 2)],
)
def test_the_worst_by_the_policy_is_preempted(policy, worst):
    # all prefill in step 1 and fill one block; all need their second block in the same step
    core = make_core(policy, num_blocks=7, max_num_seqs=4)
    core.submit(request(0, tenant="a", max_tokens=8, priority=1, deadline=40.0), 0.0)
    core.submit(request(1, tenant="b", max_tokens=8, priority=0, deadline=30.0), 1.0)
    core.submit(request(2, tenant="a", max_tokens=8, priority=1, deadline=50.0), 2.0)
    core.submit(request(3, tenant="b", max_tokens=8, priority=2, deadline=20.0), 3.0)
    if policy == "fair":
        core.policy.charge("a", 100, 0)
    worker = Worker(core, now=3.0)
    worker.step()
    assert core.load().num_preemptions == 0
    worker.step()
    assert core.load().num_preemptions == 1
    (waiting,) = [seq for seq in core.live if seq in core.queue]
    assert waiting.seq_key == worst
    worker.run()
    assert set(worker.ends.values()) == {FinishReason.LENGTH}


# --- policies from outside ------------------------------------------------------------------------

OUTSIDE = '''
from scheduler_svc.core.policies.policy import Policy, Rank
from scheduler_svc.core.interface.request import Request


class ShortestFirst(Policy):
    """Short prompts first; a token counts as much as `s_per_token` seconds of waiting."""

    def __init__(self, s_per_token: float = 0.1) -> None:
        self._s_per_token = s_per_token

    def rank(self, request: Request, arrived: float) -> Rank:
        return Rank((arrived + self._s_per_token * len(request.prompt_token_ids),))
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


def test_ranks_of_one_policy_compare():
    """The ranks of every built-in policy are comparable, for any requests."""
    for name in ("fcfs", "priority", "fair", "deadline", "priority+fair+deadline"):
        policy = make_policy(name, ())
        assert isinstance(policy, Policy)
        items = [request(i, priority=i % 3 - 1, deadline=9.0 if i % 2 else None) for i in range(6)]
        ranks = [policy.rank(item, float(i)) for i, item in enumerate(items)]
        ordered = sorted(ranks, key=lambda rank: (rank.level, rank.key))
        assert all((a.level, a.key) <= (b.level, b.key) for a, b in pairwise(ordered))
