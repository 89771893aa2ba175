"""Two cores copy blocks to each other and hand requests over while everything else continues."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contract.step import Result
from scheduler_svc.core.handover.copies import Loan, Room
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.errors import (
    MigrationRefusedError,
    QueueFullError,
    RequestTooLongError,
)
from scheduler_svc.core.interface.identity import identity
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.invariants import check
from scheduler_svc.core.scheduler import Scheduler
from tests.property.configs import CHOICES, tiny_config
from tests.property.disk import BROKEN
from tests.property.oracle import Oracle
from tests.property.test_scheduler import PROMPTS
from tests.property.worker import FakeWorker

SIDES = st.integers(0, 1)


@dataclass
class Side:
    """A core and its worker."""

    config: SchedulerConfig
    core: Scheduler = field(init=False)
    worker: FakeWorker = field(init=False)
    unanswered: deque[Result] = field(default_factory=deque)

    def __post_init__(self):
        self.core = Scheduler(self.config)
        self.worker = FakeWorker(self.config)


@dataclass
class Copy:
    source: int
    loan: Loan
    room: Room
    has_contents: bool = False


class CopiesMachine(RuleBasedStateMachine):
    @initialize(**CHOICES)
    def start(self, **choices):
        choices |= {"num_draft_tokens": 0, "num_more_blocks": None, "num_disk_blocks": 0}
        choices["num_host_blocks"] += 4
        config = tiny_config(**choices)
        self.sides = [Side(config), Side(config)]
        self.oracle = Oracle()
        for side in self.sides:
            side.worker.identities = self.sides[0].worker.identities
        self.next_key = 0
        self.copies: list[Copy] = []

    @rule(i=SIDES, prompt=PROMPTS, n=st.integers(1, 2), max_tokens=st.integers(1, 10))
    def submit(self, i, prompt, n, max_tokens):
        token_ids = np.array(prompt, np.int32)
        key = SeqKey(self.next_key)
        request = Request(SourceId(0), key, f"r{key}", token_ids, n, max_tokens, b"")
        try:
            self.sides[i].core.submit(request, 0.0)
        except (RequestTooLongError, QueueFullError):
            return
        self.oracle.submit(request)
        self.sides[0].worker.identities.update(identity(request, index) for index in range(n))
        self.next_key += n

    @rule(i=SIDES, steps=st.integers(1, 8))
    def run(self, i, steps):
        for _ in range(steps):
            self.step(self.sides[i])

    def step(self, side):
        for _ in range(2):
            if (plan := side.core.schedule(0.0)) is not None:
                side.unanswered.append(side.worker.execute(plan))
        if side.unanswered:
            self.oracle.check(side.core.update(side.unanswered.popleft()))
        check(side.core)

    def progress(self, i, data):
        """Return the computed tokens of a running request of a side; None if nothing runs."""
        if not (names := self.sides[i].core.moves.find_running()):
            return None
        return self.sides[i].core.moves.progress(*data.draw(st.sampled_from(names)))

    @rule(i=SIDES, data=st.data())
    def begin_copy(self, i, data):
        progress = self.progress(i, data)
        if progress is None or not progress.can_copy:
            return
        taking = self.sides[1 - i].core
        missing = taking.copies.missing(progress.hashes)[: taking.copies.num_expectable]
        loan = self.sides[i].core.lend(missing)
        room = taking.expect(loan.hashes)
        assert room.hashes == loan.hashes == tuple(missing[: len(loan.hashes)])
        self.copies.append(Copy(i, loan, room))

    @precondition(lambda self: self.copies)
    @rule()
    def copy_contents(self):
        """Copy the KV as soon as both sides are ready; before that, blocks may hold anything."""
        for copy in self.copies:
            giving, taking = self.sides[copy.source], self.sides[1 - copy.source]
            if (
                copy.loan.ready_step > giving.core.steps.last_answered
                or copy.room.ready_step > taking.core.steps.last_answered
            ):
                continue
            contents = [giving.worker.host[block] for block in copy.loan.host_block_ids]
            assert all(BROKEN not in content for content in contents)
            targets = copy.room.host_block_ids
            taking.worker.host.update(zip(targets, contents, strict=True))
            for target in targets:
                taking.worker.host_labels.pop(target, None)
            copy.has_contents = True

    @precondition(lambda self: self.copies)
    @rule(index=st.integers(0, 3))
    def end_copy(self, index):
        copy = self.copies.pop(index % len(self.copies))
        self.sides[copy.source].core.end_loan(copy.loan.loan_id)
        num_arrived = len(copy.loan.hashes) if copy.has_contents else 0
        self.sides[1 - copy.source].core.receive(copy.room.room_id, num_arrived)

    @rule(i=SIDES, data=st.data(), copies_first=st.booleans())
    def hand_over(self, i, data, copies_first):
        """Move a request without its KV; the target may have some of its blocks."""
        if copies_first:
            self.begin_copy(i, data)
            self.step(self.sides[i])
            self.step(self.sides[1 - i])
            self.copy_contents()
            while self.copies:
                self.end_copy(0)
        progress = self.progress(i, data)
        if progress is None or not progress.decodes:
            return
        giving, taking = self.sides[i].core, self.sides[1 - i].core
        live = progress.live
        export = giving.begin_export(live.source, live.first_seq_key, keeps_kv=False)
        if any(seq.host_block_ids for seq in export.moved.sequences):
            # the request waited while it held its KV
            giving.end_export(export.export_id, leaves=False)
            return
        try:
            room = taking.begin_import(export.moved)
        except MigrationRefusedError:
            giving.end_export(export.export_id, leaves=False)
            return
        taking.end_import(room.import_id, giving.end_export(export.export_id, leaves=True))

    @precondition(lambda self: self.oracle.live)
    @rule(i=SIDES, data=st.data())
    def cancel(self, i, data):
        source, key = data.draw(st.sampled_from(sorted(self.oracle.live)))
        if ends := self.sides[i].core.cancel(SourceId(source), [key]):
            self.oracle.cancel((source, key), ends)

    @invariant()
    def counts_are_right(self):
        for side in getattr(self, "sides", ()):
            check(side.core)

    def teardown(self):
        if not hasattr(self, "sides"):
            return
        while self.copies:
            self.end_copy(0)
        for _ in range(400):
            if not self.oracle.live:
                break
            for side in self.sides:
                self.step(side)
        assert not self.oracle.live, "a request was lost"
        for side in self.sides:
            for _ in range(4):
                self.step(side)
            core = side.core
            num_null = not core.groups.is_plain
            assert core.tier.pool.num_available == core.tier.pool.num_blocks
            assert core.pool.num_available == core.pool.num_blocks - num_null


TestCopies = CopiesMachine.TestCase
