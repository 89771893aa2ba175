"""Between the contract's words for KV blocks and `quire.client.kv_types`."""

from collections.abc import Iterable
from typing import Final

from contract.packing import unpack_int32
from quire.client.kv_types import KvTier, SequenceKv, SequenceStatus, TierKv, WorkerKv
from quire.v1 import inference_pb2, kv_pb2

_TIERS: Final = {
    kv_pb2.KV_TIER_DEVICE: KvTier.DEVICE,
    kv_pb2.KV_TIER_HOST: KvTier.HOST,
    kv_pb2.KV_TIER_DISK: KvTier.DISK,
}
_STATUSES: Final = {
    kv_pb2.SEQUENCE_STATUS_WAITING: SequenceStatus.WAITING,
    kv_pb2.SEQUENCE_STATUS_SWAPPED: SequenceStatus.SWAPPED,
    kv_pb2.SEQUENCE_STATUS_SIBLING: SequenceStatus.SIBLING,
    kv_pb2.SEQUENCE_STATUS_PREFILL: SequenceStatus.PREFILL,
    kv_pb2.SEQUENCE_STATUS_DECODE: SequenceStatus.DECODE,
    kv_pb2.SEQUENCE_STATUS_MIGRATING: SequenceStatus.MIGRATING,
    kv_pb2.SEQUENCE_STATUS_FETCHING: SequenceStatus.FETCHING,
}


def workers_kv_from_proto(response: inference_pb2.DescribeKvResponse) -> tuple[WorkerKv, ...]:
    """Take the description; tiers that a later service may have, and this client not, are left."""
    return tuple(
        WorkerKv(
            worker=worker.worker,
            block_size=worker.block_size,
            block_bytes=worker.block_bytes,
            tiers=tuple(_tiers_from_proto(worker.tiers)),
            sequences=tuple(map(_sequence_from_proto, worker.sequences)),
            num_sequences=worker.num_sequences,
            next_seq_id=worker.next_seq_id or None,
        )
        for worker in response.workers
    )


def _tiers_from_proto(tiers: Iterable[kv_pb2.TierKv]) -> Iterable[TierKv]:
    for tier in tiers:
        if tier.tier in _TIERS:
            yield TierKv(
                tier=_TIERS[tier.tier],
                num_blocks=tier.num_blocks,
                num_held=tier.num_held,
                num_shared=tier.num_shared,
                num_cached=tier.num_cached,
                num_pinned=tier.num_pinned,
                num_blank=tier.num_blank,
                num_retired=tier.num_retired,
                states=tier.states,
                ref_counts=_ints(tier.ref_counts, "ref_counts"),
                next_block=tier.next_block or None,
            )


def _sequence_from_proto(seq: kv_pb2.SequenceKv) -> SequenceKv:
    return SequenceKv(
        seq_id=seq.seq_id,
        request_id=seq.request_id,
        output_index=seq.output_index,
        status=_STATUSES.get(seq.status, SequenceStatus.WAITING),
        num_tokens=seq.num_tokens,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        num_device_blocks=seq.num_device_blocks,
        num_host_blocks=seq.num_host_blocks,
        num_disk_blocks=seq.num_disk_blocks,
        num_shared_blocks=seq.num_shared_blocks,
        device_block_ids=_ints(seq.device_block_ids, "device_block_ids"),
        host_block_ids=_ints(seq.host_block_ids, "host_block_ids"),
        disk_block_ids=_ints(seq.disk_block_ids, "disk_block_ids"),
    )


def _ints(packed: bytes, field: str) -> tuple[int, ...]:
    return tuple(unpack_int32(packed, field).tolist())
