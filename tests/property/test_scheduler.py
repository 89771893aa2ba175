"""The scheduler core against the oracle: in any history, every client gets the right tokens.

`make test` does a short run. For a long one: `pytest tests/property --hypothesis-profile=long`.
"""

from collections import Counter, deque
from dataclasses import replace
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contract.info import MemoryLevel
from contract.sampling import EarlyStopping
from contract.step import Result
from scheduler_svc.core.handover.takeover import REUNION_S
from scheduler_svc.core.interface.errors import (
    QueueFullError,
    RequestTooLongError,
    ResizeRefusedError,
)
from scheduler_svc.core.interface.identity import identity
from scheduler_svc.core.interface.request import BeamParams, Request, SeqKey, SourceId
from scheduler_svc.core.invariants import check
from scheduler_svc.core.scheduler import Scheduler
from tests.property.configs import CHOICES, tiny_config
from tests.property.findable import check_findable
from tests.property.oracle import END, Oracle
from tests.property.worker import SEARCH, FakeWorker

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from(["", "other"])
TENANTS = st.sampled_from(["", "other", "third"])
BEAMS = st.builds(
    BeamParams,
    width=st.integers(2, 3),
    end_token_ids=st.sampled_from([(), (END,)]),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    early_stopping=st.sampled_from(EarlyStopping),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Routers, a scheduler and a worker, with up to two steps between them."""

    num_rule_steps: ClassVar[Counter[str]] = Counter()
    """Rules run since the start, here and in the histories; pytest prints the number at its end."""

    @initialize(disk_failures=st.sampled_from([0.0, 0.0, 0.2]), **CHOICES)
    def start(self, disk_failures, **choices):
        self.config = tiny_config(**choices)
        self.disk_failures = disk_failures
        self.oracle = Oracle()
        self.identities: set[bytes] = set()
        self.next_key = 0
        self.now = 0.0
        self.start_core()

    def start_core(self):
        self.core = Scheduler(self.config)
        self.worker = FakeWorker(self.config)
        self.worker.identities = self.identities
        self.shrinks_to = None
        self.worker.disk.failure_rate = self.disk_failures
        self.unanswered: deque[Result] = deque()
        self.to_resubmit: list[Request] = []
        self.reunion_until = self.now

    @rule(
        source=st.integers(0, 1),
        prompt=PROMPTS,
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 10),
        salt=SALTS,
        priority=st.sampled_from([0, 1, 2, -1, -100]),
        tenant=TENANTS,
        patience=st.none() | st.integers(0, 6),
        pin_s=st.none() | st.integers(1, 8),
    )
    def submit(self, source, prompt, n, max_tokens, salt, priority, tenant, patience, pin_s):
        request = Request(
            source=SourceId(source),
            first_seq_key=SeqKey(self.next_key),
            request_id=f"r{self.next_key}",
            prompt_token_ids=np.array(prompt, np.int32),
            n=n,
            max_tokens=max_tokens,
            sampling=salt.encode(),
            cache_salt=salt,
            priority=priority,
            tenant=tenant,
            deadline=None if patience is None else self.now + patience,
            cache_pin_s=pin_s if self.config.enable_prefix_caching else None,
        )
        self.now += 1
        try:
            self.core.submit(request, self.now)
        except RequestTooLongError:
            assert len(prompt) + max_tokens > self.core.max_request_len
            return
        except QueueFullError:
            assert self.core.load().num_waiting + n > self.config.max_waiting
            return
        self.oracle.submit(request)
        self.identities.update(identity(request, index) for index in range(n))
        self.next_key += n

    @rule(
        source=st.integers(0, 1),
        prompt=PROMPTS,
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 10),
        min_tokens=st.sampled_from([0, 0, 2]),
        salt=SALTS,
        beam=BEAMS,
        patience=st.none() | st.integers(0, 6),
    )
    def search(self, source, prompt, n, max_tokens, min_tokens, salt, beam, patience):
        request = Request(
            source=SourceId(source),
            first_seq_key=SeqKey(self.next_key),
            request_id=f"r{self.next_key}",
            prompt_token_ids=np.array(prompt, np.int32),
            n=min(n, beam.width),
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            sampling=SEARCH + salt.encode(),
            cache_salt=salt,
            beam=beam,
            deadline=None if patience is None else self.now + patience,
        )
        self.now += 1
        try:
            self.core.submit(request, self.now)
        except RequestTooLongError:
            size, num_prompt = self.config.block_size, len(prompt)
            num_unshared = -(-(num_prompt + max_tokens) // size) - num_prompt // size
            assert (
                num_prompt + max_tokens > self.core.max_request_len
                or beam.width > self.config.max_num_seqs
                or num_prompt // size + beam.width * num_unshared > self.num_usable_blocks
                or self.config.has_windows
            )
            return
        except QueueFullError:
            assert self.core.load().num_waiting + request.n > self.config.max_waiting
            return
        self.oracle.submit(request)
        self.next_key += request.n

    @rule(prompts=st.lists(PROMPTS, min_size=3, max_size=4), max_tokens=st.integers(6, 10))
    def submit_a_crowd(self, prompts, max_tokens):
        """Submits more than most pools have room for."""
        for prompt in prompts:
            self.submit(
                0,
                prompt,
                1,
                max_tokens,
                salt="",
                priority=0,
                tenant="",
                patience=None,
                pin_s=None,
            )

    @rule(
        max_paced_tokens=st.none() | st.integers(1, 4),
        max_prompt_tokens=st.none() | st.integers(1, 4),
    )
    def schedule(self, max_paced_tokens=None, max_prompt_tokens=None):
        in_flight = len(self.core.steps)
        plan = self.core.schedule(self.now, max_paced_tokens, max_prompt_tokens)
        self.oracle.expire(self.core.take_expired(), self.now)
        if plan is not None:
            self.unanswered.append(self.worker.execute(plan))
            assert not self.core.preemption.has_too_many
        elif in_flight == 0:
            assert not self.must_go_on, (
                "nothing is in flight, nothing is planned, and not all is done"
            )

    @property
    def must_go_on(self):
        """Whether there is anything to plan or to wait for."""
        is_kept = self.core.takeover.unclaimed and self.now < self.reunion_until
        return bool(self.oracle.live) and not self.to_resubmit and not is_kept

    @precondition(lambda self: self.unanswered)
    @rule()
    def update(self):
        self.oracle.check(self.core.update(self.unanswered.popleft()))

    @precondition(lambda self: self.oracle.live)
    @rule(steps=st.integers(2, 16))
    def run(self, steps):
        """Run steps like the engine: two in flight, then wait for a result."""
        for _ in range(steps):
            self.schedule()
            self.schedule()
            if self.unanswered:
                self.update()
            check(self.core)

    @precondition(lambda self: self.oracle.live)
    @rule(level=st.sampled_from(MemoryLevel))
    def press(self, level):
        """Change the memory level; the last level stays until the end."""
        self.core.set_memory_level(level)
        self.now += 5 * (level is MemoryLevel.CRITICAL)

    @precondition(lambda self: self.oracle.live)
    @rule()
    def defragment(self):
        self.core.defragment()

    @property
    def num_usable_blocks(self):
        return self.shrinks_to or self.worker.num_blocks

    # The core does not know the size of requests that routers will submit again later.
    @precondition(
        lambda self: (
            self.config.max_num_blocks is not None and not (self.shrinks_to or self.to_resubmit)
        )
    )
    @rule(share=st.floats(0, 1))
    def resize(self, share):
        """Resize the pool: the worker grows first, the scheduler shrinks first."""
        before = self.worker.num_blocks
        num_blocks = round(1 + share * (self.config.max_num_blocks - 1))
        try:
            self.core.resizing.check(num_blocks)
        except ResizeRefusedError:
            assert num_blocks < before
            return
        if num_blocks >= before:
            self.worker.resize(num_blocks)
            self.core.resize(num_blocks)
        else:
            self.core.shrink(num_blocks)
            self.shrinks_to = num_blocks

    @precondition(lambda self: self.shrinks_to and self.core.resizing.is_shrunk)
    @rule(can_shrink=st.booleans())
    def end_shrinking(self, can_shrink):
        """End shrinking: the worker frees the memory, or cannot."""
        for outcome in self.unanswered:
            touched = self.worker.touched[outcome.step_id]
            assert all(block < self.shrinks_to for block in touched), "a step in flight needs it"
        if can_shrink:
            self.worker.resize(self.shrinks_to)
        self.core.resize(self.worker.num_blocks)
        self.shrinks_to = None

    @precondition(lambda self: self.core.load().num_pinned_blocks)
    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.core.pins.owned)
    @rule(data=st.data())
    def unpin(self, data):
        tenant, name = data.draw(st.sampled_from(sorted(self.core.pins.owned)))
        self.core.unpin(tenant, name)
        assert (tenant, name) not in self.core.pins.owned

    @precondition(lambda self: self.oracle.live)
    @rule(data=st.data())
    def cancel(self, data):
        self.cancel_one(*data.draw(st.sampled_from(sorted(self.oracle.live))))

    def cancel_one(self, source, key):
        self.resubmit_all()
        if (source, key) in self.oracle.live:
            self.oracle.cancel((source, key), self.core.cancel(SourceId(source), [key, 10_000]))

    @precondition(lambda self: len(self.oracle.live) > 3)
    @rule(source=st.integers(0, 1))
    def lose_source(self, source):
        self.core.cancel_source(SourceId(source))
        self.oracle.lose(source)

    @precondition(lambda self: self.core.load().num_swapped_out_blocks)
    @rule(every=st.integers(1, 3))
    def corrupt_host_blocks(self, every):
        self.worker.corrupt_host(range(0, self.config.num_host_blocks, every))

    @precondition(lambda self: self.core.load().num_stored_blocks)
    @rule(every=st.integers(1, 3))
    def corrupt_disk_blocks(self, every):
        self.worker.disk.corrupt(range(0, self.config.num_disk_blocks, every))

    @precondition(lambda self: self.config.num_disk_blocks)
    @rule(ends_per_step=st.integers(0, 4), seed=st.integers(0, 3))
    def change_the_disks_pace(self, ends_per_step, seed):
        self.worker.disk.ends_per_step = ends_per_step
        self.worker.disk.dice.seed(seed)

    @precondition(lambda self: len(self.oracle.live) > 2)
    @rule()
    def lose_worker(self):
        self.resubmit_all()
        requests = self.core.drain()
        self.config = replace(self.config, num_blocks=self.worker.num_blocks)
        self.start_core()
        for request in requests:
            self.core.submit(request, self.now)

    @precondition(lambda self: len(self.oracle.live) > 1)
    @rule(lost_source=st.sampled_from([None, None, 0, 1]), num_late=st.integers(0, 2))
    def lose_scheduler(self, lost_source, num_late):
        """Replace the scheduler; the routers submit their requests again, some of them late."""
        if lost_source is not None:
            self.oracle.lose(lost_source)
        self.resubmit_all()  # left from the previous restart
        self.config = replace(self.config, num_blocks=self.worker.num_blocks)
        self.core = Scheduler(self.config)
        self.shrinks_to = None
        self.forget_moves()
        self.core.inherit(self.worker.hand_over(), self.now)
        self.reunion_until = self.now + REUNION_S
        check(self.core)
        self.unanswered.clear()
        self.to_resubmit = self.oracle.resubmittable()
        while len(self.to_resubmit) > num_late:
            self.resubmit(self.to_resubmit.pop(0))

    def forget_moves(self):
        """Forget the moves of the lost scheduler."""

    @precondition(lambda self: self.to_resubmit)
    @rule()
    def resubmit_all(self):
        while self.to_resubmit:
            self.resubmit(self.to_resubmit.pop())

    def resubmit(self, request):
        if (request := self.oracle.without_ended(request)) is None:
            return
        try:
            self.core.submit(request, self.now)
        except QueueFullError:
            assert not request.outputs
            for key in range(request.first_seq_key, request.first_seq_key + request.n):
                del self.oracle.live[request.source, key]
        if (events := self.core.takeover.take_adopted()) is not None:
            self.oracle.check(events)
        check(self.core)

    @invariant()
    def books_are_right(self):
        if hasattr(self, "core"):
            self.check_books()
            self.num_rule_steps["state machine"] += 1

    def check_books(self):
        check(self.core)
        check_findable(self.core, self.worker)

    def teardown(self):
        """Run until all sequences have ended, and check that no block is held."""
        if not hasattr(self, "core"):
            return
        self.resubmit_all()
        self.now += self.config.claim_s
        for _ in range(3_000):
            if not self.oracle.live and not self.unanswered:
                break
            self.schedule()
            if self.unanswered:
                self.update()
        assert not self.oracle.live
        self.now += self.config.claim_s
        while (plan := self.core.schedule(self.now)) is not None:
            self.core.update(self.worker.execute(plan))
        assert not self.worker.rows
        if self.shrinks_to:
            assert self.core.resizing.is_shrunk, (
                "nothing is to do, and blocks are still on their way out"
            )
            self.end_shrinking(can_shrink=True)
        load = self.core.load()
        num_free = load.num_free_blocks + load.num_cached_blocks
        assert num_free + load.num_pinned_blocks == load.num_blocks
        assert load.num_free_host_blocks + load.num_cached_host_blocks == load.num_host_blocks
        assert load.num_free_disk_blocks + load.num_cached_disk_blocks == load.num_disk_blocks
        check(self.core)


TestScheduler = SchedulerMachine.TestCase
