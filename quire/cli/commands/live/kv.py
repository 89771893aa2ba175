"""`quire kv`: shows which sequences hold which KV blocks."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from contract.codec.packing import unpack_int32
from quire.cli.enum_words import enum_word
from quire.cli.settings import KvSettings
from quire.cli.target import connection_errors, find_target, open_client
from quire.v1 import kv_pb2
from rpc.settings import parse_settings

_STATE_TO_SIGN: Final[dict[int, str]] = {
    kv_pb2.KV_BLOCK_STATE_FREE: "·",
    kv_pb2.KV_BLOCK_STATE_CACHED: "c",
    kv_pb2.KV_BLOCK_STATE_PINNED: "p",
    kv_pb2.KV_BLOCK_STATE_HELD: "#",
    kv_pb2.KV_BLOCK_STATE_SHARED: "S",
    kv_pb2.KV_BLOCK_STATE_RETIRED: "x",
}
_PACKED: Final = frozenset({"ref_counts", "device_block_ids", "host_block_ids", "disk_block_ids"})
"""Fields with packed int32."""
_NEXT: Final = frozenset({"next_block", "next_seq_id"})
"""Fields in which 0 means none."""
_LEGEND: Final = "· free   c cached   p pinned   # held   S shared   x retired"
_MAX_MAP_LINES: Final = 16
"""Maximum number of lines that show the blocks of one tier; --json has no such limit."""
_NUMBER_WIDTH: Final = 9


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(KvSettings, "quire kv", argv)
    target = find_target(settings)
    with connection_errors(target), open_client(target, settings) as client:
        workers = client.describe_kv(
            worker=settings.worker,
            first_seq_id=settings.first_seq_id,
            max_sequences=settings.max_sequences,
            first_block=settings.first_block,
            ref_counts=settings.json_,
            block_tables=settings.json_,
        )
    if settings.json_:
        print(json.dumps([_to_json(worker) for worker in workers], indent=2))
    else:
        console = Console(highlight=False)
        for worker in workers:
            _show_worker(console, worker, settings.first_block)
    return 0


def describe_tier(tier: kv_pb2.TierKv) -> str:
    """Describe the blocks of a tier by state, in one line."""
    retired = f", {tier.num_retired} retired" if tier.num_retired else ""
    return (
        f"{enum_word(kv_pb2.KvTier.DESCRIPTOR, tier.tier)}: {tier.num_blocks} blocks:"
        f" {tier.num_held} held, {tier.num_shared} shared, "
        f"{tier.num_cached} cached, {tier.num_pinned} pinned, {tier.num_free} free{retired}"
    )


def map_lines(states: bytes, first_block: int, width: int) -> Iterator[str]:
    """Yield a line for every `width` blocks: the first block's number, then a sign per block."""
    for start in range(0, len(states), width):
        signs = "".join(_STATE_TO_SIGN.get(state, "?") for state in states[start : start + width])
        yield f"{first_block + start:>{_NUMBER_WIDTH - 1}} {signs}"


def _show_worker(console: Console, worker: kv_pb2.WorkerKv, first_block: int) -> None:
    console.print(
        f"[bold]{escape(worker.worker)}[/bold]  blocks of {worker.block_size} tokens, "
        f"{worker.block_bytes} bytes;  {_LEGEND}",
        soft_wrap=True,
    )
    width = max(16, (console.width - _NUMBER_WIDTH) // 16 * 16)
    for tier in worker.tiers:
        console.print(describe_tier(tier), soft_wrap=True)
        lines = list(map_lines(tier.states, first_block, width))
        for line in lines[:_MAX_MAP_LINES]:
            console.print(line, markup=False, soft_wrap=True)
        if len(lines) > _MAX_MAP_LINES or tier.next_block:
            following = first_block + min(len(tier.states), _MAX_MAP_LINES * width)
            console.print(f"{'':{_NUMBER_WIDTH}}… --first-block {following} shows the next blocks")
    if worker.sequences:
        console.print(_sequence_table(worker.sequences))
    if worker.next_seq_id:
        console.print(
            f"{worker.num_sequences} sequences in total; --worker {escape(worker.worker)} "
            f"--first-seq-id {worker.next_seq_id} shows the next ones",
            soft_wrap=True,
        )


def _sequence_table(sequences: Sequence[kv_pb2.SequenceKv]) -> Table:
    right = {"justify": "right"}
    table = Table("seq", "request", "output", "status")
    for heading in ("tokens", "prompt", "computed", "cached", "device", "host", "disk", "shared"):
        table.add_column(heading, **right)  # type: ignore[arg-type]
    for seq in sequences:
        table.add_row(
            str(seq.seq_id),
            escape(seq.request_id),
            str(seq.output_index),
            enum_word(kv_pb2.SequenceStatus.DESCRIPTOR, seq.status),
            *map(
                str,
                (
                    seq.num_tokens,
                    seq.num_prompt_tokens,
                    seq.num_computed_tokens,
                    seq.num_cached_tokens,
                    seq.num_device_blocks,
                    seq.num_host_blocks,
                    seq.num_disk_blocks,
                    seq.num_shared_blocks,
                ),
            ),
        )
    return table


def _to_json(message: Message) -> dict[str, Any]:
    return {
        field.name: _field_to_json(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _field_to_json(field: Any, value: Any) -> Any:
    if field.name == "states":
        return [enum_word(kv_pb2.KvBlockState.DESCRIPTOR, state) for state in value]
    if field.name in _PACKED:
        return unpack_int32(value, field.name).tolist()
    if field.message_type is not None:
        return [_to_json(each) for each in value]
    if field.enum_type is not None:
        return enum_word(field.enum_type, value)
    return (value or None) if field.name in _NEXT else value
