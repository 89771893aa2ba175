"""Replaces a scheduler core, with a worker whose KV records its context."""

from dataclasses import replace

import numpy as np

from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.events import Admitted, Finished
from scheduler_svc.core.interface.request import (
    BeamParams,
    FinishReason,
    OutputSoFar,
    Request,
    SeqKey,
    SourceId,
)
from scheduler_svc.core.invariants import check
from scheduler_svc.core.scheduler import Scheduler
from tests.property.oracle import expected_output
from tests.property.worker import SEARCH, FakeWorker

CONFIG = SchedulerConfig(
    num_blocks=32,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    watermark=0.0,
    claim_s=10.0,
    preemption_mode=PreemptionMode.SWAP,
)
PROMPT = [0, 1, 0, 0, 1, 1, 0, 1, 0, 0]
MAX_TOKENS = 30
SEARCHES = {"max_tokens": 24, "sampling": SEARCH, "beam": BeamParams(3, (), 1.0)}


class Pair:
    """A worker and its scheduler core, which tests replace."""

    def __init__(self, **changes):
        self.config = replace(CONFIG, **changes)
        self.worker = FakeWorker(self.config)
        self.core = Scheduler(self.config)
        self.received: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.ends: list[Finished] = []
        self.admitted: list[Admitted] = []
        self.unheard = 0

    def submit(self, request, now=0.0):
        self.core.submit(request, now)
        self._receive(self.core.takeover.take_adopted())
        check(self.core)

    def step(self, num_steps=1, *, is_received=True, now=0.0):
        for _ in range(num_steps):
            if (plan := self.core.schedule(now)) is None:
                return
            outcome = self.worker.execute(plan)
            if is_received:
                self._receive(self.core.update(outcome))
            check(self.core)

    def run(self, now=0.0):
        while list(self.core.live) or self.core.running.must_send:
            self.step(now=now)

    def replace_core(self, now=0.0, **changes):
        self.core = Scheduler(replace(self.config, **changes))
        self.core.inherit(self.worker.hand_over(), now)
        check(self.core)

    def again(self, request):
        """The request as its router submits it again, with the received tokens."""
        received = [self.received.get(request.first_seq_key + i, []) for i in range(request.n)]
        outputs = tuple(OutputSoFar(np.array(ids, np.int32), finished=False) for ids in received)
        return replace(request, outputs=outputs)

    def _receive(self, events):
        if events is None:
            return
        for key, token in zip(events.seq_keys.tolist(), events.token_ids.tolist(), strict=True):
            self.received.setdefault(key, []).append(token)
        self.reasons.update((end.seq_key, end.reason) for end in events.finished)
        self.ends += events.finished
        self.admitted += events.admitted


def make_request(key=0, prompt=PROMPT, n=1, **fields):
    fields = {"request_id": f"r{key}", "max_tokens": MAX_TOKENS, "sampling": b""} | fields
    return Request(
        SourceId(1), SeqKey(key), prompt_token_ids=np.array(prompt, np.int32), n=n, **fields
    )


def assert_all_received(pair, request):
    for index in range(request.n):
        expected = expected_output("", index, request.prompt_token_ids.tolist(), MAX_TOKENS)
        assert pair.received[request.first_seq_key + index] == expected


def long_request(key=0, n=1, *, num_prompt=16, least=10):
    """A request whose outputs are long."""
    num_more = num_prompt - len(PROMPT)
    prompts = ([*PROMPT, *map(int, f"{tail:0{num_more}b}")] for tail in range(2**num_more))
    return make_request(key, next(p for p in prompts if min(lengths(p, n)) >= least), n)


def prompt_charges(pair):
    """A list that gets the number of prompt tokens of each charge."""
    charged = []
    pair.core.policy.charge = lambda _, num_prompt_tokens, __: charged.append(num_prompt_tokens)
    return charged


def lengths(prompt, n=1):
    return [len(expected_output("", index, prompt, MAX_TOKENS)) for index in range(n)]


def num_outputs(request):
    return sum(lengths(request.prompt_token_ids.tolist(), request.n))
