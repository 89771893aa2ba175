"""Requests move with their KV while others run: no token is lost or repeated. The core is source
and target of a move at once.
"""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from scheduler_svc.core.handover.moved_request import Export, Import
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.errors import MigrationRefusedError
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SeqStatus
from tests.property.disk import BROKEN
from tests.property.test_scheduler import SchedulerMachine
from tests.property.transitions import OF_MOVES, recorded_transitions


@dataclass
class Move:
    export: Export
    room: Import
    has_contents: bool = False


class MigrationMachine(SchedulerMachine):
    def start_core(self):
        self.config = replace(self.config, num_host_blocks=self.config.num_host_blocks + 8)
        super().start_core()
        self.moves: list[Move] = []

    def forget_moves(self):
        self.moves.clear()

    @property
    def must_go_on(self):
        stays = any(seq.status is not SeqStatus.MIGRATING for seq in self.core.live)
        return super().must_go_on and stays

    @precondition(lambda self: self.oracle.live)
    @rule(data=st.data())
    def begin_move(self, data):
        request = self.oracle.live[data.draw(st.sampled_from(sorted(self.oracle.live)))].request
        try:
            export = self.core.begin_export(request.source, request.first_seq_key)
        except MigrationRefusedError:
            return
        try:
            room = self.core.begin_import(export.moved)
        except MigrationRefusedError:
            assert self.core.end_export(export.export_id, leaves=False)
            return
        self.moves.append(Move(export, room))

    @precondition(lambda self: self.moves)
    @rule()
    def copy_contents(self):
        """Copies the KV as soon as both sides are ready; before that, the blocks may hold
        anything."""
        answered = self.core.steps.last - len(self.core.steps)
        for move in self.moves:
            if max(move.export.ready_step, move.room.ready_step) > answered:
                continue
            sources, targets = move.export.moved.host_block_ids, move.room.host_block_ids
            contents = [self.worker.host[source] for source in sources]
            if any(BROKEN in content for content in contents):
                continue
            self.worker.host.update(zip(targets, contents, strict=True))
            for target in targets:
                self.worker.host_labels.pop(target, None)
            move.has_contents = True

    @precondition(lambda self: any(move.has_contents for move in self.moves))
    @rule()
    def arrive(self):
        move = next(move for move in self.moves if move.has_contents)
        self.moves.remove(move)
        indices = self.core.end_export(move.export.export_id, leaves=True)
        self.core.end_import(move.room.import_id, indices)

    @precondition(lambda self: self.oracle.live)
    @rule(data=st.data())
    def move_at_once(self, data):
        num_moves = len(self.moves)
        self.begin_move(data)
        if len(self.moves) == num_moves:
            return
        move = self.moves[-1]
        for _ in range(8):
            self.copy_contents()
            if move.has_contents:
                self.moves.remove(move)
                self.moves.insert(0, move)
                self.arrive()
                return
            self.run(1)

    @precondition(lambda self: self.moves)
    @rule()
    def abandon(self):
        move = self.moves.pop()
        self.core.end_export(move.export.export_id, leaves=False)
        self.core.end_import(move.room.import_id, ())

    def teardown(self):
        while getattr(self, "moves", None):
            self.abandon()
        super().teardown()


TestMigration = MigrationMachine.TestCase


def test_a_move_makes_each_of_its_transitions():
    room = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 2, "max_model_len": 24}
    core = Scheduler(SchedulerConfig(**room, max_num_batched_tokens=16, num_host_blocks=8))
    prompt = np.zeros(6, np.int32)
    source, key = SourceId(0), SeqKey(0)
    with recorded_transitions() as taken:
        core.submit(Request(source, key, "r", prompt, 1, 8, b""), 0.0)
        core.end_export(core.begin_export(source, key).export_id, leaves=False)
        plan = core.schedule(0.0)
        assert plan is not None
        running = core.begin_export(source, key)
        core.end_export(running.export_id, leaves=False)
        swapped = core.begin_export(source, key)
        core.end_export(swapped.export_id, leaves=True)
    assert taken >= OF_MOVES
