"""What a worker has been measured to do in a second: values that the core is given."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured at best: a worker that is busy with others is slower. None: not known yet."""

    prefill_tokens_per_s: float | None = None
    """Prompt tokens computed in a second."""
    step_s: float | None = None
    """Seconds of a step that computes one token for each sequence."""

    def least_s(self, num_prompt_tokens: int, num_steps: int) -> float | None:
        """Return the seconds that these take at least, one after the other; None: not known."""
        if self.prefill_tokens_per_s is None or self.step_s is None:
            return None
        return num_prompt_tokens / self.prefill_tokens_per_s + num_steps * self.step_s
