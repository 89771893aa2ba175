"""Estimates how long a worker's steps take, from the times at which its results arrived.

While a worker is never idle, the time between two results is the time of a step.
"""

from dataclasses import dataclass

import numpy as np

from contract.step import Plan
from scheduler_svc.core.interface.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The time of a step: a fixed part, and a part for each token."""

    step_s: float
    token_s: float
    num_samples: int = 0
    """Number of recorded steps behind the estimate."""

    def seconds(self, plan: Plan, config: SchedulerConfig) -> float:
        """Return the estimated time of a plan, including moves between device and host."""
        num_moves = len(plan.swap_out_src_block_ids) + len(plan.swap_in_src_block_ids)
        move_s = 0.0
        if config.swap_bytes_per_s:
            move_s = num_moves * config.bytes_per_block / config.swap_bytes_per_s
        return self.step_s + self.token_s * plan.num_scheduled_tokens + move_s


class StepTimeSamples:
    """Collects the steps of a recording."""

    def __init__(self) -> None:
        self._num_tokens: dict[int, int] = {}
        """Number of tokens of each step in flight."""
        self._busy_since: float | None = None
        """When the last result arrived; None if the worker had no other step then."""
        self._samples: list[tuple[int, float]] = []

    def sent(self, plan: Plan) -> None:
        self._num_tokens[plan.step_id] = plan.num_scheduled_tokens

    def answered(self, step_id: int, now: float) -> None:
        """Record that the result of the oldest step arrived at `now`."""
        num_tokens = self._num_tokens.pop(step_id)
        if self._busy_since is not None:
            self._samples.append((num_tokens, now - self._busy_since))
        self._busy_since = now if self._num_tokens else None

    def fit(self) -> StepTimes | None:
        """Fit a line to the samples by least squares; None: there are too few.

        The slowest 1 % are left out, because the process may have been stopped then.
        """
        samples = sorted(self._samples, key=lambda sample: sample[1])
        samples = samples[: max(2, -(-len(samples) * 99 // 100))]
        if len(samples) < 2:
            return None
        num_tokens, seconds = map(np.array, zip(*samples, strict=True))
        spread = float(np.var(num_tokens))
        mean_tokens, mean_s = float(num_tokens.mean()), float(seconds.mean())
        slope = 0.0
        if spread:
            covariance = ((num_tokens - mean_tokens) * (seconds - mean_s)).mean()
            # Neither part may be negative, since more tokens never make a step faster.
            slope = min(max(float(covariance) / spread, 0.0), mean_s / mean_tokens)
        return StepTimes(mean_s - slope * mean_tokens, slope, len(samples))
