"""Keeps the latest steps of a worker, and totals over all steps, for `DescribeActivity`."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from contract.step import StepId
from scheduler_svc.observers.steps import AnsweredStep, SentStep

MAX_STEPS: Final = 1024
"""At most this many steps are kept, enough for some seconds of a busy worker."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What `StepLog` keeps of a step that has a result."""

    step_id: StepId
    answered_at_s: float
    """When the result had been applied, in seconds since 1970."""
    execute_s: float
    rpc_s: float
    num_prefill_tokens: int
    """Number of tokens computed for sequences that did not decode."""
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps that have a result."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    busy_s: float = 0.0


class StepLog:
    """The steps of one attachment of a worker; a `StepObserver`."""

    def __init__(self) -> None:
        self.attached_at_s = time.time()
        self.totals = StepTotals()
        self._in_flight: deque[tuple[SentStep, int]] = deque()
        """The steps in flight, each with the number of preemptions made in planning it."""
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._num_preemptions = 0

    def on_sent(self, step: SentStep) -> None:
        num_preemptions = step.queues.num_preemptions
        self._in_flight.append((step, num_preemptions - self._num_preemptions))
        self._num_preemptions = num_preemptions

    def on_answered(self, step: AnsweredStep) -> None:
        sent, num_preemptions = self._in_flight.popleft()
        plan, queues = sent.plan, sent.queues
        num_prefill_tokens = plan.num_scheduled_tokens - plan.num_decodes
        self.totals.num_steps += 1
        self.totals.num_prefill_tokens += num_prefill_tokens
        self.totals.num_decode_tokens += plan.num_decodes
        self.totals.busy_s += step.execute_s
        self._steps.append(
            StepRecord(
                step_id=plan.step_id,
                answered_at_s=step.at_s,
                execute_s=step.execute_s,
                rpc_s=step.rpc_s,
                num_prefill_tokens=num_prefill_tokens,
                num_decode_tokens=plan.num_decodes,
                num_running=queues.num_running,
                num_waiting=queues.num_waiting,
                num_preemptions=num_preemptions,
                num_swapped_out_blocks=len(plan.swap_out_src_block_ids),
                num_swapped_in_blocks=len(plan.swap_in_src_block_ids),
            )
        )

    def latest(self, max_steps: int, after: int) -> tuple[StepRecord, ...]:
        """Return the steps after step `after`, at most the last `max_steps`, oldest first."""
        return tuple(islice(self._newest_first(after), max_steps))[::-1]

    def _newest_first(self, after: int) -> Iterator[StepRecord]:
        for step in reversed(self._steps):
            if step.step_id <= after:
                return
            yield step
