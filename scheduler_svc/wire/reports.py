"""Converts reports about workers: their load and activity, and which sequence holds which blocks.

Many messages are made from an object of this process, such as a `StepRecord`. Fields that have the
same name in the message and in the object are copied by name.
"""

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Final

from contract.codec.info import memory_level_to_proto
from contract.codec.packing import pack_int32
from contract.errors import InvalidArgumentError
from quire.v1 import common_pb2, kv_pb2
from scheduler_svc.core.compact.fragmentation import SpaceReport
from scheduler_svc.core.interface.config import SchedulerLoad
from scheduler_svc.core.reports.describe import (
    MAX_BLOCKS,
    MAX_SEQUENCES,
    BlockState,
    Description,
    Query,
    SequenceDescription,
    TierDescription,
)
from scheduler_svc.observers.step_log import MAX_STEPS, StepLog, StepRecord

_DEFAULT_STEPS: Final = 256
_SUMMED: Final = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "num_requests_swapped": "num_swapped",
    "num_prefix_cache_queries": "prefix_cache_queries",
    "num_prefix_cache_hits": "prefix_cache_hits",
} | {
    field.name: field.name
    for field in common_pb2.Load.DESCRIPTOR.fields
    if field.name in SchedulerLoad.__slots__ and field.name != "block_size"
}
"""Maps each field of `Load` that is a sum over workers to the `SchedulerLoad` field it sums."""
_STEP_FIELDS: Final = [field.name for field in fields(StepRecord)]
_SEQUENCE_FIELDS: Final = [
    field.name
    for field in fields(SequenceDescription)
    if field.name != "status" and not field.name.endswith("_ids")
]


def load_to_proto(
    loads: Sequence[SchedulerLoad],
    num_unplaced_seqs: int,
    spaces: Collection[SpaceReport],
    num_unloaded_workers: int = 0,
) -> common_pb2.Load:
    """Sum the loads of the workers.

    Args:
        loads: The load of each attached worker.
        num_unplaced_seqs: Number of sequences that have not been sent to a worker.
        spaces: The report of each attached worker on its block space.
        num_unloaded_workers: Number of workers without a model.
    """
    message = common_pb2.Load(
        block_size=max((load.block_size for load in loads), default=0),
        num_workers=len(loads),
        fragmentation=max((space.device.rate for space in spaces), default=0.0),
        host_fragmentation=max((space.host.rate for space in spaces), default=0.0),
        num_slots_held=sum(space.num_slots_held for space in spaces),
        num_slots_written=sum(space.num_slots_written for space in spaces),
        num_unloaded_workers=num_unloaded_workers,
        **{name: sum(getattr(load, of) for load in loads) for name, of in _SUMMED.items()},
    )
    message.num_requests_waiting += num_unplaced_seqs
    return message


def activity_to_proto(
    worker: str,
    log: StepLog,
    load: SchedulerLoad,
    space: SpaceReport,
    query: common_pb2.ActivityQuery,
) -> common_pb2.WorkerActivity:
    """Describe the activity of a worker; `check_activity_query` must have accepted `query`."""
    max_steps = query.max_steps if query.HasField("max_steps") else _DEFAULT_STEPS
    return common_pb2.WorkerActivity(
        worker=worker,
        attached_at_s=log.attached_at_s,
        load=load_to_proto([load], 0, [space]),
        num_steps=log.totals.num_steps,
        num_prefill_tokens=log.totals.num_prefill_tokens,
        num_decode_tokens=log.totals.num_decode_tokens,
        num_preemptions=load.num_preemptions,
        busy_s=log.totals.busy_s,
        memory_level=memory_level_to_proto(load.memory_level),
        steps=[
            common_pb2.StepRecord(**{name: getattr(step, name) for name in _STEP_FIELDS})
            for step in log.latest(max_steps, query.after_step_id)
        ],
    )


def check_activity_query(query: common_pb2.ActivityQuery) -> None:
    """Check that `max_steps` is within its limit, and that `after_step_id` comes with `worker`.

    Raises:
        InvalidArgumentError: A check failed.
    """
    if query.max_steps > MAX_STEPS:
        raise InvalidArgumentError(
            "query.max_steps", f"is {query.max_steps}; it must be in [0, {MAX_STEPS}]"
        )
    if query.after_step_id and not query.worker:
        raise InvalidArgumentError(
            "query.after_step_id",
            f"is {query.after_step_id}, but query.worker is empty; step ids differ per worker",
        )


def kv_query_from_proto(message: kv_pb2.KvQuery) -> Query:
    """Parse a query, without its field `worker`.

    Raises:
        InvalidArgumentError: A number exceeds its limit.
    """
    default = Query()
    has_sequences = message.HasField("max_sequences")
    query = Query(
        first_seq_id=message.first_seq_id,
        max_sequences=message.max_sequences if has_sequences else default.max_sequences,
        first_block=message.first_block,
        max_blocks=message.max_blocks if message.HasField("max_blocks") else default.max_blocks,
        with_ref_counts=message.ref_counts,
        with_block_tables=message.block_tables,
    )
    for field, limit in (("max_sequences", MAX_SEQUENCES), ("max_blocks", MAX_BLOCKS)):
        if (value := getattr(query, field)) > limit:
            raise InvalidArgumentError(f"query.{field}", f"is {value}; it must be in [0, {limit}]")
    return query


def kv_to_proto(worker: str, it: Description) -> kv_pb2.WorkerKv:
    """Convert the description of a worker's blocks and sequences."""
    return kv_pb2.WorkerKv(
        worker=worker,
        block_size=it.block_size,
        block_bytes=it.bytes_per_block,
        tiers=map(_tier_to_proto, it.tiers),
        sequences=map(_sequence_to_proto, it.sequences),
        num_sequences=it.num_sequences,
        next_seq_id=it.next_seq_id or 0,
    )


def _tier_to_proto(it: TierDescription) -> kv_pb2.TierKv:
    counts = it.state_to_num_blocks
    return kv_pb2.TierKv(
        tier=f"KV_TIER_{it.tier.name}",
        num_blocks=it.num_blocks,
        num_held=counts[BlockState.HELD],
        num_shared=counts[BlockState.SHARED],
        num_cached=counts[BlockState.CACHED],
        num_pinned=counts[BlockState.PINNED],
        num_free=counts[BlockState.FREE],
        num_retired=counts[BlockState.RETIRED],
        states=it.states.tobytes(),  # the enums have the same numbers
        ref_counts=pack_int32(it.ref_counts),
        next_block=it.next_block or 0,
    )


def _sequence_to_proto(it: SequenceDescription) -> kv_pb2.SequenceKv:
    return kv_pb2.SequenceKv(
        **{name: getattr(it, name) for name in _SEQUENCE_FIELDS},
        status=f"SEQUENCE_STATUS_{it.status.name}",
        device_block_ids=pack_int32(it.device_block_ids),
        host_block_ids=pack_int32(it.host_block_ids),
        disk_block_ids=pack_int32(it.disk_block_ids),
    )
