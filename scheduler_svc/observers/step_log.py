"""Remembers the latest steps of a worker, and adds up all of them, for who watches it."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from contract.step import Plan, StepId
from scheduler_svc.core.reports.load import Queues

MAX_STEPS: Final = 1024
"""How many are remembered: some seconds of a busy worker."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that is done."""

    step_id: StepId
    answered_at_s: float
    """Wall clock, in seconds since 1970."""
    execute_s: float
    rpc_s: float
    num_prefill_tokens: int
    """Tokens computed for sequences that did not decode."""
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps that are done."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: Plan
    queues: Queues
    num_preemptions: int


class StepLog:
    """The steps of one attachment. Constant work for a step, whatever is in it."""

    def __init__(self) -> None:
        self.attached_at_s = time.time()
        self.totals = StepTotals()
        self._in_flight: deque[_Planned] = deque()
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._num_preemptions = 0

    def sent(self, plan: Plan, queues: Queues) -> None:
        """Note that a step goes out; `queues` is the core's right after planning it."""
        num_preemptions = queues.num_preemptions - self._num_preemptions
        self._num_preemptions = queues.num_preemptions
        self._in_flight.append(_Planned(plan, queues, num_preemptions))

    def answered(self, execute_s: float, rpc_s: float, now_s: float) -> None:
        """Note the result of the oldest step in flight; `now_s` is the wall clock's."""
        planned = self._in_flight.popleft()
        plan = planned.plan
        num_prefill_tokens = plan.num_scheduled_tokens - plan.num_decodes
        self.totals.num_steps += 1
        self.totals.num_prefill_tokens += num_prefill_tokens
        self.totals.num_decode_tokens += plan.num_decodes
        self.totals.busy_s += execute_s
        self._steps.append(
            StepRecord(
                step_id=plan.step_id,
                answered_at_s=now_s,
                execute_s=execute_s,
                rpc_s=rpc_s,
                num_prefill_tokens=num_prefill_tokens,
                num_decode_tokens=plan.num_decodes,
                num_running=planned.queues.num_running,
                num_waiting=planned.queues.num_waiting,
                num_preemptions=planned.num_preemptions,
                num_swapped_out_blocks=len(plan.swap_out_src_block_ids),
                num_swapped_in_blocks=len(plan.swap_in_src_block_ids),
            )
        )

    def latest(self, max_steps: int, after: int) -> tuple[StepRecord, ...]:
        """Return the last `max_steps` of the steps later than `after`, in order."""
        return tuple(islice(self._newest_first(after), max_steps))[::-1]

    def _newest_first(self, after: int) -> Iterator[StepRecord]:
        for step in reversed(self._steps):
            if step.step_id <= after:
                return
            yield step
