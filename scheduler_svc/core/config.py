"""A scheduler core's configuration, and its load."""

from dataclasses import dataclass
from enum import StrEnum

from contract.info import MemoryLevel
from scheduler_svc.core.cache.eviction import Eviction


class PreemptionMode(StrEnum):
    """What preemption does with a sequence's KV."""

    COST = "cost"
    """SWAP or RECOMPUTE, whichever takes less time, by the rates that the worker measured."""
    SWAP = "swap"
    """It is moved to the host, as long as there is room, and back later."""
    RECOMPUTE = "recompute"
    """It is dropped, and computed again later."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """One worker's room, as the worker reports it, and the operator's choices."""

    num_blocks: int
    """Device blocks, at first."""
    block_size: int
    """Token slots of a block."""
    max_num_seqs: int
    """Rows: the most sequences that run at once."""
    max_num_batched_tokens: int
    """The token budget of a step; at least `max_num_seqs`."""
    max_model_len: int
    """Most tokens of one sequence."""
    num_saturating_tokens: int | None = None
    """How many prompt tokens keep the device busy with arithmetic; None: the token budget."""
    num_draft_tokens: int = 0
    """Most tokens that the worker guesses and verifies for a sequence beside its next one, so that
    a step may bring it one more than that; less than `block_size`."""
    max_num_blocks: int | None = None
    """Most device blocks that a resize may give; None: their number is fixed."""
    min_num_blocks: int = 1
    """Fewest device blocks that a resize may leave."""
    max_waiting: int = 1024
    """Most sequences that may wait."""
    enable_prefix_caching: bool = True
    """Whether full blocks are found again by content."""
    eviction: Eviction = Eviction.LRU
    """Which cached block goes first, in every tier."""
    max_pinned_share: float = 0.25
    """Share of the device blocks that pins may hold together."""
    defragment_interval_s: float = 10.0
    """How often fragmentation is looked at; 0: never."""
    defragment_threshold: float = 1.0
    """Fragmentation rate from which blocks are then moved; no rate is as high as 1."""
    max_defragment_moves: int = 32
    """Most blocks that defragmentation moves in one step."""
    watermark: float = 0.01
    """Share of the blocks that admission leaves free for the running sequences to grow into."""
    max_prefill_chunk: int | None = None
    """Most known tokens of one sequence in one step; None: the token budget."""
    num_host_blocks: int = 0
    """Host blocks; 0: there is no host tier."""
    host_is_device_memory: bool = False
    """Whether what goes to the host leaves the device's memory as full as it was, as on a CPU."""
    bytes_per_block: int = 0
    """Size of a block, in either tier."""
    swap_bytes_per_s: float = 0.0
    """How fast blocks move between the tiers; 0: not known."""
    prefill_tokens_per_s: float = 0.0
    """How fast prompts are computed; 0: not known."""
    num_disk_blocks: int = 0
    """Disk blocks; 0: there is no disk tier. Needs a host tier."""
    disk_bytes_per_s: float = 0.0
    """How fast blocks come from the disk; 0: not known."""
    max_disk_moves: int = 256
    """Most loads under way, and most stores, beyond which evicted blocks are lost. What preempted
    sequences spill is not bounded: its room is needed at once."""
    preemption_mode: PreemptionMode = PreemptionMode.COST
    """What becomes of a preempted sequence's KV, if there is a host tier."""
    max_swap_blocks: int = 256
    """Most blocks that one step swaps in, and most that it demotes. What preemption swaps out is
    not bounded: its room is needed at once."""
    long_prefill_threshold: int | None = None
    """A sequence with more known tokens to compute is long: it leaves half of a step to others, and
    others overtake it. 0: none is, so none is paced either. None: half of what keeps the device
    busy: a shorter prompt is computed in one step, and delays others no further."""
    max_long_prefills: int = 1
    """Most long sequences that compute their known tokens at the same time."""
    claim_s: float = 10.0
    """How long the sequences that a worker held for the scheduler before may be claimed."""
    policy: str = "fcfs"
    """The order of the sequences: what `policies.loading.make_policy` takes."""
    policy_args: tuple[tuple[str, str], ...] = ()
    """The policy's arguments, by name."""

    @property
    def busy_step_tokens(self) -> int:
        """Tokens with which a step keeps the device busy."""
        return self.num_saturating_tokens or self.max_num_batched_tokens

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs, {self.max_num_seqs}, so that all sequences can decode in one step"
            )
        if self.max_num_blocks is not None and self.max_num_blocks < self.num_blocks:
            raise ValueError(
                f"max_num_blocks is {self.max_num_blocks}; it must be at least num_blocks,"
                f" {self.num_blocks}"
            )
        if self.min_num_blocks > self.num_blocks:
            raise ValueError(
                f"min_num_blocks is {self.min_num_blocks}; it must be at most num_blocks,"
                f" {self.num_blocks}"
            )
        for name in (
            "num_blocks",
            "min_num_blocks",
            "block_size",
            "max_num_seqs",
            "max_model_len",
            "max_waiting",
            "max_long_prefills",
            "max_defragment_moves",
            "max_disk_moves",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.num_draft_tokens < self.block_size:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}; it must be at least 0 and less"
                f" than block_size, {self.block_size}"
            )
        for name in ("max_prefill_chunk", "num_saturating_tokens"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        for name in (
            "num_host_blocks",
            "bytes_per_block",
            "swap_bytes_per_s",
            "prefill_tokens_per_s",
            "defragment_interval_s",
            "num_disk_blocks",
            "disk_bytes_per_s",
            "claim_s",
        ):
            if not getattr(self, name) >= 0:  # also for NaN
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.num_disk_blocks and not self.num_host_blocks:
            raise ValueError(
                f"num_disk_blocks is {self.num_disk_blocks}; without host blocks it must be 0"
            )
        if self.max_swap_blocks < 1:
            raise ValueError(f"max_swap_blocks is {self.max_swap_blocks}; it must be at least 1")
        if self.long_prefill_threshold is not None and self.long_prefill_threshold < 0:
            raise ValueError(
                f"long_prefill_threshold is {self.long_prefill_threshold}; it must be at least 0"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; it must be in [0, 1)")
        for name in ("max_pinned_share", "defragment_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1]")


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """A snapshot of a core between two steps."""

    num_running: int
    num_waiting: int
    num_swapped: int
    """Waiting sequences with their KV on the host or the disk."""
    max_num_seqs: int
    num_blocks: int
    """Device blocks, at present."""
    num_free_blocks: int
    """Blocks that hold nothing."""
    num_cached_blocks: int
    """Blocks that are not held and that the prefix cache can still find."""
    num_pinned_blocks: int
    """Blocks that pins keep in the prefix cache; sequences may hold some of them, too."""
    block_size: int
    num_preemptions: int
    prefix_cache_queries: int
    """Tokens looked up, since the start."""
    prefix_cache_hits: int
    """Tokens found, since the start."""
    num_steps: int
    """Steps scheduled, since the start."""
    num_recomputed_tokens: int
    """Tokens that sequences have to compute again, since the start: those that were preempted, and
    those that were live at another worker or scheduler before."""
    num_adopted_tokens: int
    """Tokens of resubmitted sequences with KV that the worker still had, since the start."""
    num_host_blocks: int
    num_free_host_blocks: int
    """Host blocks that hold nothing."""
    num_cached_host_blocks: int
    """Host blocks that are not held and that the prefix cache can still find."""
    num_swapped_out_blocks: int
    """Blocks copied from device to host, since the start, demoted ones included."""
    num_swapped_in_blocks: int
    """Blocks copied from host to device, since the start, promoted ones included."""
    num_demoted_blocks: int
    """Cached blocks copied to the host when the device needed their room, since the start."""
    num_promoted_blocks: int
    """Blocks that admission found on the host, since the start."""
    num_moved_blocks: int
    """Blocks that defragmentation has moved, since the start; two that change places are two."""
    num_defragmentations: int
    """Passes of defragmentation that have ended, since the start."""
    num_disk_blocks: int
    num_free_disk_blocks: int
    """Disk blocks that hold nothing."""
    num_cached_disk_blocks: int
    """Disk blocks that are not held and that the prefix cache can still find."""
    num_stored_blocks: int
    """Blocks stored on the disk, since the start, spilled ones included."""
    num_loaded_blocks: int
    """Blocks loaded from the disk, since the start."""
    num_failed_disk_moves: int
    """Stores and loads that failed, since the start."""
    num_spilled_blocks: int
    """Blocks of swapped sequences moved to the disk, since the start."""
    memory_level: MemoryLevel = MemoryLevel.OK
    """How short the worker's memory is, by its last report."""
    num_memory_preemptions: int = 0
    """Preemptions because of that."""

    @property
    def is_memory_short(self) -> bool:
        """Whether fewer sequences run than could if memory were not short."""
        return self.memory_level is not MemoryLevel.OK
