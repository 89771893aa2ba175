"""Sessions without streams: a core, and a worker that records its blocks' contents."""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from contract.errors import NotFoundError, UnavailableError
from contract.info import Role
from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.invariants import check
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.workers.crash_counter import CrashCounter
from scheduler_svc.workers.engine import Engine
from tests.property.oracle import Oracle, expected_output
from tests.property.worker import FakeWorker

CONFIG = SchedulerConfig(
    num_blocks=16,
    block_size=2,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=32,
    watermark=0.0,
    num_host_blocks=16,
    bytes_per_block=2,
    preemption_mode=PreemptionMode.SWAP,
)


class FakeSession:
    """A session whose worker records its blocks' contents; it steps when a move must wait."""

    instance_ids = itertools.count(1)

    def __init__(self, config=CONFIG, dtype="float32", role=Role.BOTH):
        self.core = Scheduler(config)
        self.worker = FakeWorker(config)
        self.oracle = Oracle()
        instance_id = next(self.instance_ids)
        self.info = SimpleNamespace(
            worker_id=f"w{instance_id}",
            dtype=dtype,
            instance_id=instance_id,
            takes_kv=True,
            has_far_kv=True,
            role=role,
            limits=SimpleNamespace(
                num_host_blocks=config.num_host_blocks, kv_windows=config.kv_windows
            ),
            block_bytes=config.bytes_per_block,
            prefill_tokens_per_s=1.0,
        )
        self.unanswered = deque()
        self.others = {}  # sessions by target
        self.pulling = asyncio.Event()
        self.may_pull = asyncio.Event()
        self.may_pull.set()
        self.pull_error = None
        self.paces_prompts = True
        self.is_read = False
        """Whether another session's pull waits; then it runs no step by itself."""
        self.is_lost = False
        self.is_draining = False
        self.crashes = CrashCounter()
        self.link = self  # pulls wait, too
        self.far = {}
        """The far tier: contents by label."""
        self.far_error = None

    def submit(self, key, prompt, max_tokens=20, n=1):
        prompt = np.array(prompt, np.int32)
        name = f"r{key}"
        request = Request(SourceId(0), SeqKey(key), name, prompt, n, max_tokens, b"")
        self.core.submit(request, 0.0)
        self.oracle.submit(request)

    def step(self):
        if (plan := self.core.schedule(0.0)) is not None:
            self.unanswered.append(self.worker.execute(plan))
        if self.unanswered:
            self.oracle.check(self.core.update(self.unanswered.popleft()))
        check(self.core)

    def load(self):
        return self.core.load()

    @property
    def role(self):
        return self.info.role

    def trouble(self):
        return None

    def placement_load(self):
        return SimpleNamespace(max_request_len=self.core.max_request_len)

    @property
    def block_size(self):
        return self.core.config.block_size

    def num_cached_blocks(self, hashes):
        return self.core.lookup.num_cached_blocks(hashes)

    def call(self, function):
        self.check_alive()
        return function(self.core)

    def check_alive(self):
        if self.is_lost:
            raise UnavailableError("lost")

    async def wait_until(self, condition):
        self.check_alive()
        while not condition(self.core):
            if not self.is_read:
                self.step()
            await asyncio.sleep(0)
            self.check_alive()

    async def pull_kv(self, source_target, source_instance_id, sources, targets):
        self.pulling.set()
        if not self.may_pull.is_set():
            self.others[source_target].is_read = True
            await self.may_pull.wait()
            self.others[source_target].is_read = False
        if self.pull_error is not None:
            raise self.pull_error
        source = self.others[source_target]
        assert source.info.instance_id == source_instance_id
        held = source.worker.host
        self.worker.host.update({t: held[s] for s, t in zip(sources, targets, strict=True)})

    async def store_kv(self, labels, host_block_ids):
        if self.far_error is not None:
            raise self.far_error
        for label, block in zip(labels, host_block_ids, strict=True):
            self.far[label] = self.worker.host[block]
        return len(labels)

    async def fetch_kv(self, labels, host_block_ids):
        self.pulling.set()
        await self.may_pull.wait()
        if self.far_error is not None:
            raise self.far_error
        for number, label in enumerate(labels):
            if label not in self.far:
                return number
            self.worker.host[host_block_ids[number]] = self.far[label]
        return len(labels)


@dataclass(eq=False)
class FakeEngine:
    target: str
    session: FakeSession | None
    loss = "not there"
    attached_session = Engine.attached_session


class FakeRoster:
    """Engines "a" and "b", and more if a test needs them."""

    def __init__(self, **sessions):
        self.engines = tuple(FakeEngine(target, session) for target, session in sessions.items())
        self.oracle = Oracle()
        for session in sessions.values():
            if session is not None:
                session.others = sessions
                session.oracle = self.oracle

    def engine(self, worker):
        for engine in self.engines:
            if engine.target == worker:
                return engine
        raise NotFoundError(worker)


def finish(*sessions):
    """Run until all requests have ended as the oracle expects; check that no block is held."""
    while sessions[0].oracle.live:
        for session in sessions:
            session.step()
    for session in sessions:
        for _ in range(3):
            session.step()
        assert session.core.pool.num_available == CONFIG.num_blocks
        assert session.core.tier.pool.num_available == CONFIG.num_host_blocks


def prompts_with_long_outputs():
    """Prompts of 14 tokens each, after which the model outputs 18."""
    for tokens in itertools.product((0, 1), repeat=14):
        if len(expected_output("", 0, tokens, 18)) == 18:
            yield tokens
