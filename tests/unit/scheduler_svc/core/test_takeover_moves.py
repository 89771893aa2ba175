"""The scheduler dies at each stage of a request's move between workers.

There are two workers that record their KV, and a core for each; both cores are replaced together.
"""

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.request import OutputSoFar, Request, SeqKey, SourceId
from scheduler_svc.core.invariants import check
from scheduler_svc.core.scheduler import Scheduler
from tests.property.oracle import expected_output
from tests.property.worker import FakeWorker

CONFIG = SchedulerConfig(
    num_blocks=16,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    watermark=0.0,
    num_host_blocks=16,
    claim_s=3.0,
    preemption_mode=PreemptionMode.SWAP,
)
MAX_TOKENS, NUM_BEFORE = 30, 7
PROMPT = next(
    prompt
    for tail in range(64)
    if len(expected_output("", 0, prompt := [0, 1, 1, *map(int, f"{tail:06b}")], MAX_TOKENS)) > 20
)
REQUEST = Request(
    SourceId(1), SeqKey(0), "moving", np.array(PROMPT, np.int32), 1, MAX_TOKENS, sampling=b""
)


class Side:
    """A worker and its core."""

    def __init__(self, received: list[int], *, caching: bool):
        self.config = replace(CONFIG, enable_prefix_caching=caching)
        self.worker, self.core, self.received = (
            FakeWorker(self.config),
            Scheduler(self.config),
            received,
        )

    def step(self, now=0.0):
        if (plan := self.core.schedule(now)) is not None:
            self.receive(self.core.update(self.worker.execute(plan)))
        check(self.core)
        return plan is not None

    def receive(self, events):
        if events is not None:
            self.received += events.token_ids.tolist()

    def replace_core(self):
        self.core = Scheduler(self.config)
        self.core.inherit(self.worker.hand_over(), 0.0)


def take_contents(giving, taking, export, room):
    for source, target in zip(export.moved.host_block_ids, room.host_block_ids, strict=True):
        taking.worker.host[target] = giving.worker.host[source]
        taking.worker.host_labels.pop(target, None)


def move(giving, taking, stage):
    """Do a move up to a stage."""
    export = giving.core.begin_export(REQUEST.source, REQUEST.first_seq_key)
    room = taking.core.begin_import(export.moved)
    if stage == "asked for":
        return
    giving.step()
    taking.step()
    if stage == "swapped out":
        return
    take_contents(giving, taking, export, room)
    if stage == "copied":
        return
    indices = giving.core.end_export(export.export_id, leaves=True)
    taking.core.end_import(room.import_id, indices)
    while stage == "arrived and running" and taking.core.load().num_running == 0:
        taking.step()
    if stage == "arrived and running":
        taking.step()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "stage", ["asked for", "swapped out", "copied", "arrived and waiting", "arrived and running"]
)
def test_a_request_that_moves_goes_on_without_computing_anything_again(stage, caching):
    received: list[int] = []
    sides = [Side(received, caching=caching) for _ in range(2)]
    giving, taking = sides
    giving.core.submit(REQUEST, 0.0)
    while len(received) < NUM_BEFORE:
        giving.step()
    move(giving, taking, stage)
    for side in sides:
        side.replace_core()
        check(side.core)
    num_computed = sum(side.worker.num_computed_tokens for side in sides)
    num_before = len(received)
    outputs = (OutputSoFar(np.array(received, np.int32), finished=False),)
    again = replace(REQUEST, outputs=outputs)
    its_own = max(sides, key=lambda side: side.core.takeover.num_held_tokens(again))
    its_own.core.submit(again, 0.0)
    its_own.receive(its_own.core.takeover.take_adopted())
    while its_own.step():
        pass
    assert received == expected_output("", 0, PROMPT, MAX_TOKENS)
    num_new = len(received) - num_before
    assert sum(side.worker.num_computed_tokens for side in sides) - num_computed == num_new
    for side in sides:
        while side.step(now=CONFIG.claim_s):
            pass
        load = side.core.load()
        assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks
        assert load.num_free_host_blocks + load.num_cached_host_blocks == load.num_host_blocks
