"""Plays requests on a simulated device, to count how many fit in its KV memory.

Steps are real; their durations come from a time model. The engines have the same memory, token
budget and order (first come, first served). They know a request's prompt and its limit of tokens,
but not when it will end. A client sends its next request when its last one has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sim_worker.time_model import TimeModel

MAX_BATCHED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Job:
    """A request."""

    prompt_len: int
    max_len: int
    """The limit on prompt and output together; a reservation must have room for it."""
    output_len: int
    """The real length of the output, which engines do not know until the last token."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a step."""

    num_tokens: int
    """Tokens computed."""
    num_context_tokens: int
    """Tokens whose KV was read."""
    num_outputs: int
    num_running: int
    fragmentation: float
    """1 - longest free run / free memory, both in blocks or slots; 0 if none is free."""


class Engine(Protocol):
    """One model's share of the device's memory. The sets name jobs by number."""

    started: set[int]
    """Jobs that have run."""
    no_room: set[int]
    """Jobs that could not start in their turn, or continue: too little memory was free."""
    no_run: set[int]
    """Jobs that could not start in their turn although enough memory was free."""

    def step(self, now: float) -> Step:
        """Compute a step that begins at `now`, in seconds."""


@dataclass
class Replay:
    """Sums over time, in seconds; the properties are means."""

    time_s: float = 0.0
    num_outputs: int = 0
    running_s: float = 0.0
    fragmentation_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.num_outputs / self.time_s

    @property
    def num_running(self) -> float:
        return self.running_s / self.time_s

    @property
    def fragmentation(self) -> float:
        return self.fragmentation_s / self.time_s


def replay(
    engines: Sequence[Engine], model: TimeModel, warm_up_s: float, measured_s: float
) -> Replay:
    """Let engines that share a device take turns; a turn is one step."""
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


def share_outside(longest: int, num_free: int) -> float:
    """Return the share of free slots outside the longest free run; 0 if none is free."""
    return 1 - longest / num_free if num_free else 0.0
