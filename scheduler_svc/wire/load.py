"""How busy workers are, added up."""

from collections.abc import Collection, Sequence

from quire.v1 import common_pb2
from scheduler_svc.core.compact.fragmentation import SpaceReport
from scheduler_svc.core.config import SchedulerLoad


def load_to_proto(
    loads: Sequence[SchedulerLoad],
    num_unplaced_seqs: int,
    spaces: Collection[SpaceReport],
    num_unloaded_workers: int = 0,
) -> common_pb2.Load:
    """Add up the loads of the attached workers, and what waits for one to be attached.

    Args:
        loads: One for each worker that is attached.
        num_unplaced_seqs: Sequences that wait for a worker to be attached.
        spaces: As `loads`.
        num_unloaded_workers: Workers that have no model.
    """
    return common_pb2.Load(
        num_requests_running=sum(load.num_running for load in loads),
        num_requests_waiting=sum(load.num_waiting for load in loads) + num_unplaced_seqs,
        max_num_seqs=sum(load.max_num_seqs for load in loads),
        num_blocks=sum(load.num_blocks for load in loads),
        num_free_blocks=sum(load.num_free_blocks for load in loads),
        num_cached_blocks=sum(load.num_cached_blocks for load in loads),
        block_size=max((load.block_size for load in loads), default=0),
        num_workers=len(loads),
        num_requests_swapped=sum(load.num_swapped for load in loads),
        num_host_blocks=sum(load.num_host_blocks for load in loads),
        num_free_host_blocks=sum(load.num_free_host_blocks for load in loads),
        num_cached_host_blocks=sum(load.num_cached_host_blocks for load in loads),
        num_swapped_out_blocks=sum(load.num_swapped_out_blocks for load in loads),
        num_swapped_in_blocks=sum(load.num_swapped_in_blocks for load in loads),
        num_demoted_blocks=sum(load.num_demoted_blocks for load in loads),
        num_promoted_blocks=sum(load.num_promoted_blocks for load in loads),
        num_pinned_blocks=sum(load.num_pinned_blocks for load in loads),
        num_moved_blocks=sum(load.num_moved_blocks for load in loads),
        num_prefix_cache_queries=sum(load.prefix_cache_queries for load in loads),
        num_prefix_cache_hits=sum(load.prefix_cache_hits for load in loads),
        fragmentation=max((space.device.rate for space in spaces), default=0.0),
        host_fragmentation=max((space.host.rate for space in spaces), default=0.0),
        num_slots_held=sum(space.num_slots_held for space in spaces),
        num_slots_written=sum(space.num_slots_written for space in spaces),
        num_disk_blocks=sum(load.num_disk_blocks for load in loads),
        num_free_disk_blocks=sum(load.num_free_disk_blocks for load in loads),
        num_cached_disk_blocks=sum(load.num_cached_disk_blocks for load in loads),
        num_stored_blocks=sum(load.num_stored_blocks for load in loads),
        num_loaded_blocks=sum(load.num_loaded_blocks for load in loads),
        num_failed_disk_moves=sum(load.num_failed_disk_moves for load in loads),
        num_spilled_blocks=sum(load.num_spilled_blocks for load in loads),
        num_unloaded_workers=num_unloaded_workers,
    )
