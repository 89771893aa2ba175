"""The scheduler core with a simulated worker; checks that no block has two owners."""

from collections import deque
from collections.abc import Iterator

import numpy as np
from harness.device import SimulatedWorker
from kv.replay import MAX_BATCHED_TOKENS, Job, Step, share_outside

from contract.arrays import Int32Array
from contract.step import NewSequence, Plan
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler

BLOCK_SIZE = 16


class PagedEngine:
    """An engine with paged KV. One step is in flight; the prefix cache is off."""

    def __init__(
        self, jobs: Iterator[Job], num_clients: int, num_slots: int, *, defragments: bool = False
    ) -> None:
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
                defragment_interval_s=1.0,
                defragment_threshold=0.2 if defragments else 1.0,
            )
        )
        self._worker = SimulatedWorker(num_clients, stop_at=self._full_len)
        self._jobs: list[Job] = []
        self._never_ran: deque[int] = deque()
        for _ in range(num_clients):
            self._submit()
        self._is_held = np.zeros(num_slots // BLOCK_SIZE, bool)
        self._tables: dict[int, list[int]] = {}
        """Each row's blocks."""

    def _full_len(self, new: NewSequence) -> int:
        job = self._jobs[int(new.sampling)]
        return job.prompt_len + job.output_len

    def _submit(self) -> None:
        """Let a client send its next request."""
        index = len(self._jobs)
        self._jobs.append(job := next(self._source))
        self._never_ran.append(index)
        prompt = np.zeros(job.prompt_len, np.int32)
        most, name = job.max_len - job.prompt_len, str(index).encode()
        self._core.submit(Request(SourceId(0), SeqKey(index), "", prompt, 1, most, name), 0.0)

    def step(self, now: float) -> Step:
        num_preemptions = self._core.load().num_preemptions
        plan = self._core.schedule(now)
        assert plan is not None
        self._move_blocks(plan)
        outcome = self._worker.execute(plan)
        load = self._core.load()
        if load.num_preemptions == num_preemptions:
            self._see_why_head_waits(plan)
        rows = list(self._tables)
        step = Step(
            plan.num_scheduled_tokens,
            int(self._worker.num_computed[rows].sum()),
            len(outcome.sampled_rows),
            load.num_running,
            _fragmentation(self._is_held),
        )
        for _ in self._core.update(outcome).finished:
            self._submit()
        return step

    def _move_blocks(self, plan: Plan) -> None:
        for row in plan.released_rows.tolist():
            self._is_held[self._tables.pop(row)] = False
        for new in plan.new_sequences:
            self._hold(new.row, new.block_ids.tolist())
            index = int(new.sampling)
            if index in self.started:
                self.no_room.add(index)  # it was preempted
            else:
                assert self._never_ran.popleft() == index
                self.started.add(index)
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

    def _see_why_head_waits(self, plan: Plan) -> None:
        """Record why the first waiting job did not start, although the step had room for tokens.

        A job that has run before does not count.
        """
        load = self._core.load()
        is_full = plan.num_scheduled_tokens == MAX_BATCHED_TOKENS
        if is_full or load.num_waiting == 0 or load.num_waiting != len(self._never_ran):
            return
        head = self._never_ran[0]
        reserve = int(self._core.config.watermark * load.num_blocks)
        need = -(-self._jobs[head].prompt_len // BLOCK_SIZE) + reserve
        (self.no_run if need <= load.num_free_blocks else self.no_room).add(head)


def _fragmentation(is_held: np.ndarray) -> float:
    # with held blocks at both ends, free runs and held runs alternate, a free one first
    edges = np.flatnonzero(np.diff(is_held, prepend=True, append=True))
    free_runs = np.diff(edges)[::2]
    return share_outside(int(free_runs.max(initial=0)), int(free_runs.sum()))
