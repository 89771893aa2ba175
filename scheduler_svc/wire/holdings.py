"""Between what a worker says it holds and the core's `Holdings`."""

from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np

from contract.codec.checks import check_at_most, check_range, check_top_tokens
from contract.codec.search import check_search, search_from_note, search_to_note
from contract.errors import InvalidArgumentError
from contract.hashing import HASH_BYTES, BlockHash
from contract.packing import pack_int32, unpack_int32
from quire.v1 import common_pb2, worker_pb2
from scheduler_svc.core.blocks import BlockIdT, DeviceBlockId, DiskBlockId, HostBlockId
from scheduler_svc.core.handover.holdings import HeldBlocks, HeldRow, Holdings
from scheduler_svc.domain import WorkerInfo

_MAX_PIN_S = 10**6
"""Ample: a request may ask for a day."""


def holdings_from_proto(parts: Iterable[worker_pb2.ReadHoldingsResponse]) -> Holdings:
    """Put the parts together, in the order in which they came.

    Raises:
        InvalidArgumentError: An array is not whole, or not parallel to the one beside it.
    """
    parts = list(parts)
    if None in parts:  # so gRPC says that the bytes are no message
        raise InvalidArgumentError("holdings", "cannot be parsed")
    return Holdings(
        rows=tuple(_row_from_proto(row) for part in parts for row in part.rows),
        device=_blocks_from_proto([part.device for part in parts], "device", DeviceBlockId),
        host=_blocks_from_proto([part.host for part in parts], "host", HostBlockId),
        disk=_blocks_from_proto([part.disk for part in parts], "disk", DiskBlockId),
        pins=tuple(pin for part in parts for pin in _pins_from_proto(part.pins)),
    )


def check_holdings(holdings: Holdings, info: WorkerInfo) -> None:
    """Check that a worker can hold what it says.

    Raises:
        InvalidArgumentError: It says that it holds what it has no room for, or one thing twice.
    """
    check_at_most("rows", len(holdings.rows), info.max_num_seqs)
    for row in holdings.rows:
        _check_blocks("rows.block_ids", row.block_ids, info.num_blocks)
        num_slots = len(row.block_ids) * info.block_size
        num_tokens = len(row.token_ids)
        check_at_most("rows.token_ids", num_tokens, info.model.max_model_len)
        check_at_most("rows.num_computed_tokens", row.num_computed_tokens, num_slots)
        check_at_most("rows.num_computed_tokens", row.num_computed_tokens, num_tokens - 1)
        check_at_most("rows.logprobs", len(row.logprobs), num_tokens)
        check_range("rows.token_ids", row.token_ids, 0, info.model.vocab_size - 1)
        for logprob in row.logprobs:
            message = common_pb2.TokenLogprob.FromString(logprob)
            check_top_tokens(message, "rows.logprobs", info.model.vocab_size)
        if row.search is not None:
            check_search(row.search, num_tokens, info.model.max_model_len, info.model.vocab_size)
    _check_blocks("device.block_ids", holdings.device.block_ids, info.num_blocks)
    _check_blocks("host.block_ids", holdings.host.block_ids, info.num_host_blocks)
    _check_blocks("disk.block_ids", holdings.disk.block_ids, info.num_disk_blocks)
    _check_pins(holdings.pins)


def holdings_to_proto(holdings: Holdings) -> worker_pb2.ReadHoldingsResponse:
    """Make one part of it all, for a recording."""
    return worker_pb2.ReadHoldingsResponse(
        rows=[
            worker_pb2.HeldRow(
                identity=row.identity,
                token_ids=pack_int32(row.token_ids),
                num_computed_tokens=row.num_computed_tokens,
                block_ids=pack_int32(row.block_ids),
                has_stopped=row.has_stopped,
                had_logprobs=row.had_logprobs,
                note=b"" if row.search is None else search_to_note(row.search),
                logprobs=map(common_pb2.TokenLogprob.FromString, row.logprobs),
            )
            for row in holdings.rows
        ],
        device=_blocks_to_proto(holdings.device),
        host=_blocks_to_proto(holdings.host),
        disk=_blocks_to_proto(holdings.disk),
        pins=worker_pb2.HeldPins(
            labels=b"".join(name for name, _ in holdings.pins),
            left_s=[left_s for _, left_s in holdings.pins],
        ),
    )


def _row_from_proto(message: worker_pb2.HeldRow) -> HeldRow:
    block_ids = unpack_int32(message.block_ids, "rows.block_ids")
    return HeldRow(
        identity=message.identity,
        token_ids=unpack_int32(message.token_ids, "rows.token_ids"),
        num_computed_tokens=message.num_computed_tokens,
        block_ids=tuple(map(DeviceBlockId, block_ids.tolist())),
        has_stopped=message.has_stopped,
        had_logprobs=message.had_logprobs,
        logprobs=tuple(logprob.SerializeToString() for logprob in message.logprobs),
        search=search_from_note(message.note),
    )


def _blocks_from_proto(
    parts: list[worker_pb2.HeldBlocks], tier: str, block_id: Callable[[int], BlockIdT]
) -> HeldBlocks[BlockIdT]:
    blocks = [unpack_int32(part.block_ids, f"{tier}.block_ids").tolist() for part in parts]
    hashes = [
        block_hash
        for part, ids in zip(parts, blocks, strict=True)
        for block_hash in _hashes_from_proto(part.labels, f"{tier}.labels", "block_ids", len(ids))
    ]
    return HeldBlocks([block_id(block) for block in chain.from_iterable(blocks)], hashes)


def _pins_from_proto(message: worker_pb2.HeldPins) -> Iterable[tuple[BlockHash, float]]:
    hashes = _hashes_from_proto(message.labels, "pins.labels", "left_s", len(message.left_s))
    return zip(hashes, message.left_s, strict=True)


def _hashes_from_proto(labels: bytes, field: str, other: str, count: int) -> list[BlockHash]:
    """Split labels, of which there must be `count`, one for each of `other`."""
    if len(labels) != HASH_BYTES * count:
        raise InvalidArgumentError(
            field,
            f"has {len(labels)} bytes; it must have {HASH_BYTES} for each of {other}, {count}",
        )
    return [
        BlockHash(labels[start : start + HASH_BYTES]) for start in range(0, len(labels), HASH_BYTES)
    ]


def _blocks_to_proto(blocks: HeldBlocks[BlockIdT]) -> worker_pb2.HeldBlocks:
    return worker_pb2.HeldBlocks(
        block_ids=pack_int32(blocks.block_ids), labels=b"".join(blocks.hashes)
    )


def _check_blocks(field: str, block_ids: Iterable[int], num_blocks: int) -> None:
    blocks = np.array(list(block_ids), np.int64)
    if len(np.unique(blocks)) != len(blocks):
        raise InvalidArgumentError(field, "has a block twice; each may occur once")
    wrong = blocks[(blocks < 0) | (blocks >= num_blocks)]
    if wrong.size:
        raise InvalidArgumentError(
            field, f"has {wrong[0]}; values must be in [0, {num_blocks - 1}]"
        )


def _check_pins(pins: Iterable[tuple[BlockHash, float]]) -> None:
    names: set[BlockHash] = set()
    for name, left_s in pins:
        if not 0 < left_s <= _MAX_PIN_S:  # false for NaN
            raise InvalidArgumentError(
                "pins.left_s", f"has {left_s}; values must be in (0, {_MAX_PIN_S}]"
            )
        if name in names:
            raise InvalidArgumentError("pins.labels", "has a label twice; each may occur once")
        names.add(name)
