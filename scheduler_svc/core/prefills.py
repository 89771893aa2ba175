"""How much of a sequence's known tokens a step computes, and who is charged for it."""

from scheduler_svc.core.long_prefills import LongPrefillLimit
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import SeqStatus, Sequence


class Prefills:
    """Divides a step's budget among the sequences that have known tokens to compute."""

    def __init__(
        self, running: RunningSet, long_prefills: LongPrefillLimit, policy: Policy
    ) -> None:
        self._running = running
        self._long_prefills = long_prefills
        self._policy = policy

    def compute(self, seq: Sequence, draft: PlanBuilder) -> bool:
        """Compute known tokens of a sequence; a long one leaves half of the budget to others.

        What they do not use, it gets at the end of the step, by `compute_rest`.

        Returns:
            Whether these were the last.
        """
        if seq.loading_block_ids and not self._running.is_loaded(seq):
            return False
        if not self._long_prefills.is_long(seq.num_tokens_left):
            return self.compute_rest(seq, draft)
        draft.long_prefills.append(seq)
        return self._compute(seq, draft, -(-draft.prompt_budget // 2))

    def compute_rest(self, seq: Sequence, draft: PlanBuilder) -> bool:
        """Compute what is left, as far as the budget reaches; return whether that was all."""
        is_left = draft.budget and seq.status is SeqStatus.PREFILL
        return bool(is_left) and self._compute(seq, draft, draft.budget)

    def _compute(self, seq: Sequence, draft: PlanBuilder, max_tokens: int) -> bool:
        num_done = max(seq.num_computed_tokens, seq.num_charged_tokens)
        is_complete = self._running.compute_chunk(seq, draft, max_tokens)
        if self._policy.has_accounts:
            num_new = min(seq.num_computed_tokens, seq.num_prompt_tokens) - num_done
            if num_new > 0:
                seq.num_charged_tokens = num_done + num_new
                self._policy.served(seq.place.account, num_new, 0)
        return is_complete
