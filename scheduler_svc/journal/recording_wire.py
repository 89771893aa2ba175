"""Between a core's calls and the frames' payloads; recording.proto tells the format."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any, BinaryIO, Final, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from contract.errors import InvalidArgumentError
from contract.packing import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from contract.sampling import EarlyStopping
from quire.v1 import recording_pb2
from scheduler_svc.core.beams.search import BeamParams
from scheduler_svc.core.cache.eviction import Eviction
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.plan import NewSequence, StepId, StepOutcome, StepPlan
from scheduler_svc.core.request import OutputSoFar, Request, SeqKey, SourceId
from scheduler_svc.journal.core_calls import (
    BeginExport,
    BeginImport,
    Call,
    Cancel,
    CancelSource,
    CoreOrigin,
    Defragment,
    End,
    EndExport,
    EndImport,
    Entry,
    Inherit,
    RecordedPlan,
    RecordedSequence,
    Resize,
    Schedule,
    SetMemoryLevel,
    Shrink,
    Submit,
    Update,
    tokens_crc,
)
from scheduler_svc.journal.frames import CutOff, RecordingError, read_frames
from scheduler_svc.journal.moves_wire import move_from_proto, move_to_proto
from scheduler_svc.wire.holdings import holdings_from_proto, holdings_to_proto
from scheduler_svc.wire.memory_level import memory_level_from_proto, memory_level_to_proto

FORMAT_VERSION: Final = 1
"""Raised with every change that an older reader would misread."""


def _bytes_fields(message: type[Message]) -> tuple[str, ...]:
    fields_ = message.DESCRIPTOR.fields
    return tuple(field.name for field in fields_ if field.type == field.TYPE_BYTES)


_PLAN_ARRAYS: Final = _bytes_fields(recording_pb2.RecordedPlan)
"""Arrays of int32, under the same names in a `StepPlan`."""
_OUTCOME_ARRAYS: Final = _bytes_fields(recording_pb2.RecordedUpdate)
"""Likewise in a `StepOutcome`."""

_M = TypeVar("_M", recording_pb2.RecordingHeader, recording_pb2.RecordingEntry)

# --- writing ------------------------------------------------------------------------------------


def origin_to_payload(origin: CoreOrigin) -> bytes:
    """Make the first payload."""
    return recording_pb2.RecordingHeader(
        format_version=FORMAT_VERSION,
        quire_version=origin.quire_version,
        worker_id=origin.worker_id,
        epoch=origin.epoch,
        started_at_s=origin.started_at_s,
        config_json=json.dumps(asdict(origin.config)),
    ).SerializeToString()


def call_to_payload(call: Call, plan: StepPlan | None, raised: str) -> bytes:
    """Make the payload of a call; `plan` and `raised` as `Entry` has them."""
    entry = recording_pb2.RecordingEntry(raised=raised)
    match call:
        case Schedule(now, max_paced_tokens, max_prompt_tokens):
            entry.schedule.now = now
            if max_paced_tokens is not None:
                entry.schedule.max_paced_tokens = max_paced_tokens
            if max_prompt_tokens is not None:
                entry.schedule.max_prompt_tokens = max_prompt_tokens
            if plan is not None:
                entry.schedule.plan.CopyFrom(_plan_to_proto(plan))
        case Update(outcome, now):
            entry.update.step_id = outcome.step_id
            if now is not None:
                entry.update.now = now
            for name in _OUTCOME_ARRAYS:
                # float32 goes as it is: only the type says what the four bytes are
                setattr(entry.update, name, pack_int32(getattr(outcome, name).view(np.int32)))
        case Submit(request, now):
            entry.submit.CopyFrom(_request_to_proto(request))
            entry.submit.now = now
        case Inherit(holdings, now):
            entry.inherit.now = now
            entry.inherit.holdings.CopyFrom(holdings_to_proto(holdings))
        case Cancel(source, seq_keys):
            entry.cancel.source = source
            entry.cancel.seq_keys = pack_uint64(seq_keys)
        case CancelSource(source):
            entry.cancel_source.source = source
        case Defragment():
            entry.defragment.SetInParent()
        case Shrink(num_blocks):
            entry.shrink.num_blocks = num_blocks
        case Resize(num_blocks):
            entry.resize.num_blocks = num_blocks
        case SetMemoryLevel(level):
            entry.memory_level.level = memory_level_to_proto(level)
        case BeginExport() | EndExport() | BeginImport() | EndImport():
            move_to_proto(call, entry, _request_to_proto)
    return entry.SerializeToString()


def end_to_payload(end: End) -> bytes:
    """Make the last payload."""
    message = recording_pb2.RecordingEntry(end=recording_pb2.RecordingEnd(reason=end.reason))
    return message.SerializeToString()


def _plan_to_proto(plan: StepPlan) -> recording_pb2.RecordedPlan:
    return recording_pb2.RecordedPlan(
        step_id=plan.step_id,
        new_sequences=map(_new_sequence_to_proto, plan.new_sequences),
        num_decodes=plan.num_decodes,
        num_scheduled_tokens=plan.num_scheduled_tokens,
        **{name: pack_int32(getattr(plan, name)) for name in _PLAN_ARRAYS},
    )


def _new_sequence_to_proto(new: NewSequence) -> recording_pb2.RecordedNewSequence:
    return recording_pb2.RecordedNewSequence(
        seq_id=new.seq_id,
        row=new.row,
        num_tokens=len(new.token_ids),
        tokens_crc=tokens_crc(new.token_ids),
        num_computed_tokens=new.num_computed_tokens,
        block_ids=pack_int32(new.block_ids),
    )


def _request_to_proto(request: Request) -> recording_pb2.RecordedSubmit:
    named = recording_pb2.RecordedSubmit.DESCRIPTOR.fields_by_name
    more = {
        field.name: value
        for field in fields(request)
        if field.name not in named and (value := getattr(request, field.name)) != field.default
    }
    if request.beam is not None:
        more["beam"] = asdict(request.beam)
    return recording_pb2.RecordedSubmit(
        source=request.source,
        first_seq_key=request.first_seq_key,
        request_id=request.request_id,
        prompt_token_ids=pack_int32(request.prompt_token_ids),
        n=request.n,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        cache_salt=request.cache_salt,
        traceparent=request.traceparent,
        outputs=[
            recording_pb2.RecordedOutput(
                token_ids=pack_int32(output.token_ids), finished=output.finished
            )
            for output in request.outputs
        ],
        more_json=json.dumps(more) if more else "",
    )


# --- reading ------------------------------------------------------------------------------------


def read_recording(file: BinaryIO) -> tuple[CoreOrigin, Iterator[Entry | End | CutOff]]:
    """Read whose core it was; then, as the iterator goes, its calls.

    Raises:
        RecordingError: It is no recording, damaged, or of a format that this reader does not know.
            The iterator raises it too.
    """
    frames = read_frames(file)
    first = next(frames, None)
    if not isinstance(first, bytes):
        raise RecordingError("it ends before its header does")
    return _origin_from_payload(first), map(_checked_entry, frames)


def _origin_from_payload(payload: bytes) -> CoreOrigin:
    message = _parse(recording_pb2.RecordingHeader, payload)
    if message.format_version != FORMAT_VERSION:
        raise RecordingError(
            f"its format_version is {message.format_version}, written by Quire "
            f"{message.quire_version}; this one reads {FORMAT_VERSION}"
        )
    return CoreOrigin(
        quire_version=message.quire_version,
        worker_id=message.worker_id,
        epoch=message.epoch,
        started_at_s=message.started_at_s,
        config=_construct(lambda: _config_from_json(message.config_json)),
    )


def _config_from_json(text: str) -> SchedulerConfig:
    members = _members(text)
    for name, kind in (("preemption_mode", PreemptionMode), ("eviction", Eviction)):
        if name in members:
            members[name] = kind(members[name])
    return SchedulerConfig(**members)


def _checked_entry(frame: bytes | CutOff) -> Entry | End | CutOff:
    try:
        return _entry_from_frame(frame)
    except InvalidArgumentError as error:
        raise RecordingError(f"a frame holds what is no call: {error}") from None


def _entry_from_frame(frame: bytes | CutOff) -> Entry | End | CutOff:
    if isinstance(frame, CutOff):
        return frame
    message = _parse(recording_pb2.RecordingEntry, frame)
    plan: RecordedPlan | None = None
    call: Call
    match message.WhichOneof("call"):
        case "schedule":
            scheduled = message.schedule
            call = Schedule(
                scheduled.now,
                scheduled.max_paced_tokens if scheduled.HasField("max_paced_tokens") else None,
                scheduled.max_prompt_tokens if scheduled.HasField("max_prompt_tokens") else None,
            )
            if message.schedule.HasField("plan"):
                plan = _plan_from_proto(message.schedule.plan)
        case "update":
            updated = message.update
            now = updated.now if updated.HasField("now") else None
            call = Update(_outcome_from_proto(updated), now)
        case "submit":
            call = Submit(_request_from_proto(message.submit), message.submit.now)
        case "inherit":
            call = Inherit(holdings_from_proto([message.inherit.holdings]), message.inherit.now)
        case "cancel":
            seq_keys = unpack_uint64(message.cancel.seq_keys, "cancel.seq_keys").tolist()
            call = Cancel(SourceId(message.cancel.source), tuple(seq_keys))
        case "cancel_source":
            call = CancelSource(SourceId(message.cancel_source.source))
        case "defragment":
            call = Defragment()
        case "shrink":
            call = Shrink(message.shrink.num_blocks)
        case "resize":
            call = Resize(message.resize.num_blocks)
        case "memory_level":
            call = SetMemoryLevel(memory_level_from_proto(message.memory_level.level))
        case "begin_export" | "end_export" | "begin_import" | "end_import":
            call = move_from_proto(message, _request_from_proto)
        case "end":
            return End(message.end.reason)
        case _:
            raise RecordingError("a frame holds no call that this reader knows")
    return Entry(call, plan, message.raised)


def _plan_from_proto(message: recording_pb2.RecordedPlan) -> RecordedPlan:
    return RecordedPlan(
        step_id=message.step_id,
        new_sequences=tuple(
            RecordedSequence(
                seq_id=new.seq_id,
                row=new.row,
                num_tokens=new.num_tokens,
                tokens_crc=new.tokens_crc,
                num_computed_tokens=new.num_computed_tokens,
                block_ids=_ints(new.block_ids, "plan.new_sequences.block_ids"),
            )
            for new in message.new_sequences
        ),
        num_decodes=message.num_decodes,
        num_scheduled_tokens=message.num_scheduled_tokens,
        **{name: _ints(getattr(message, name), f"plan.{name}") for name in _PLAN_ARRAYS},
    )


def _outcome_from_proto(message: recording_pb2.RecordedUpdate) -> StepOutcome:
    arrays = {
        name: unpack_int32(getattr(message, name), f"update.{name}") for name in _OUTCOME_ARRAYS
    }
    logprobs = arrays.pop("candidate_logprobs").view(np.float32)
    return StepOutcome(step_id=StepId(message.step_id), candidate_logprobs=logprobs, **arrays)


def _request_from_proto(message: recording_pb2.RecordedSubmit) -> Request:
    more = _members(message.more_json) if message.more_json else {}
    if "beam" in more:
        more["beam"] = _construct(lambda: _beam_from_json(more["beam"]))
    return _construct(
        lambda: Request(
            source=SourceId(message.source),
            first_seq_key=SeqKey(message.first_seq_key),
            request_id=message.request_id,
            prompt_token_ids=unpack_int32(message.prompt_token_ids, "submit.prompt_token_ids"),
            n=message.n,
            max_tokens=message.max_tokens,
            sampling=message.sampling,
            cache_salt=message.cache_salt,
            traceparent=message.traceparent,
            outputs=tuple(
                OutputSoFar(
                    unpack_int32(output.token_ids, "submit.outputs.token_ids"), output.finished
                )
                for output in message.outputs
            ),
            **more,
        )
    )


def _beam_from_json(members: dict[str, Any]) -> BeamParams:
    ends, stopping = tuple(members["end_token_ids"]), EarlyStopping(members["early_stopping"])
    return BeamParams(**members | {"end_token_ids": ends, "early_stopping": stopping})


_T = TypeVar("_T")


def _construct(make: Callable[[], _T]) -> _T:
    """Make a value of the core's from fields by name, which another release may have named."""
    try:
        return make()
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"this release's core cannot take it: {error}") from None


def _members(text: str) -> dict[str, Any]:
    """Read a JSON object; the core's values have tuples where JSON has arrays."""

    def frozen(value: object) -> object:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    try:
        members = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"a frame's JSON cannot be read: {error}") from None
    if not isinstance(members, dict):
        raise RecordingError("a frame's JSON is no object")
    return {name: frozen(value) for name, value in members.items()}


def _parse(kind: type[_M], payload: bytes) -> _M:
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise RecordingError(f"a frame holds no {kind.DESCRIPTOR.name}: {error}") from None


def _ints(packed: bytes, field: str) -> tuple[int, ...]:
    return tuple(unpack_int32(packed, field).tolist())
