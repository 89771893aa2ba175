"""Converts a worker's holdings (sequences, labelled blocks, pins) to protobuf and back."""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from contract.codec.message_checks import (
    check_at_most,
    check_distinct,
    check_positive,
    check_values,
    unpack_labels,
)
from contract.codec.packing import pack_int32, unpack_int32
from contract.codec.search import check_search, search_from_note, search_to_note
from contract.codec.step import MAX_PIN_S, token_logprob_from_proto, token_logprob_to_proto
from contract.errors import InvalidArgumentError
from contract.hashing import BlockHash
from contract.info import WorkerInfo
from contract.state import HeldBlocks, HeldRow, Holdings, Pins
from quire.v1 import worker_pb2

_TIERS: Final = ("device", "host", "disk")
_MAX_ROWS_BYTES: Final = 512 * 1024
_MAX_LABELS: Final = 24 * 1024
# These are limits of one message; a worker sends its holdings in several messages.


def holdings_to_proto(holdings: Holdings) -> worker_pb2.ReadHoldingsResponse:
    """Make one message of all holdings."""
    message = worker_pb2.ReadHoldingsResponse(rows=map(_row_to_proto, holdings.rows))
    for tier in _TIERS:
        _set_blocks(getattr(message, tier), getattr(holdings, tier))
    if holdings.pins:
        message.pins.labels = b"".join(label for label, _ in holdings.pins)
        message.pins.left_s.extend(left_s for _, left_s in holdings.pins)
    return message


def holdings_to_parts(holdings: Holdings) -> Iterator[worker_pb2.ReadHoldingsResponse]:
    """Make the messages, of bounded size, in which a worker sends its holdings."""
    part, num_bytes = worker_pb2.ReadHoldingsResponse(), 0
    for row in map(_row_to_proto, holdings.rows):
        num_bytes += row.ByteSize()
        if part.rows and num_bytes > _MAX_ROWS_BYTES:
            yield part
            part, num_bytes = worker_pb2.ReadHoldingsResponse(), row.ByteSize()
        part.rows.append(row)
    if part.rows:
        yield part
    for tier in _TIERS:
        blocks: HeldBlocks = getattr(holdings, tier)
        for first in range(0, len(blocks.block_ids), _MAX_LABELS):
            chosen = slice(first, first + _MAX_LABELS)
            part = worker_pb2.ReadHoldingsResponse()
            _set_blocks(
                getattr(part, tier), HeldBlocks(blocks.block_ids[chosen], blocks.labels[chosen])
            )
            yield part
    for first in range(0, len(holdings.pins), _MAX_LABELS):
        yield holdings_to_proto(Holdings(pins=holdings.pins[first : first + _MAX_LABELS]))


def holdings_from_proto(parts: Iterable[worker_pb2.ReadHoldingsResponse]) -> Holdings:
    """Join the messages in which a worker sent its holdings; `parts` are in the order of arrival.

    Raises:
        InvalidArgumentError: An array is malformed, or parallel arrays differ in length.
    """
    parts = list(parts)
    if None in parts:  # gRPC yields None for bytes that it cannot parse
        raise InvalidArgumentError("holdings", "cannot be parsed")
    return Holdings(
        rows=tuple(_row_from_proto(row) for part in parts for row in part.rows),
        device=_blocks_from_proto([part.device for part in parts], "device"),
        host=_blocks_from_proto([part.host for part in parts], "host"),
        disk=_blocks_from_proto([part.disk for part in parts], "disk"),
        pins=tuple(pin for part in parts for pin in _pins_from_proto(part.pins)),
    )


def check_holdings(holdings: Holdings, info: WorkerInfo) -> None:
    """Check that the worker that `info` describes can have these holdings.

    Raises:
        InvalidArgumentError: A number exceeds the worker's limits, or a block or pin occurs twice.
    """
    limits = info.limits
    check_at_most("rows", len(holdings.rows), limits.max_num_seqs)
    for row in holdings.rows:
        _check_row(row, info)
    for tier, num_blocks in zip(
        _TIERS, (limits.num_blocks, limits.num_host_blocks, limits.num_disk_blocks), strict=True
    ):
        field, block_ids = f"{tier}.block_ids", getattr(holdings, tier).block_ids
        check_values(field, block_ids, 0, num_blocks - 1)
        check_distinct(field, block_ids)
    names: set[BlockHash] = set()
    for name, left_s in holdings.pins:
        check_positive("pins.left_s", left_s, MAX_PIN_S)
        if name in names:
            raise InvalidArgumentError("pins.labels", "has a label twice; each may occur once")
        names.add(name)


def _check_row(row: HeldRow, info: WorkerInfo) -> None:
    limits = info.limits
    num_groups, num_tokens = len(limits.kv_windows), len(row.token_ids)
    num_slots = len(row.block_ids) // num_groups * limits.block_size
    check_values("rows.block_ids", row.block_ids, 0, limits.num_blocks - 1)
    check_distinct(
        "rows.block_ids", row.block_ids[row.block_ids > 0] if limits.has_windows else row.block_ids
    )
    check_at_most("rows.token_ids", num_tokens, limits.max_model_len)
    check_at_most("rows.num_computed_tokens", row.num_computed_tokens, num_slots)
    check_at_most("rows.num_computed_tokens", row.num_computed_tokens, num_tokens - 1)
    check_at_most("rows.logprobs", len(row.logprobs), num_tokens)
    check_values("rows.token_ids", row.token_ids, 0, limits.vocab_size - 1)
    for logprob in row.logprobs:
        check_values("rows.logprobs.top_token_ids", logprob.top_token_ids, 0, limits.vocab_size - 1)
    if row.search is not None:
        check_search(row.search, num_tokens, limits.max_model_len, limits.vocab_size)


def _row_to_proto(row: HeldRow) -> worker_pb2.HeldRow:
    return worker_pb2.HeldRow(
        identity=row.identity,
        token_ids=pack_int32(row.token_ids),
        num_computed_tokens=row.num_computed_tokens,
        block_ids=pack_int32(row.block_ids),
        has_stopped=row.has_stopped,
        had_logprobs=row.had_logprobs,
        note=row.note if row.search is None else search_to_note(row.search),
        logprobs=map(token_logprob_to_proto, row.logprobs),
    )


def _row_from_proto(message: worker_pb2.HeldRow) -> HeldRow:
    return HeldRow(
        identity=message.identity,
        token_ids=unpack_int32(message.token_ids, "rows.token_ids"),
        num_computed_tokens=message.num_computed_tokens,
        block_ids=unpack_int32(message.block_ids, "rows.block_ids"),
        has_stopped=message.has_stopped,
        had_logprobs=message.had_logprobs,
        logprobs=tuple(
            token_logprob_from_proto(each, "rows.logprobs") for each in message.logprobs
        ),
        search=search_from_note(message.note),
    )


def _set_blocks(message: worker_pb2.HeldBlocks, blocks: HeldBlocks) -> None:
    if blocks.block_ids.size:
        message.block_ids = pack_int32(blocks.block_ids)
        message.labels = blocks.labels.tobytes()


def _blocks_from_proto(parts: list[worker_pb2.HeldBlocks], tier: str) -> HeldBlocks:
    block_ids = [unpack_int32(part.block_ids, f"{tier}.block_ids") for part in parts]
    labels = [
        unpack_labels(part.labels, f"{tier}.labels", "block_ids", len(ids))
        for part, ids in zip(parts, block_ids, strict=True)
    ]
    return HeldBlocks(np.concatenate(block_ids), np.concatenate(labels)) if parts else HeldBlocks()


def _pins_from_proto(message: worker_pb2.HeldPins) -> Pins:
    labels = unpack_labels(message.labels, "pins.labels", "left_s", len(message.left_s))
    hashes = (BlockHash(label.tobytes()) for label in labels)
    return tuple(zip(hashes, message.left_s, strict=True))
