"""How many long prompts may be computed at a time, so that short ones overtake them."""

from collections.abc import Iterable

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence


class LongPrefillLimit:
    """Tells long from short, and whether one more long one may start."""

    def __init__(self, config: SchedulerConfig) -> None:
        threshold = config.long_prefill_threshold
        self.threshold = config.busy_step_tokens // 2 if threshold is None else threshold
        """More tokens left to compute than this are long; 0: nothing is."""
        self._max_long_prefills = config.max_long_prefills

    def is_long(self, num_tokens: int) -> bool:
        """Whether so many tokens left to compute are long."""
        return 0 < self.threshold < num_tokens

    def may_start(self, num_tokens: int, prefilling: Iterable[Sequence]) -> bool:
        """Whether a sequence with so many tokens left may start beside those at work."""
        if not self.is_long(num_tokens):
            return True
        num_long = sum(self.is_long(seq.num_tokens_left) for seq in prefilling)
        return num_long < self._max_long_prefills
