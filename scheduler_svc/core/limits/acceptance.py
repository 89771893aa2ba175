"""Decides which requests a core accepts, by their length, their deadline and the queue's size.

Three modules refuse requests under overload. `router/request/admission.py` limits the live
requests of one router. `router/schedulers/pool.py` refuses a request when every scheduler has
reported a full queue. `check_queue` in this module limits the waiting sequences of one worker, and
knows their exact number.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.errors import (
    DeadlineError,
    QueueFullError,
    RequestTooLongError,
    TooManySequencesError,
)
from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.space.kv_groups import KvGroups


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """The best measured speed of a worker; a busy worker is slower."""

    prefill_tokens_per_s: float | None = None
    """Prompt tokens that the worker computes per second; None: unknown."""
    step_s: float | None = None
    """Seconds of a step that computes one token for each sequence; None: unknown."""

    def least_s(self, num_prompt_tokens: int, num_steps: int) -> float | None:
        """Return how long the prompt and the steps take at least; None if a rate is unknown."""
        if self.prefill_tokens_per_s is None or self.step_s is None:
            return None
        return num_prompt_tokens / self.prefill_tokens_per_s + num_steps * self.step_s


def max_request_len(num_blocks: int, config: SchedulerConfig) -> int:
    """Return how long a sequence can become if it has all `num_blocks` blocks for itself."""
    if not config.has_windows:
        return min(config.max_model_len, num_blocks * config.block_size)
    groups = KvGroups(config)
    num_usable = num_blocks - groups.num_null
    return bisect_right(range(config.max_model_len + 1), num_usable, key=groups.num_needed) - 1


def check_length(request: Request, num_blocks: int, config: SchedulerConfig) -> None:
    """Check that each sequence of a request, or its search, could finish if it ran alone.

    Args:
        request: The request.
        num_blocks: Device blocks in the pool.
        config: The core's configuration.

    Raises:
        RequestTooLongError: The message names what is too long, and the limit.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens + request.max_tokens > (most := max_request_len(num_blocks, config)):
        raise RequestTooLongError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is "
            f"{request.max_tokens}; together they may be {most}"
        )
    for index, output in enumerate(request.outputs):
        if not output.finished and len(output.token_ids) >= request.max_tokens:
            raise RequestTooLongError(
                f"output {index} has {len(output.token_ids)} tokens and is not finished; "
                f"max_tokens is {request.max_tokens}"
            )
    if request.beam is not None:
        _check_search(request, request.beam.width, num_blocks, config)


def check_queue(request: Request, num_waiting: int, max_waiting: int) -> None:
    """Check that the queue has room for a new request beside `num_waiting` sequences.

    Raises:
        TooManySequencesError: The request has more sequences than the queue may ever hold.
        QueueFullError: The queue is full. A resubmitted request is never refused for this reason.
    """
    if request.outputs:
        return
    if request.n > max_waiting:
        raise TooManySequencesError(
            f"it has {request.n} sequences; at most {max_waiting} may wait (--max-waiting)"
        )
    if num_waiting + request.n > max_waiting:
        raise QueueFullError(
            f"the queue is full: {num_waiting} sequences wait, and this request has "
            f"{request.n} more; the limit is {max_waiting}"
        )


def check_deadline(
    request: Request,
    now: float,
    rates: WorkerRates,
    config: SchedulerConfig,
    count_cached_tokens: Callable[[Request], int],
) -> None:
    """Check that a request could meet its deadline if it ran now and alone.

    Args:
        request: The request.
        now: The time, on the clock of the deadline.
        rates: The best measured speed of the worker.
        config: The core's configuration, which has the number of draft tokens.
        count_cached_tokens: Returns how many of the prompt's tokens need not be computed. It is
            called only if the result depends on this number.

    Raises:
        DeadlineError: The request could not meet its deadline; the message has the numbers.
    """
    if request.deadline is None:
        return
    left_s = request.deadline - now
    if left_s <= 0:
        raise DeadlineError(f"the deadline passed {now - request.deadline:.3f} s ago")
    num_tokens = len(request.prompt_token_ids)
    num_steps = max(1, -(-request.min_tokens // (config.num_draft_tokens + 1)))
    if _can_do(rates, num_tokens, num_steps, left_s):
        return
    num_tokens -= count_cached_tokens(request)
    if not _can_do(rates, num_tokens, num_steps, left_s):
        raise DeadlineError(
            f"the deadline is in {left_s:.3f} s and cannot be met: {num_tokens} prompt tokens at "
            f"{rates.prefill_tokens_per_s:.0f} tokens/s and {num_steps} steps of "
            f"{rates.step_s:.4f} s take {rates.least_s(num_tokens, num_steps):.3f} s"
        )


def _check_search(request: Request, width: int, num_blocks: int, config: SchedulerConfig) -> None:
    num_prompt_tokens = len(request.prompt_token_ids)
    if width > config.max_num_seqs:
        raise RequestTooLongError(
            f"the beam width is {width}; at most {config.max_num_seqs} sequences run at once"
        )
    # The last token is not computed. In the worst case, beams share only the prompt.
    num_needed = -(-(num_prompt_tokens + request.max_tokens - 1) // config.block_size)
    if request.max_tokens > 1:
        num_shared = num_prompt_tokens // config.block_size
        num_needed = num_shared + width * (num_needed - num_shared)
    if config.has_windows:  # in the worst case, beams share nothing
        groups = KvGroups(config)
        num_longest = groups.num_needed(num_prompt_tokens + request.max_tokens)
        num_needed = groups.num_null + width * num_longest
    if num_needed > num_blocks:
        raise RequestTooLongError(
            f"{width} beams with a prompt of {num_prompt_tokens} tokens and max_tokens "
            f"{request.max_tokens} may take {num_needed} blocks; there are {num_blocks}"
        )


def _can_do(rates: WorkerRates, num_prompt_tokens: int, num_steps: int, left_s: float) -> bool:
    least_s = rates.least_s(num_prompt_tokens, num_steps)
    return least_s is None or least_s <= left_s
