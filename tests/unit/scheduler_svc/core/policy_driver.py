"""Drives a core with a policy, and records the order in which it admits and serves requests."""

from collections import Counter
from types import MappingProxyType

import numpy as np

from contract.step import Result
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.request import FinishReason, Request, SeqKey, SourceId
from scheduler_svc.core.invariants import check
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
    """A request whose first token is unique, so that the prefix cache finds nothing."""
    prompt = np.full(num_tokens, key, np.int32)
    tenant = more.get("tenant", "").encode()  # the worker reads it
    return Request(ROUTER, SeqKey(key), f"r{key}", prompt, 1, max_tokens, tenant, **more)


class Worker:
    """Answers one step after the other; every row that may sample samples, and none stops."""

    def __init__(self, core: Scheduler, now: float = 0.0) -> None:
        self.core, self.now = core, now
        self.max_paced_tokens: int | None = None
        self.max_prompt_tokens: int | None = None
        self.left: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self.tenant: dict[int, str] = {}
        self.service = Counter()  # by tenant: prompt tokens, and output tokens twice
        self.admitted: list[int] = []
        self.chunks: list[dict[int, int]] = []
        self.ends: dict[int, FinishReason] = {}

    def step(self) -> bool:
        plan = self.core.schedule(self.now, self.max_paced_tokens, self.max_prompt_tokens)
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
        events = self.core.update(Result(plan.step_id, sampled, sampled, NONE, NONE))
        self.admitted += [item.seq_key for item in events.admitted]
        self.ends |= {end.seq_key: end.reason for end in events.finished}
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
