"""How long a step takes on a device: bound by memory or by arithmetic, whichever is slower."""

from dataclasses import dataclass

_BYTES_PER_PARAM = 2
_OPERATIONS_PER_PARAM = 2
"""A multiplication and an addition for each token."""


@dataclass(frozen=True, slots=True)
class TimeModel:
    """The roofline of a device with a model on it. What is neither is left out, such as launches.

    A step reads all weights once, and the KV of each sequence's context.
    """

    num_params: float
    kv_bytes_per_token: int
    bytes_per_s: float
    operations_per_s: float

    def step_s(self, num_tokens: int, num_context_tokens: int) -> float:
        """Seconds of a step.

        Args:
            num_tokens: Tokens that go through the model; none take no time.
            num_context_tokens: Tokens whose KV they read, over all sequences.
        """
        if num_tokens == 0:
            return 0.0
        num_bytes = (
            _BYTES_PER_PARAM * self.num_params + self.kv_bytes_per_token * num_context_tokens
        )
        num_operations = _OPERATIONS_PER_PARAM * self.num_params * num_tokens
        return max(num_bytes / self.bytes_per_s, num_operations / self.operations_per_s)
