"""Models how long a step takes on a device: the longer of memory time and arithmetic time."""

import math
from dataclasses import dataclass

_BYTES_PER_PARAM = 2
_OPERATIONS_PER_PARAM = 2
"""A multiplication and an addition per parameter, for each token."""


@dataclass(frozen=True, slots=True)
class TimeModel:
    """A roofline model of a device that runs a language model; kernel launches take no time.

    A step reads all weights once, and the KV of each sequence's context.
    """

    num_params: float
    kv_bytes_per_token: int
    bytes_per_s: float
    operations_per_s: float
    swap_bytes_per_s: float = math.inf
    """Bandwidth between device and host in each direction."""
    disk_bytes_per_s: float = math.inf
    """Bandwidth between host and disk in each direction."""

    def step_s(
        self,
        num_tokens: int,
        num_context_tokens: int,
        swapped_out_bytes: int = 0,
        swapped_in_bytes: int = 0,
    ) -> float:
        """Return the seconds of a step.

        Args:
            num_tokens: Tokens that go through the model; 0 takes no time.
            num_context_tokens: Tokens whose KV is read, summed over all sequences.
            swapped_out_bytes: KV that is copied out before the step computes.
            swapped_in_bytes: KV that is copied in while the step computes.
        """
        compute_s = self._compute_s(num_tokens, num_context_tokens) if num_tokens else 0.0
        return swapped_out_bytes / self.swap_bytes_per_s + max(
            compute_s, swapped_in_bytes / self.swap_bytes_per_s
        )

    def _compute_s(self, num_tokens: int, num_context_tokens: int) -> float:
        num_bytes = (
            _BYTES_PER_PARAM * self.num_params + self.kv_bytes_per_token * num_context_tokens
        )
        num_operations = _OPERATIONS_PER_PARAM * self.num_params * num_tokens
        return max(num_bytes / self.bytes_per_s, num_operations / self.operations_per_s)
