"""Decides whether to copy KV between tiers or compute it again, by the worker's measured rates."""

from math import inf

from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig


class Costs:
    """Compares how long it takes to copy KV between tiers and to compute it again.

    The estimates assume that the prefix cache has none of this KV when it is computed again.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def should_swap(self, num_blocks: int, num_spilled: int, num_tokens: int) -> bool:
        """Whether to swap out a preempted sequence's blocks instead of computing them again.

        Args:
            num_blocks: Number of the sequence's blocks, which would be copied out and in again.
            num_spilled: Number of other sequences' blocks that would go to the disk and back.
            num_tokens: Number of tokens with KV in the sequence's blocks.
        """
        config = self._config
        if config.preemption_mode is not PreemptionMode.COST:
            return config.preemption_mode is PreemptionMode.SWAP
        swap_s = _seconds(2 * num_blocks * config.bytes_per_block, config.swap_bytes_per_s)
        spill_s = _seconds(2 * num_spilled * config.bytes_per_block, config.disk_bytes_per_s)
        return swap_s + spill_s < _seconds(num_tokens, config.prefill_tokens_per_s)

    def should_load(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to load `num_blocks` disk blocks instead of computing `num_tokens` tokens."""
        config = self._config
        if config.preemption_mode is not PreemptionMode.COST:
            return True
        load_s = _seconds(num_blocks * config.bytes_per_block, config.disk_bytes_per_s)
        return load_s < _seconds(num_tokens, config.prefill_tokens_per_s)


def _seconds(amount: int, per_s: float) -> float:
    """Return how long `amount` takes; infinite if `per_s` is 0, because the rate is unknown."""
    if not amount:
        return 0.0
    return amount / per_s if per_s else inf
