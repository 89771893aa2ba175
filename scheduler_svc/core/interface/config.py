"""The configuration of a scheduler core, and snapshots of its load."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from contract.info import MemoryLevel
from contract.worker_limits import KvWindow, window_length


class Eviction(StrEnum):
    """Which cached block is evicted first."""

    LRU = "lru"
    """The block whose last holder dropped it longest ago."""
    LFU = "lfu"
    """The block with the fewest hits since it was published; ties are broken as in LRU."""
    FIFO = "fifo"
    """The oldest block. Its age counts from the first time that a holder dropped it; hits do not
    change the age."""


class PreemptionMode(StrEnum):
    """The ways to preempt a sequence."""

    COST = "cost"
    """Choose SWAP or RECOMPUTE, whichever is faster at the rates that the worker measured."""
    SWAP = "swap"
    """Copy the KV to the host if there is room, and back later."""
    RECOMPUTE = "recompute"
    """Drop the KV and compute it again later."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The configuration of a core: sizes that the worker reports, and the operator's choices."""

    num_blocks: int
    """Device blocks at the start; a resize may change their number."""
    block_size: int
    """Number of token slots in a block."""
    max_num_seqs: int
    """Number of rows: at most this many sequences run at once."""
    max_num_batched_tokens: int
    """The token budget of a step; at least `max_num_seqs`."""
    max_model_len: int
    """The limit on the tokens of one sequence."""
    kv_windows: tuple[KvWindow, ...] = (None,)
    """The window of each KV group; see `KvGroups`."""
    num_saturating_tokens: int | None = None
    """A step with this many prompt tokens keeps the device busy with arithmetic. None: a step needs
    as many tokens as the token budget."""
    min_prompt_tokens: int = 0
    """A step with decodes may have this many prompt tokens even if the step then takes long. A low
    `--max-decode-slowdown` reduces this number; see `core/pacing.py`."""
    num_draft_tokens: int = 0
    """The limit on draft tokens per sequence and step; less than `block_size`. A step yields at
    most `num_draft_tokens` + 1 tokens for a sequence."""
    max_num_blocks: int | None = None
    """The greatest number of device blocks that a resize may set; None: the number is fixed."""
    min_num_blocks: int = 1
    """The least number of device blocks that a resize may set."""
    max_waiting: int = 1024
    """The limit on waiting sequences."""
    enable_prefix_caching: bool = True
    """Whether sequences share full blocks with equal content."""
    eviction: Eviction = Eviction.LRU
    """Which cached block is evicted first, in every tier."""
    max_pinned_share: float = 0.25
    """The limit on the share of the device blocks that all pins together hold."""
    max_tenant_pinned_share: float = 1.0
    """The limit on the share of the device blocks that the pins of one tenant hold."""
    defragment_interval_s: float = 10.0
    """Seconds between two measurements of fragmentation; 0: it is never measured."""
    defragment_threshold: float = 1.0
    """Blocks are moved at this fragmentation rate or above; 1: never, as a rate is below 1."""
    max_defragment_moves: int = 32
    """The limit on blocks that defragmentation moves in one step."""
    watermark: float = 0.01
    """Share of the blocks that an admission must leave available, so that running sequences can
    grow."""
    max_prefill_chunk: int | None = None
    """The limit on the tokens of a chunk; None: only the token budget limits a chunk."""
    num_host_blocks: int = 0
    """Host blocks; 0: there is no host tier."""
    host_is_device_memory: bool = False
    """Whether host and device blocks are in the same memory, as on a CPU. A swap then frees no
    memory."""
    bytes_per_block: int = 0
    """Size of a block in device memory. The core estimates the times of copies from this size,
    although host and disk blocks are smaller if a codec encodes them."""
    swap_bytes_per_s: float = 0.0
    """The measured rate of copies between device and host; 0: unknown."""
    prefill_tokens_per_s: float = 0.0
    """The measured rate of prefill; 0: unknown."""
    num_disk_blocks: int = 0
    """Disk blocks; 0: there is no disk tier. Needs a host tier."""
    disk_bytes_per_s: float = 0.0
    """The measured rate of loading blocks from the disk; 0: unknown."""
    max_disk_moves: int = 256
    """How many disk loads may be in progress, and how many disk stores. While this many stores are
    in progress, blocks that the host evicts are lost. Stores of a preempted sequence's KV are not
    limited, because other sequences wait for its host blocks."""
    preemption_mode: PreemptionMode = PreemptionMode.COST
    """How to preempt sequences if there is a host tier."""
    max_swap_blocks: int = 256
    """How many blocks one step may swap in, and how many it may demote. Swap-outs of a preempted
    sequence are not limited, because other sequences wait for its device blocks."""
    long_prefill_threshold: int | None = None
    """A sequence with more known tokens to compute than this is long: it leaves half of a step to
    other sequences, and short sequences may overtake it. 0: no sequence is long. None: half of
    `busy_step_tokens`."""
    max_long_prefills: int = 1
    """At most this many long sequences compute their known tokens at the same time."""
    claim_s: float = 10.0
    """How long, at most, a new scheduler reserves the rows and blocks of the earlier scheduler's
    requests. When a router submits such a request again, the request keeps its rows and blocks."""
    takes_whole_prompts: bool = False
    """Whether a prompt must be computed in one step. If so, the token budget must be at least
    `max_model_len` - 1, the length of the longest prompt."""
    policy: str = "fcfs"
    """The scheduling policy, as a name or dotted path for `policies.loading.make_policy`."""
    policy_args: tuple[tuple[str, str], ...] = ()
    """The policy's keyword arguments."""

    @property
    def has_windows(self) -> bool:
        """Whether the model has several KV groups, or one with a window."""
        return self.kv_windows != (None,)

    @property
    def busy_step_tokens(self) -> int:
        """How many tokens a step needs to keep the device busy."""
        return self.num_saturating_tokens or self.max_num_batched_tokens

    @property
    def max_chunk(self) -> int | None:
        """The limit on the tokens of a chunk; None: only the token budget limits a chunk.

        If KV groups have windows, a chunk has at most as many tokens as keep the device busy,
        because a longer chunk would need far more blocks than the windows hold.
        """
        if self.takes_whole_prompts:
            return None
        if not self.has_windows:
            return self.max_prefill_chunk
        return min(self.busy_step_tokens, self.max_prefill_chunk or self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        for name in _AT_LEAST_1:
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        for name in _AT_LEAST_0:
            if (number := getattr(self, name)) is not None and not number >= 0:  # also for NaN
                raise ValueError(f"{name} is {number}; it must be at least 0")
        for name in _SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1]")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; it must be in [0, 1)")
        lengths = [window_length(window) for window in self.kv_windows]
        if not lengths or any(length is not None and length < 1 for length in lengths):
            raise ValueError(f"kv_windows is {self.kv_windows}; each must be None or at least 1")
        self._check_together()

    def _check_together(self) -> None:
        """Check the fields whose limit depends on another field."""
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
        if not 0 <= self.num_draft_tokens < self.block_size:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}; it must be at least 0 and less"
                f" than block_size, {self.block_size}"
            )
        if self.num_disk_blocks and not self.num_host_blocks:
            raise ValueError(
                f"num_disk_blocks is {self.num_disk_blocks}; without host blocks it must be 0"
            )


_AT_LEAST_1: Final = (
    "num_blocks",
    "min_num_blocks",
    "block_size",
    "max_num_seqs",
    "max_model_len",
    "max_waiting",
    "max_prefill_chunk",
    "num_saturating_tokens",
    "max_long_prefills",
    "max_defragment_moves",
    "max_disk_moves",
    "max_swap_blocks",
)
_AT_LEAST_0: Final = (
    "num_host_blocks",
    "bytes_per_block",
    "swap_bytes_per_s",
    "prefill_tokens_per_s",
    "defragment_interval_s",
    "num_disk_blocks",
    "disk_bytes_per_s",
    "long_prefill_threshold",
    "claim_s",
)
_SHARES: Final = ("max_pinned_share", "max_tenant_pinned_share", "defragment_threshold")


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """A snapshot of a core's load between two steps. Counters count from the core's start."""

    num_running: int
    num_waiting: int
    num_swapped: int
    """Waiting sequences with their KV on the host or the disk."""
    max_num_seqs: int
    num_blocks: int
    """Number of device blocks at present."""
    num_free_blocks: int
    """Device blocks without content."""
    num_cached_blocks: int
    """Device blocks that have no holder, but that the prefix cache can find."""
    num_pinned_blocks: int
    """Device blocks that pins hold; sequences may hold them, too."""
    block_size: int
    num_preemptions: int
    prefix_cache_queries: int
    """Tokens that admission looked up in the prefix cache."""
    prefix_cache_hits: int
    """Tokens that admission found in the prefix cache."""
    num_steps: int
    """Steps scheduled."""
    num_recomputed_tokens: int
    """Tokens that sequences compute again, after a preemption or after a move to this core."""
    num_adopted_tokens: int
    """Tokens of resubmitted sequences whose KV the worker still held from an earlier scheduler."""
    num_host_blocks: int
    num_free_host_blocks: int
    """Host blocks without content."""
    num_cached_host_blocks: int
    """Host blocks that have no holder, but that the prefix cache can find."""
    num_swapped_out_blocks: int
    """Blocks copied from device to host, including demoted ones."""
    num_swapped_in_blocks: int
    """Blocks copied from host to device, including promoted ones."""
    num_demoted_blocks: int
    """Cached blocks that were copied to the host when the device evicted them."""
    num_promoted_blocks: int
    """Blocks that admission found on the host."""
    num_moved_blocks: int
    """Blocks that defragmentation has moved; an exchange of two blocks counts as two."""
    num_defragmentations: int
    """Completed passes of defragmentation."""
    num_disk_blocks: int
    num_free_disk_blocks: int
    """Disk blocks without content."""
    num_cached_disk_blocks: int
    """Disk blocks that have no holder, but that the prefix cache can find."""
    num_stored_blocks: int
    """Blocks stored on the disk, those of swapped sequences included."""
    num_loaded_blocks: int
    """Blocks loaded from the disk."""
    num_failed_disk_moves: int
    """Stores and loads that failed."""
    num_spilled_blocks: int
    """Blocks of swapped sequences that were moved to the disk."""
    memory_level: MemoryLevel = MemoryLevel.OK
    """How short the worker's memory is, as it last reported."""
    num_memory_preemptions: int = 0
    """Number of preemptions because the worker's memory was short."""

    @property
    def is_memory_short(self) -> bool:
        """Whether the memory level limits how many sequences run."""
        return self.memory_level is not MemoryLevel.OK
