"""Which requests are taken on: limits of length, time and number, and what is switched off."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import (
    DeadlineError,
    NoPrefixCacheError,
    QueueFullError,
    RequestTooLongError,
    TooManySequencesError,
)
from scheduler_svc.core.request import Request


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a worker is, measured at its best; when busy it is slower. None: not known yet."""

    prefill_tokens_per_s: float | None = None
    """Prompt tokens computed in a second."""
    step_s: float | None = None
    """Seconds of a step that computes one token for each sequence."""

    def least_s(self, num_prompt_tokens: int, num_steps: int) -> float | None:
        """Return the seconds that these take at least, one after the other; None: not known."""
        if self.prefill_tokens_per_s is None or self.step_s is None:
            return None
        return num_prompt_tokens / self.prefill_tokens_per_s + num_steps * self.step_s


def max_request_len(num_blocks: int, config: SchedulerConfig) -> int:
    """Most tokens of one sequence: so many that it can finish with `num_blocks` to itself."""
    return min(config.max_model_len, num_blocks * config.block_size)


def check_length(request: Request, num_blocks: int, config: SchedulerConfig) -> None:
    """Check that each sequence of a request, or its search, could finish if it ran alone.

    Args:
        request: The request.
        num_blocks: Device blocks in the pool.
        config: Of the core.

    Raises:
        RequestTooLongError: Naming what is too long, and the limit.
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


def check_pin(request: Request, *, has_prefix_cache: bool) -> None:
    """Check that a prompt that is to be pinned can be.

    Raises:
        NoPrefixCacheError: There is nothing to pin it in.
    """
    if request.cache_pin_s is not None and not has_prefix_cache:
        raise NoPrefixCacheError(
            f"cache_pin_s is {request.cache_pin_s}, but prefix caching is switched off"
        )


def check_queue(request: Request, num_waiting: int, max_waiting: int) -> None:
    """Check that there is room for a new request beside `num_waiting` sequences.

    Raises:
        TooManySequencesError: There never is.
        QueueFullError: There is not. No request that was live before is refused for that.
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
    rates: Rates,
    config: SchedulerConfig,
    count_cached_tokens: Callable[[Request], int],
) -> None:
    """Check that a request could meet its deadline, if it has one, if it ran now and alone.

    Args:
        request: The request.
        now: On the clock of its deadline.
        rates: The worker's.
        config: The worker's: how many tokens a step may bring.
        count_cached_tokens: Returns how many of the prompt's tokens need not be computed; called
            only if the answer depends on it.

    Raises:
        DeadlineError: It could not; the message has the numbers.
    """
    if request.deadline is None:
        return
    left_s = request.deadline - now
    if left_s <= 0:
        raise DeadlineError(f"the deadline passed {-left_s:.3f} s ago")
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
    # The last token is not computed. What beams have in common for certain is the prompt.
    num_needed = -(-(num_prompt_tokens + request.max_tokens - 1) // config.block_size)
    if request.max_tokens > 1:
        num_shared = num_prompt_tokens // config.block_size
        num_needed = num_shared + width * (num_needed - num_shared)
    if num_needed > num_blocks:
        raise RequestTooLongError(
            f"{width} beams with a prompt of {num_prompt_tokens} tokens and max_tokens "
            f"{request.max_tokens} may take {num_needed} blocks; there are {num_blocks}"
        )


def _can_do(rates: Rates, num_prompt_tokens: int, num_steps: int, left_s: float) -> bool:
    least_s = rates.least_s(num_prompt_tokens, num_steps)
    return least_s is None or least_s <= left_s
