"""The room that a scheduler core divides, and how it divides it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """One worker's room, as the worker reports it, and the operator's choices."""

    num_blocks: int
    """Device blocks."""
    block_size: int
    """Token slots of a block."""
    max_num_seqs: int
    """Rows: the most sequences that run at once."""
    max_num_batched_tokens: int
    """The token budget of a step; at least `max_num_seqs`."""
    max_model_len: int
    """Most tokens of one sequence."""
    max_waiting: int = 1024
    """Most sequences that may wait."""
    enable_prefix_caching: bool = True
    """Whether full blocks are found again by content."""
    watermark: float = 0.01
    """Share of the blocks that admission leaves free for the running sequences to grow into."""
    max_prefill_chunk: int | None = None
    """Most known tokens of one sequence in one step; None: the token budget."""
    long_prefill_threshold: int | None = None
    """A sequence with more known tokens to compute is long: it leaves half of a step to others, and
    others overtake it. 0: none is. None: half the token budget. What fits there is computed in one
    step, and holds nobody up for longer."""
    max_long_prefills: int = 1
    """Most long sequences that compute their known tokens at the same time."""
    policy: str = "fcfs"
    """The order of the sequences: what `policies.loading.make_policy` takes."""
    policy_args: tuple[tuple[str, str], ...] = ()
    """The policy's arguments, by name."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs, {self.max_num_seqs}, so that all sequences can decode in one step"
            )
        for name in (
            "num_blocks",
            "block_size",
            "max_num_seqs",
            "max_model_len",
            "max_waiting",
            "max_long_prefills",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_prefill_chunk is not None and self.max_prefill_chunk < 1:
            raise ValueError(
                f"max_prefill_chunk is {self.max_prefill_chunk}; it must be at least 1"
            )
        if self.long_prefill_threshold is not None and self.long_prefill_threshold < 0:
            raise ValueError(
                f"long_prefill_threshold is {self.long_prefill_threshold}; it must be at least 0"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; it must be in [0, 1)")


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """A snapshot of a core between two steps."""

    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_blocks: int
    num_free_blocks: int
    """Blank blocks: they hold nothing."""
    num_cached_blocks: int
    """Blocks that nobody holds and that the prefix cache can still find."""
    block_size: int
    num_preemptions: int
    prefix_cache_queries: int
    """Tokens looked up, since the start."""
    prefix_cache_hits: int
    """Tokens found, since the start."""
    num_steps: int
    """Steps scheduled, since the start."""
