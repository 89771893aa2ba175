"""Plays requests through a device that does not exist, to see what its KV memory has room for.

Blocks, slots and steps are real, time is a model's. Two engines have the same memory, token budget
and order (first come, first served), and know of a request its prompt and its most tokens, not when
it will end. `PagedEngine` is Quire's scheduler core; `ReservingEngine` reserves, as one run, room
for the most tokens that a request may have. A client of either sends its next request when its last
one has ended.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from contiguous import FirstFit

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan import Int32Array, StepOutcome, StepPlan, ints
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from sim_worker.time_model import TimeModel

BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Job:
    """A request: what is known of it beforehand, and how long it will be."""

    prompt_len: int
    max_len: int
    """Prompt and output; what a reservation must have room for."""
    output_len: int
    """Unknown to the engines until its last token is there."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did."""

    num_tokens: int
    """Computed, known ones included."""
    num_context_tokens: int
    """Whose KV was read."""
    num_outputs: int
    num_running: int
    fragmentation: float
    """1 - longest free run / free, of the memory's blocks or slots; 0 if none is free."""


class Engine(Protocol):
    """One model's share of the device. The sets name jobs by number."""

    started: set[int]
    """Those that have run."""
    no_room: set[int]
    """Those that could not start when their turn came, or go on, because too little was free."""
    no_run: set[int]
    """Those that could not start when their turn came although enough was free."""

    def step(self, now: float) -> Step:
        """Compute a step that begins at `now`, in seconds."""


@dataclass
class Replay:
    """Sums over time, in seconds."""

    time_s: float = 0.0
    num_outputs: int = 0
    running_s: float = 0.0
    fragmentation_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens."""
        return self.num_outputs / self.time_s

    @property
    def num_running(self) -> float:
        """Mean."""
        return self.running_s / self.time_s

    @property
    def fragmentation(self) -> float:
        """Mean."""
        return self.fragmentation_s / self.time_s


def replay(
    engines: Sequence[Engine], model: TimeModel, warm_up_s: float, measured_s: float
) -> Replay:
    """Let engines that share a device take turns, a step each."""
    warm_up, measured = Replay(), Replay()
    running = [0] * len(engines)
    while measured.time_s < measured_s:
        result = warm_up if warm_up.time_s < warm_up_s else measured
        for index, engine in enumerate(engines):
            step = engine.step(warm_up.time_s + measured.time_s)
            duration_s = model.step_s(step.num_tokens, step.num_context_tokens)
            running[index] = step.num_running
            result.time_s += duration_s
            result.num_outputs += step.num_outputs
            result.running_s += sum(running) * duration_s
            result.fragmentation_s += step.fragmentation * duration_s
    return measured


class PagedEngine:
    """The scheduler core, and a worker that only counts; checks that no block has two owners."""

    def __init__(self, jobs: Iterator[Job], num_clients: int, num_slots: int) -> None:
        self.started: set[int] = set()
        self.no_room: set[int] = set()
        self.no_run: set[int] = set()
        self._source = jobs
        self._core = Scheduler(
            SchedulerConfig(
                num_blocks=num_slots // BLOCK_SIZE,
                block_size=BLOCK_SIZE,
                max_num_seqs=num_clients,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                max_model_len=num_slots,
                max_waiting=num_clients,
                enable_prefix_caching=False,
                long_prefill_threshold=0,
            )
        )
        self._jobs: list[Job] = []
        self._never_ran: deque[int] = deque()
        for _ in range(num_clients):
            self._submit()
        self._is_held = np.zeros(num_slots // BLOCK_SIZE, bool)
        self._tables: dict[int, list[int]] = {}
        # by row
        self._num_known = np.zeros(num_clients, np.int64)
        self._num_computed, self._full_len = self._num_known.copy(), self._num_known.copy()
        self._is_decoding = np.zeros(num_clients, bool)

    def _submit(self) -> None:
        """Let a client send its next request."""
        index = len(self._jobs)
        self._jobs.append(job := next(self._source))
        self._never_ran.append(index)
        prompt = np.zeros(job.prompt_len, np.int32)
        most, name = job.max_len - job.prompt_len, str(index).encode()
        self._core.submit(Request(SourceId(0), SeqKey(index), "", prompt, 1, most, name), 0.0)

    def step(self, now: float) -> Step:
        """Schedule, count, update."""
        num_preemptions = self._core.load().num_preemptions
        plan = self._core.schedule(now)
        assert plan is not None
        self._move_blocks(plan)
        outcome = self._compute(plan)
        load = self._core.load()
        if load.num_preemptions == num_preemptions:
            self._see_who_waits(plan)
        rows = list(self._tables)
        step = Step(
            plan.num_scheduled_tokens,
            int(self._num_computed[rows].sum()),
            len(outcome.sampled_rows),
            load.num_running,
            _fragmentation(self._is_held),
        )
        for _ in self._core.update(outcome).finished:
            self._submit()
        return step

    def _move_blocks(self, plan: StepPlan) -> None:
        for row in plan.released_rows.tolist():
            self._is_held[self._tables.pop(row)] = False
            self._is_decoding[row] = False
        for new in plan.new_sequences:
            self._hold(new.row, new.block_ids.tolist())
            index = int(new.sampling)
            job = self._jobs[index]
            if index in self.started:
                self.no_room.add(index)  # it was preempted
            else:
                assert self._never_ran.popleft() == index
                self.started.add(index)
            self._num_known[new.row] = len(new.token_ids)
            self._num_computed[new.row] = new.num_computed_tokens
            self._full_len[new.row] = job.prompt_len + job.output_len
        for row, block in zip(plan.appended_rows, plan.appended_block_ids, strict=True):
            self._hold(int(row), [int(block)])
        if len(plan.renamed_src_block_ids):
            self._rename(plan.renamed_src_block_ids, plan.renamed_dst_block_ids)

    def _hold(self, row: int, blocks: list[int]) -> None:
        assert not self._is_held[blocks].any(), "a block has two owners"
        self._is_held[blocks] = True
        self._tables.setdefault(row, []).extend(blocks)

    def _rename(self, sources: Int32Array, targets: Int32Array) -> None:
        self._is_held[sources] = False
        assert not self._is_held[targets].any(), "a block is renamed to one that is held"
        self._is_held[targets] = True
        moved = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        for table in self._tables.values():
            table[:] = [moved.get(block, block) for block in table]

    def _compute(self, plan: StepPlan) -> StepOutcome:
        decoding = np.flatnonzero(self._is_decoding)
        assert len(decoding) == plan.num_decodes
        self._num_computed[decoding] += 1
        self._num_computed[plan.chunk_rows] += plan.chunk_lens
        rows = np.concatenate([decoding, plan.chunk_rows])
        sampled = rows[self._num_computed[rows] == self._num_known[rows]].astype(np.int32)
        self._num_known[sampled] += 1
        self._is_decoding[sampled] = True
        stopped = sampled[self._num_known[sampled] == self._full_len[sampled]]
        tokens = np.zeros(len(sampled), np.int32)
        return StepOutcome(plan.step_id, sampled, tokens, stopped, ints([]))

    def _see_who_waits(self, plan: StepPlan) -> None:
        """Note why the head of the queue, if it never ran, did not start in a step with room."""
        load = self._core.load()
        is_full = plan.num_scheduled_tokens == MAX_BATCHED_TOKENS
        if is_full or load.num_waiting == 0 or load.num_waiting != len(self._never_ran):
            return
        head = self._never_ran[0]
        reserve = int(self._core.config.watermark * load.num_blocks)
        need = -(-self._jobs[head].prompt_len // BLOCK_SIZE) + reserve
        (self.no_run if need <= load.num_free_blocks else self.no_room).add(head)


@dataclass
class _Reserved:
    index: int
    start: int
    num_computed: int = 0
    num_outputs: int = 0


class ReservingEngine:
    """Continuous batching with one contiguous reservation for each running request."""

    def __init__(self, jobs: Iterator[Job], num_clients: int, num_slots: int) -> None:
        self.started: set[int] = set()
        self.no_room: set[int] = set()
        self.no_run: set[int] = set()
        self._source = jobs
        self._jobs = list(islice(jobs, num_clients))
        self._memory = FirstFit(num_slots)
        self._running: list[_Reserved] = []

    def step(self, now: float) -> Step:  # noqa: ARG002 - it needs no clock
        """Decode all, then compute prompts, then admit, within the budget."""
        num_outputs = num_tokens = 0
        for each in self._running:
            if each.num_outputs:
                each.num_computed += 1
                each.num_outputs += 1
                num_outputs += 1
        num_tokens = num_outputs
        while num_tokens < MAX_BATCHED_TOKENS:
            new = next((each for each in self._running if not each.num_outputs), None)
            if new is None and (new := self._admit()) is None:
                break
            prompt_len = self._jobs[new.index].prompt_len
            chunk = min(MAX_BATCHED_TOKENS - num_tokens, prompt_len - new.num_computed)
            new.num_computed += chunk
            num_tokens += chunk
            if new.num_computed == prompt_len:
                new.num_outputs = 1
                num_outputs += 1
        step = Step(
            num_tokens,
            sum(each.num_computed for each in self._running),
            num_outputs,
            len(self._running),
            _share_outside(self._memory.longest_free, self._memory.num_free),
        )
        for each in tuple(self._running):
            job = self._jobs[each.index]
            if each.num_outputs == job.output_len:
                self._running.remove(each)
                self._memory.give_back(each.start, job.max_len)
                self._jobs.append(next(self._source))
        return step

    def _admit(self) -> _Reserved | None:
        index = len(self.started)
        if index == len(self._jobs):
            return None
        need = self._jobs[index].max_len
        if (start := self._memory.take(need)) is None:
            (self.no_run if need <= self._memory.num_free else self.no_room).add(index)
            return None
        self.started.add(index)
        self._running.append(_Reserved(index, start))
        return self._running[-1]


def _share_outside(longest: int, num_free: int) -> float:
    return 1 - longest / num_free if num_free else 0.0


def _fragmentation(is_held: np.ndarray) -> float:
    edges = np.flatnonzero(np.diff(is_held, prepend=True, append=True))
    runs = np.diff(edges)[
        ::2
    ]  # it begins and ends with held ones: free runs and held ones take turns
    return _share_outside(int(runs.max(initial=0)), int(runs.sum()))
