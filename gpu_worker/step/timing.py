"""Step timing: how long the device was busy, and how long a worker on a CPU pauses after a step."""

import time
from collections import deque
from typing import Final

import torch

from contract.arrays import Int64Array
from gpu_worker.step.rows import ScheduledRows


class BusyClock:
    """Adds up the device time of steps, without waiting for the device.

    A *span* is the time in which the device computes one step. On CUDA a span begins when the
    device reaches the span's first event, which the host enqueues in `begin`. The host calls
    `begin` right before the model's first launch. Before that, the device waits while the host
    starts block moves and gathers inputs, and this wait must not count as busy. A clock is used by
    one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._begun: float | torch.cuda.Event | None = None
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._busy_s = 0.0

    def begin_step(self) -> None:
        """Drop the span of a failed step, if any. On a CPU, begin this step's span."""
        self._begun = None if self._is_cuda else time.perf_counter()

    def begin(self) -> None:
        """Begin a span with the next work that is enqueued, unless the step has begun a span."""
        if self._begun is None:
            self._begun = self._event() if self._is_cuda else time.perf_counter()

    def end(self) -> None:
        """End the step's span, if one has begun."""
        if isinstance(self._begun, float):
            self._busy_s += time.perf_counter() - self._begun
        elif self._begun is not None:
            self._spans.append((self._begun, self._event()))
        self._begun = None

    def take_s(self) -> float:
        """Return the seconds of all spans that have ended since the last call."""
        while self._spans and self._spans[0][1].query():  # type: ignore[no-untyped-call]
            begun, ended = self._spans.popleft()
            self._busy_s += begun.elapsed_time(ended) / 1e3
        taken, self._busy_s = self._busy_s, 0.0
        return taken

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


HEAD_START_S: Final = 0.002
"""How long a worker pauses (`head_start_s`): about the CPU time that worker, scheduler and router
spend on one token."""
_LEAST_LEN: Final = 30
"""Only a step that took at least this many times `HEAD_START_S` is followed by a pause, so that
pauses cost at most a thirtieth of the time."""


def head_start_s(scheduled: ScheduledRows, num_prompt: Int64Array, execute_s: float) -> float:
    """Return how long a worker on a CPU pauses after a step, so that first tokens arrive sooner.

    To deliver a token, worker, scheduler and router need the cores that the next step would take.
    Without a pause, a first token reached its client 5.2 ms after it was drawn; with a pause, after
    3.1 to 3.6 ms (medians of 21 prompts that took 65 ms each, on two cores). Later tokens need no
    pause: computing the next token takes longer than delivering a token, so even without a pause
    the stream does not fall behind.

    Args:
        scheduled: The step. If any row decodes, the result is 0, because a pause would delay the
            decoding rows.
        num_prompt: int64[R], the prompt length of each row: the index of the first token after the
            prompt.
        execute_s: How long the step took, in seconds.
    """
    has_decodes = bool(scheduled.num_decodes or scheduled.num_drafting)
    if has_decodes or execute_s < _LEAST_LEN * HEAD_START_S:
        return 0.0
    sampled = scheduled.rows[scheduled.sampling]
    return HEAD_START_S if (scheduled.positions == num_prompt[sampled]).any() else 0.0
