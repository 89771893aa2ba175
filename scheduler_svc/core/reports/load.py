"""Takes snapshots of a core: its load, its counters, and how well it uses its blocks."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_svc.core.compact.fragmentation import SpaceReport, measure
from scheduler_svc.core.interface.config import SchedulerLoad
from scheduler_svc.core.pacing import PromptQueue
from scheduler_svc.core.sequence import RUNNING, SeqStatus

if TYPE_CHECKING:
    from scheduler_svc.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Queues:
    """Numbers of sequences and preemptions that are cheap enough to read for every step."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    """Number of preemptions since the core's start."""


def read_queues(core: "Scheduler") -> Queues:
    return Queues(
        num_running=len(core.running),
        num_waiting=core.num_waiting,
        num_preemptions=core.preemption.num_preemptions,
    )


def read_prompts(core: "Scheduler") -> PromptQueue:
    """Count the prompt tokens to compute; takes time in proportion to the prefilling sequences.

    If too few rows or blocks are left for all waiting prompts, only a fraction of these prompts'
    tokens counts. The fraction is computed as if all waiting prompts had the average length.
    """
    num_tokens = num_short_tokens = num_short = 0
    for seq in core.running.prefilling:
        if (num_left := seq.num_tokens_left) > 1:  # one token costs as much as a decode
            num_tokens += num_left
            is_long = core.budget.is_long(len(seq.token_ids) - seq.num_cached_tokens)
            # The last tokens of a long prompt count as long, too.
            num_short_tokens += 0 if is_long else num_left
            num_short += not is_long
    waiting = core.queue
    if waiting.num_tokens:
        num_free_slots = core.pool.num_available * core.config.block_size // core.groups.num
        share = min(1.0, core.rows.num_free / len(waiting), num_free_slots / waiting.num_tokens)
        num_tokens += int(share * waiting.num_tokens)
        num_short_tokens += int(share * waiting.num_short_tokens)
        num_short += int(share * waiting.num_short)
    return PromptQueue(core.running.num_decoding, num_tokens, num_short_tokens, num_short)


def num_steps_sent(core: "Scheduler") -> int:
    return core.steps.last


def num_steps_answered(core: "Scheduler") -> int:
    return core.steps.last_answered


def has_live_with(core: "Scheduler", salt: str) -> bool:
    """Return whether a live request has a cache salt that begins with `salt`."""
    return any(seq.request.cache_salt.startswith(salt) for seq in core.live)


def read_load(core: "Scheduler") -> SchedulerLoad:
    """Take a snapshot of the load.

    This takes time in proportion to the number of sequences that wait for the disk or are moving to
    another core.
    """
    return SchedulerLoad(
        memory_level=core.pressure.level,
        num_memory_preemptions=core.preemption.num_for_memory,
        num_running=len(core.running),
        num_waiting=core.num_waiting + core.moves.num_leaving,
        num_swapped=core.queue.num_swapped + core.fetching.num_swapped,
        max_num_seqs=core.config.max_num_seqs,
        num_blocks=core.pool.num_blocks - core.groups.num_null,
        num_free_blocks=core.pool.num_free,
        num_cached_blocks=core.pool.num_cached,
        num_pinned_blocks=len(core.pins),
        block_size=core.config.block_size,
        num_preemptions=core.preemption.num_preemptions,
        prefix_cache_queries=core.prefix_cache_queries,
        prefix_cache_hits=core.prefix_cache_hits,
        num_steps=core.steps.last,
        num_recomputed_tokens=core.num_recomputed_tokens
        + core.beams.num_recomputed_tokens
        + core.takeover.num_recomputed_tokens
        + core.preemption.num_recomputed_tokens,
        num_adopted_tokens=core.takeover.num_adopted_tokens,
        num_spilled_blocks=core.host_room.num_spilled,
        **core.tier.counts(),
        num_moved_blocks=core.defragmenter.num_moved,
        num_defragmentations=core.defragmenter.num_passes,
    )


# A spare does not wait itself: its search runs, or the search's leader waits in the queue.
_NOT_QUEUED = RUNNING | {SeqStatus.SPARE}


def count_queued(core: "Scheduler") -> Counter[str]:
    """For each tenant, count the live sequences that do not run; visits every live sequence."""
    return Counter(seq.request.tenant for seq in core.live if seq.status not in _NOT_QUEUED)


def read_space(core: "Scheduler") -> SpaceReport:
    """Measure how well blocks are used; visits every block and every running sequence."""
    running = core.running
    return SpaceReport(
        device=measure(core.pool.usable_ref_counts),
        host=measure(core.tier.pool.ref_counts),
        num_slots_held=sum(len(seq.block_ids) for seq in running)
        // core.groups.num
        * core.config.block_size,
        num_slots_written=sum(map(running.num_computed_tokens, running)),
    )
