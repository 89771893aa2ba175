"""Says how much of a long prompt a step may compute so that the others' tokens stay in time.

And, by the same numbers, when a step takes so long that its worker must hang.

Two numbers are learned from the steps that a worker does: how long one takes that only decodes, and
how much longer each prompt token makes it. What a decode takes depends on how many sequences there
are, and what a token adds on how full the step is and how long the prompt: both are followed, as
averages over the last few steps of their kind.
"""

from collections import deque

from rpc.silence import SILENT_AFTER_S
from scheduler_svc.core.plan import StepPlan

_WEIGHT = 0.2
"""Of a new observation against all before it."""
_MIN_TOKENS = 16
"""So many at least, or a long prompt would never be done."""
_LATE_FACTOR = 10


class StepPacer:
    """Bounds a step that decodes to `max_slowdown` times what it takes without long prompts."""

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._in_flight: deque[StepPlan] = deque()

    @property
    def max_paced_tokens(self) -> int | None:
        """Most tokens of long prompts beside decodes; None: no bound, or nothing is known yet."""
        if self._decode_s is None or self._token_s is None or self._max_slowdown == float("inf"):
            return None
        spare_s = (self._max_slowdown - 1) * self._decode_s
        return max(_MIN_TOKENS, int(spare_s / self._token_s))

    @property
    def is_late_after_s(self) -> float | None:
        """Say when the steps in flight take too long, in seconds; None: nobody can say.

        That is ten times what they take by what was learned, which neither a machine that is busy
        nor a prompt that is long beyond all before it makes steps take.
        """
        # Those that compute nothing may wait for the disk, if alone.
        if not any(plan.num_scheduled_tokens for plan in self._in_flight):
            return None
        expected_s = 0.0
        for plan in self._in_flight:
            num_prompt_tokens = plan.num_scheduled_tokens - plan.num_decodes
            if (
                (plan.num_decodes and self._decode_s is None)
                or (num_prompt_tokens and self._token_s is None)
                or len(plan.swap_in_src_block_ids)  # takes what the bus takes
            ):
                return None
            expected_s += self._decode_s or 0.0 if plan.num_decodes else 0.0
            expected_s += num_prompt_tokens * (self._token_s or 0.0)
        return max(SILENT_AFTER_S, _LATE_FACTOR * expected_s)

    def sent(self, plan: StepPlan) -> None:
        """Note that a step goes out."""
        self._in_flight.append(plan)

    def answered(self, execute_s: float) -> None:
        """Note how long the worker took for the oldest step that is in flight."""
        plan = self._in_flight.popleft()
        if execute_s <= 0:
            return
        num_prompt_tokens = plan.num_scheduled_tokens - plan.num_decodes
        if not num_prompt_tokens:
            if plan.num_decodes:
                self._decode_s = _follow(self._decode_s, execute_s)
            return
        beside_s = self._decode_s if plan.num_decodes and self._decode_s is not None else 0.0
        # A token takes some time, even where the step's noise says otherwise.
        added_s = max(execute_s - beside_s, 0.05 * execute_s)
        self._token_s = _follow(self._token_s, added_s / num_prompt_tokens)


def _follow(average: float | None, seen: float) -> float:
    return seen if average is None else average + _WEIGHT * (seen - average)
