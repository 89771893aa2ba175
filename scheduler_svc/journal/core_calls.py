"""The calls of a scheduler core as values: its inputs, and what is kept of the plans it answers."""

from dataclasses import dataclass, fields
from typing import TypeAlias
from zlib import crc32

import numpy as np

from contract.arrays import Int32Array
from contract.info import MemoryLevel
from contract.state import Holdings
from contract.step import NewSequence, Plan, Result
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.handover.moved_request import ExportId, ImportId, MovedRequest
from scheduler_svc.core.request import Request, SeqKey, SourceId


@dataclass(frozen=True, slots=True)
class CoreOrigin:
    """Whose core it was, and how it was made."""

    quire_version: str
    worker_id: str
    epoch: int
    started_at_s: float
    """Wall clock."""
    config: SchedulerConfig


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """`core.submit(request, now)`."""

    request: Request
    now: float


@dataclass(frozen=True, slots=True, eq=False)
class Inherit:
    """`core.inherit(holdings, now)`."""

    holdings: Holdings
    now: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """`core.cancel(source, seq_keys)`."""

    source: SourceId
    seq_keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelSource:
    """`core.cancel_source(source)`."""

    source: SourceId


@dataclass(frozen=True, slots=True)
class Defragment:
    """`core.defragment()`."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """`core.shrink(num_blocks)`."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Resize:
    """`core.resize(num_blocks)`."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class SetMemoryLevel:
    """`core.set_memory_level(level)`."""

    level: MemoryLevel


@dataclass(frozen=True, slots=True)
class Schedule:
    """`core.schedule(now, max_paced_tokens, max_prompt_tokens)`."""

    now: float
    max_paced_tokens: int | None = None
    max_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """`core.update(outcome)`."""

    outcome: Result
    now: float | None = None
    """When; None: nobody has noted it."""


@dataclass(frozen=True, slots=True)
class BeginExport:
    """`core.begin_export(source, first_seq_key)`."""

    source: SourceId
    first_seq_key: SeqKey


@dataclass(frozen=True, slots=True)
class EndExport:
    """`core.end_export(export_id, leaves=leaves)`."""

    export_id: ExportId
    leaves: bool


@dataclass(frozen=True, slots=True, eq=False)
class BeginImport:
    """`core.begin_import(moved)`."""

    moved: MovedRequest


@dataclass(frozen=True, slots=True)
class EndImport:
    """`core.end_import(import_id, output_indices)`."""

    import_id: ImportId
    output_indices: tuple[int, ...]


Move: TypeAlias = BeginExport | EndExport | BeginImport | EndImport
"""What has to do with another core."""

Call: TypeAlias = (
    Inherit
    | Submit
    | Cancel
    | CancelSource
    | Defragment
    | Shrink
    | Resize
    | SetMemoryLevel
    | Schedule
    | Update
    | Move
)


@dataclass(frozen=True, slots=True)
class RecordedSequence:
    """What is kept of a `NewSequence`: not what its request says already."""

    seq_id: int
    row: int
    num_tokens: int
    tokens_crc: int
    """CRC-32 of its tokens, int32, little-endian."""
    num_computed_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """A `Plan` that can be compared, field by field under the same names."""

    step_id: int
    released_rows: tuple[int, ...]
    new_sequences: tuple[RecordedSequence, ...]
    appended_rows: tuple[int, ...]
    appended_block_ids: tuple[int, ...]
    copy_src_block_ids: tuple[int, ...]
    copy_dst_block_ids: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    chunk_lens: tuple[int, ...]
    num_decodes: int
    num_scheduled_tokens: int
    swap_out_src_block_ids: tuple[int, ...]
    swap_out_dst_block_ids: tuple[int, ...]
    swap_in_src_block_ids: tuple[int, ...]
    swap_in_dst_block_ids: tuple[int, ...]
    renamed_src_block_ids: tuple[int, ...]
    renamed_dst_block_ids: tuple[int, ...]
    disk_store_src_block_ids: tuple[int, ...]
    disk_store_dst_block_ids: tuple[int, ...]
    disk_load_src_block_ids: tuple[int, ...]
    disk_load_dst_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A call that was recorded, and what came of it."""

    call: Call
    plan: RecordedPlan | None
    """Of a `Schedule` that gave one."""
    raised: str
    """The class of the exception that the core raised; empty: none."""


@dataclass(frozen=True, slots=True)
class End:
    """Nothing more was recorded, and why."""

    reason: str


def keep_plan(plan: Plan) -> RecordedPlan:
    """Make what a recording keeps of a plan."""
    arrays = {
        field.name: _tuple(value)
        for field in fields(RecordedPlan)
        if isinstance(value := getattr(plan, field.name), np.ndarray)
    }
    return RecordedPlan(
        step_id=plan.step_id,
        new_sequences=tuple(_keep_sequence(new) for new in plan.new_sequences),
        num_decodes=plan.num_decodes,
        num_scheduled_tokens=plan.num_scheduled_tokens,
        **arrays,
    )


def tokens_crc(token_ids: Int32Array) -> int:
    """Return the checksum of tokens, the same on every machine."""
    return crc32(token_ids.astype("<i4", copy=False).tobytes())


def _keep_sequence(new: NewSequence) -> RecordedSequence:
    return RecordedSequence(
        seq_id=new.seq_id,
        row=new.row,
        num_tokens=len(new.token_ids),
        tokens_crc=tokens_crc(new.token_ids),
        num_computed_tokens=new.num_computed_tokens,
        block_ids=_tuple(new.block_ids),
    )


def _tuple(values: Int32Array) -> tuple[int, ...]:
    return tuple(values.tolist())
