"""Decides whether to move KV or compute it again, by the rates that the worker measured."""

from math import inf

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig


class Costs:
    """Compares seconds. Ignores possible later prefix-cache hits."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def should_swap(self, num_blocks: int, num_spilled: int, num_tokens: int) -> bool:
        """Whether to swap a preempted sequence's blocks out, and not to compute its tokens again.

        Args:
            num_blocks: They go out and come in again.
            num_spilled: Blocks that must go to the disk, and come back, to make room for them.
            num_tokens: Those that they hold.
        """
        config = self._config
        if config.preemption_mode is not PreemptionMode.COST:
            return config.preemption_mode is PreemptionMode.SWAP
        swap_s = _seconds(2 * num_blocks * config.bytes_per_block, config.swap_bytes_per_s)
        spill_s = _seconds(2 * num_spilled * config.bytes_per_block, config.disk_bytes_per_s)
        return swap_s + spill_s < _seconds(num_tokens, config.prefill_tokens_per_s)

    def should_load(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to load blocks from the disk, and not to compute the tokens that this spares."""
        config = self._config
        if config.preemption_mode is not PreemptionMode.COST:
            return True
        load_s = _seconds(num_blocks * config.bytes_per_block, config.disk_bytes_per_s)
        return load_s < _seconds(num_tokens, config.prefill_tokens_per_s)


def _seconds(amount: int, per_s: float) -> float:
    """A rate that is not known is 0, and counts as bad."""
    if not amount:
        return 0.0
    return amount / per_s if per_s else inf
