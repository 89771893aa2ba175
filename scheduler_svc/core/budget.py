"""Divides the tokens of a step among the sequences.

A step computes one token for each sequence that decodes. The rest of `max_num_batched_tokens` goes
to known tokens that are not computed yet, mostly prompt tokens. `begin_step` limits the prompt
tokens of a step to what the pacer (`pacing.py`) and memory pressure allow. `grant` decides how many
known tokens each sequence computes.
"""

from collections.abc import Iterable

from contract.info import MemoryLevel
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.limits.memory_pressure import Pressure
from scheduler_svc.core.sequence import Sequence

_PRESSED_SHARES = {MemoryLevel.WARNING: 2, MemoryLevel.CRITICAL: 4}
"""While the worker's memory is short, prompts may take only 1 / 2 (at WARNING) or 1 / 4 (at
CRITICAL) of the token budget, because computing prompts takes temporary memory. The shares are
chosen, not measured. The share is smaller at CRITICAL, because at CRITICAL the use of memory must
fall, while at WARNING it must not grow."""

_BACKGROUND_SHARE = 8
"""While requests of a higher priority are live, requests of the lowest priority, such as those from
`/v1/batches`, get at most 1 / 8 of the prompt tokens of a step with decodes. So they hardly delay
the decodes: all prompt tokens of a step may make it 1.4 times as long as its decodes alone
(--max-decode-slowdown), but 1 / 8 of these tokens makes it only 1.05 times as long."""


class TokenBudget:
    """The tokens that the step being planned may still compute."""

    def __init__(self, config: SchedulerConfig, pressure: Pressure) -> None:
        self._takes_whole_prompts = config.takes_whole_prompts
        threshold = 0 if config.takes_whole_prompts else config.long_prefill_threshold
        self.long_threshold = config.busy_step_tokens // 2 if threshold is None else threshold
        """A sequence with more uncomputed known tokens than this is long; 0: no sequence is."""
        self.num_tokens = 0
        """How many tokens of any kind this step may still compute."""
        self.num_prompt_tokens = 0
        """How many prompt tokens this step may still compute; at most `num_tokens`."""
        self.num_background_tokens = 0
        """How many prompt tokens of lowest-priority requests this step may still compute."""
        self.long_prefills: list[Sequence] = []
        """Long sequences whose first grant was limited to half of the tokens left in this step.
        They get a second grant from the tokens that other sequences do not use."""
        self._pressure = pressure
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_chunk = config.max_chunk
        self._longest_prompt = config.max_model_len - 1
        self._max_long_prefills = config.max_long_prefills

    def begin_step(
        self,
        num_decodes: int,
        max_paced_tokens: int | None,
        max_prompt_tokens: int | None,
        *,
        has_foreground: bool = True,
    ) -> None:
        """Start a step in which `num_decodes` sequences decode.

        Args:
            num_decodes: Number of sequences that compute one token each.
            max_paced_tokens: The pacer's bound on the prompt tokens of a step with decodes; None:
                no bound.
            max_prompt_tokens: The pacer's bound on the prompt tokens of any step; None: no bound.
            has_foreground: Whether some live request is above the lowest priority.
        """
        left = most = self._max_num_batched_tokens - num_decodes
        if num_decodes and max_paced_tokens is not None:
            most = min(most, max_paced_tokens)
        if max_prompt_tokens is not None:
            most = min(most, max_prompt_tokens)
        if self._pressure.level is not MemoryLevel.OK:
            share = self._max_num_batched_tokens // _PRESSED_SHARES[self._pressure.level]
            most = min(most, max(1, share))
        if self._takes_whole_prompts:  # even the longest prompt must fit some step
            most = max(most, min(left, self._longest_prompt))
        self.num_tokens, self.num_prompt_tokens = left, most
        self.num_background_tokens = most
        if num_decodes and has_foreground and not self._takes_whole_prompts:
            self.num_background_tokens = -(-most // _BACKGROUND_SHARE)
        self.long_prefills = []

    def grant(self, seq: Sequence, num_in_step: int) -> int:
        """Return how many known tokens of a running sequence the step computes; may be 0.

        A sequence with one token left to compute, such as a beam, a fork or a swapped-in sequence,
        does not count as a prompt, because it costs as much as a decode. In each step, the first
        grant of a long prompt is at most half of the prompt tokens that the step has left, so that
        other prompts get tokens, too. The second grant, after all other sequences have got theirs,
        has no such limit. The granted tokens are subtracted from the budget.

        Args:
            seq: The sequence.
            num_in_step: How many tokens of the sequence have already been granted in this step.
        """
        num_left = seq.num_tokens_left
        is_prompt = num_left > 1
        room = self.num_prompt_tokens if is_prompt else self.num_tokens
        if is_prompt and self.is_long(num_left) and seq not in self.long_prefills:
            self.long_prefills.append(seq)
            room = -(-room // 2)
        is_background = is_prompt and seq.request.is_background
        if is_background:
            room = min(room, self.num_background_tokens)
        if self._max_chunk is not None:
            room = min(room, self._max_chunk - num_in_step)
        granted = min(num_left, room)
        self.num_tokens -= granted
        paid = granted if is_prompt else 0
        self.num_prompt_tokens = min(self.num_prompt_tokens - paid, self.num_tokens)
        self.num_background_tokens -= paid if is_background else 0
        return granted

    def prompt_room(self, seq: Sequence) -> int:
        """Return how many prompt tokens of a sequence this step may still compute."""
        if seq.request.is_background:
            return min(self.num_prompt_tokens, self.num_background_tokens)
        return self.num_prompt_tokens

    def has_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether this step can begin a sequence that has `num_tokens` left to compute."""
        if self._takes_whole_prompts:
            return self.prompt_room(seq) >= num_tokens
        return num_tokens == 1 or self.prompt_room(seq) > 0

    def is_long(self, num_tokens: int) -> bool:
        """Whether a sequence with `num_tokens` known tokens left to compute counts as long."""
        return 0 < self.long_threshold < num_tokens

    def may_start(self, num_tokens: int, prefilling: Iterable[Sequence]) -> bool:
        """Whether a sequence with `num_tokens` to compute may start beside those in `prefilling`.

        At most `max_long_prefills` long sequences prefill at the same time. While a long sequence
        waits for this reason, short sequences overtake it in the queue.
        """
        if not self.is_long(num_tokens):
            return True
        num_long = sum(self.is_long(seq.num_tokens_left) for seq in prefilling)
        return num_long < self._max_long_prefills
