"""Parses a scheduler's messages, and checks them against this worker's limits."""

from contract.arrays import Int32Array
from contract.codec.message_checks import check_distinct, check_parallel, check_values
from contract.codec.packing import unpack_int32
from contract.codec.step import plan_from_proto
from contract.errors import InvalidArgumentError
from contract.hashing import HASH_BYTES, BlockHash, split_hashes
from contract.sampling import SamplingParams
from contract.step import Plan
from contract.worker_limits import Limits
from gpu_worker.service.sampling_wire import adapter_from_proto, sampling_params_from_proto
from quire.v1 import worker_pb2


def plan_of(batch: worker_pb2.StepBatch, limits: Limits) -> Plan:
    """Parse a batch, including the sampling parameters of its new sequences.

    Raises:
        InvalidArgumentError: A field is malformed or out of range.
    """
    return plan_from_proto(batch, limits, _read_sampling)


def _read_sampling(new: worker_pb2.NewSequence, limits: Limits) -> tuple[SamplingParams, int]:
    sampling = sampling_params_from_proto(
        new.sampling, new.output_index, limits.vocab_size, limits.max_model_len
    )
    return sampling, adapter_from_proto(new.sampling, limits.adapters)


def host_blocks_to_read(message: worker_pb2.ReadKvRequest, limits: Limits) -> Int32Array:
    """Parse int32[N], the host blocks that another worker wants to read from this worker.

    Raises:
        InvalidArgumentError: This worker does not have one of the blocks.
    """
    return _host_blocks(message.host_block_ids, limits)


def host_blocks_to_pull(
    message: worker_pb2.PullKvRequest, limits: Limits
) -> tuple[Int32Array, Int32Array]:
    """Parse int32[N] host blocks of another worker, and N distinct host blocks of this worker.

    Raises:
        InvalidArgumentError: A host block of this worker does not exist or is named twice, or the
            two arrays differ in length.
    """
    sources = unpack_int32(message.source_host_block_ids, "source_host_block_ids")
    targets = _host_blocks(message.host_block_ids, limits)
    check_parallel("host_block_ids", targets, "source_host_block_ids", sources)
    check_distinct("host_block_ids", targets)
    return sources, targets


def blocks_and_labels(
    message: worker_pb2.StoreKvRequest | worker_pb2.FetchKvRequest, limits: Limits
) -> tuple[Int32Array, list[BlockHash]]:
    """Parse int32[N] distinct host blocks of this worker, and N labels.

    Raises:
        InvalidArgumentError: A block does not exist or is named twice, or the blocks and labels
            differ in number.
    """
    block_ids = _host_blocks(message.host_block_ids, limits)
    check_distinct("host_block_ids", block_ids)
    if len(message.labels) != len(block_ids) * HASH_BYTES:
        raise InvalidArgumentError(
            "labels",
            f"has {len(message.labels)} bytes; it must have {HASH_BYTES} for each of"
            f" {len(block_ids)} host_block_ids",
        )
    return block_ids, split_hashes(message.labels)


def _host_blocks(packed: bytes, limits: Limits) -> Int32Array:
    block_ids = unpack_int32(packed, "host_block_ids")
    check_values("host_block_ids", block_ids, 0, limits.num_host_blocks - 1)
    return block_ids
