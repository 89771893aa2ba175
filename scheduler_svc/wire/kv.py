"""Between what `DescribeKv` asks and answers, and what is known of a core's blocks."""

from typing import Final

from contract.errors import InvalidArgumentError
from contract.packing import pack_int32
from quire.v1 import kv_pb2
from scheduler_svc.core.reports.describe import (
    MAX_BLOCKS,
    MAX_SEQUENCES,
    BlockState,
    Description,
    Query,
    SequenceDescription,
    Tier,
    TierDescription,
)
from scheduler_svc.core.sequence import SeqStatus

_TIER_TO_PROTO: Final = {
    Tier.DEVICE: kv_pb2.KV_TIER_DEVICE,
    Tier.HOST: kv_pb2.KV_TIER_HOST,
    Tier.DISK: kv_pb2.KV_TIER_DISK,
}
_STATUS_TO_PROTO: Final = {
    SeqStatus.WAITING: kv_pb2.SEQUENCE_STATUS_WAITING,
    SeqStatus.SWAPPED: kv_pb2.SEQUENCE_STATUS_SWAPPED,
    SeqStatus.SIBLING: kv_pb2.SEQUENCE_STATUS_SIBLING,
    SeqStatus.PREFILL: kv_pb2.SEQUENCE_STATUS_PREFILL,
    SeqStatus.DECODE: kv_pb2.SEQUENCE_STATUS_DECODE,
    SeqStatus.MIGRATING: kv_pb2.SEQUENCE_STATUS_MIGRATING,
    SeqStatus.FETCHING: kv_pb2.SEQUENCE_STATUS_FETCHING,
}


def query_from_proto(message: kv_pb2.KvQuery) -> Query:
    """Take what is asked for; `worker` is the caller's to look at.

    Raises:
        InvalidArgumentError: A number is beyond its limit.
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


def description_to_proto(worker: str, it: Description) -> kv_pb2.WorkerKv:
    """Say what a worker holds."""
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
        tier=_TIER_TO_PROTO[it.tier],
        num_blocks=it.num_blocks,
        num_held=counts[BlockState.HELD],
        num_shared=counts[BlockState.SHARED],
        num_cached=counts[BlockState.CACHED],
        num_pinned=counts[BlockState.PINNED],
        num_blank=counts[BlockState.FREE],
        num_retired=counts[BlockState.RETIRED],
        states=it.states.tobytes(),  # the enums have the same numbers
        ref_counts=pack_int32(it.ref_counts),
        next_block=it.next_block or 0,
    )


def _sequence_to_proto(it: SequenceDescription) -> kv_pb2.SequenceKv:
    return kv_pb2.SequenceKv(
        seq_id=it.seq_id,
        request_id=it.request_id,
        output_index=it.output_index,
        status=_STATUS_TO_PROTO[it.status],
        num_tokens=it.num_tokens,
        num_prompt_tokens=it.num_prompt_tokens,
        num_computed_tokens=it.num_computed_tokens,
        num_cached_tokens=it.num_cached_tokens,
        num_device_blocks=it.num_device_blocks,
        num_host_blocks=it.num_host_blocks,
        num_disk_blocks=it.num_disk_blocks,
        num_shared_blocks=it.num_shared_blocks,
        device_block_ids=pack_int32(it.device_block_ids),
        host_block_ids=pack_int32(it.host_block_ids),
        disk_block_ids=pack_int32(it.disk_block_ids),
    )
