"""Snapshots of a core: what it holds and has done, and how well it uses its space."""

# It reads what the core's parts keep to themselves, for the core.
# ruff: noqa: SLF001

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.info import MemoryLevel
from scheduler_svc.core.compact.fragmentation import SpaceReport, measure
from scheduler_svc.core.config import SchedulerLoad
from scheduler_svc.core.sequence import RUNNING

if TYPE_CHECKING:
    from scheduler_svc.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Queues:
    """What is cheap enough to look at for every step."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    """Since the start."""


def read_queues(core: "Scheduler") -> Queues:
    """Take a snapshot of the queues' lengths: a few lookups, where `read_load` is dozens."""
    return Queues(
        num_running=len(core._running),
        num_waiting=len(core._waiting) + len(core._fetching) + core._live.num_siblings,
        num_preemptions=core._preempting.num_preemptions,
    )


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """What there is to compute of prompts, and beside how many decodes."""

    num_decoding: int
    """Sequences that decode in the next step, as far as is known."""
    num_tokens: int
    """Tokens of prompts that are at work, or could have their turn."""
    num_short_tokens: int
    """Those of them that are not of a long prompt."""
    num_short: int
    """Prompts that these are of."""


def read_prompts(core: "Scheduler") -> PromptQueue:
    """Look at the prompts of `core`; it takes time in proportion to those at work.

    Those that wait for a row or for blocks do not count. How many do is estimated by what the
    waiting need on average.
    """
    num_tokens = num_short_tokens = num_short = 0
    for seq in core._running.prefilling:
        if (num_left := seq.num_tokens_left) > 1:  # else it costs what a decode does
            num_tokens += num_left
            is_long = core._long_prefills.is_long(len(seq.token_ids) - seq.num_cached_tokens)
            num_short_tokens += 0 if is_long else num_left  # the end of a long one is long
            num_short += not is_long
    waiting = core._waiting
    if waiting.num_tokens:
        num_free_slots = core._pool.num_free * core.config.block_size
        share = min(1.0, core._rows.num_free / len(waiting), num_free_slots / waiting.num_tokens)
        num_tokens += int(share * waiting.num_tokens)
        num_short_tokens += int(share * waiting.num_short_tokens)
        num_short += int(share * waiting.num_short)
    return PromptQueue(core._running.num_decoding, num_tokens, num_short_tokens, num_short)


def num_steps_sent(core: "Scheduler") -> int:
    """Count the steps that `core` has planned."""
    return core._steps.last


def num_steps_answered(core: "Scheduler") -> int:
    """Count those of them whose results it has; they come in order."""
    return core._steps.last_answered


def has_live_with(core: "Scheduler", salt: str) -> bool:
    """Look whether a live request has a cache salt that begins with `salt`."""
    return any(seq.request.cache_salt.startswith(salt) for seq in core._live)


def read_load(
    core: "Scheduler",
    memory_level: MemoryLevel = MemoryLevel.OK,
    num_memory_preemptions: int = 0,
) -> SchedulerLoad:
    """Take a snapshot of `core`; it costs the same whatever there is."""
    return SchedulerLoad(
        memory_level=memory_level,
        num_memory_preemptions=num_memory_preemptions,
        num_running=len(core._running),
        num_waiting=len(core._waiting) + len(core._fetching) + core._live.num_siblings,
        num_swapped=core._waiting.num_swapped + core._fetching.num_swapped,
        max_num_seqs=core.config.max_num_seqs,
        num_blocks=core._pool.num_blocks,
        num_free_blocks=core._pool.num_blank,
        num_cached_blocks=core._pool.num_cached,
        num_pinned_blocks=len(core._pins),
        block_size=core.config.block_size,
        num_preemptions=core._preempting.num_preemptions,
        prefix_cache_queries=core._prefix_cache_queries,
        prefix_cache_hits=core._prefix_cache_hits,
        num_steps=core._steps.last,
        num_recomputed_tokens=core._num_recomputed_tokens + core._beams.num_recomputed_tokens,
        num_adopted_tokens=core._num_adopted_tokens,
        num_spilled_blocks=core._host_room.num_spilled,
        **core._tier.counts(),
        num_moved_blocks=core._defragmenter.num_moved,
        num_defragmentations=core._defragmenter.num_passes,
    )


def count_queued(core: "Scheduler") -> Counter[str]:
    """Count the sequences that wait, by tenant; it takes time in proportion to those that live."""
    return Counter(seq.request.tenant for seq in core._live if seq.status not in RUNNING)


def read_space(core: "Scheduler") -> SpaceReport:
    """Look at the blocks of `core`; it takes time in proportion to pools and running sequences."""
    running = core._running
    return SpaceReport(
        device=measure(core._pool.usable_ref_counts),
        host=measure(core._tier.pool.ref_counts),
        num_slots_held=sum(len(seq.block_ids) for seq in running) * core.config.block_size,
        num_slots_written=sum(map(running.num_computed_tokens, running)),
    )
