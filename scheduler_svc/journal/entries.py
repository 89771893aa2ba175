"""What a journal holds: the calls of one scheduler core, in order, and what each answered.

A file begins with `MAGIC`; then come frames: length and CRC-32 of the payload, u32 and
little-endian, then the payload. The first payload is an `Origin`, each other one an `Entry`, in
MessagePack, with the core's own classes as they are: an object is a map by field, an array of numpy
is `[dtype, bytes]`. So there is no schema besides the core's own methods and classes, and a new
input of the core is recorded once its name stands in `CALLS`.
"""

import inspect
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, BinaryIO, Final, TypeVar, get_args, get_origin, get_type_hints
from zlib import crc32

import msgspec
import numpy as np

from contract.step import Plan
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler

FORMAT_VERSION: Final = 2
"""Raised with every change that an older reader would misread."""
MAGIC: Final = b"QUIREREC"

CALLS: Final = (
    "inherit",
    "submit",
    "cancel",
    "cancel_source",
    "schedule",
    "update",
    "set_memory_level",
    "defragment",
    "shrink",
    "resize",
    "begin_export",
    "end_export",
    "begin_import",
    "end_import",
)
"""The methods of `Scheduler` that change it, and so are recorded."""

_HEAD: Final = struct.Struct("<II")
_MAX_PIECE_BYTES: Final = 2**20
_FOLLOWS: Final = {"labelled_block_ids", "labels", "pins", "turns", "serialize"}
"""Fields of a plan that are not recorded, since they follow from the calls and the others."""

_T = TypeVar("_T")


class RecordingError(Exception):
    """A file that is not a recording, or cannot be read as one. The message says where and why."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The core that was recorded."""

    format_version: int
    quire_version: str
    worker_id: str
    epoch: int
    started_at_s: float
    """Wall clock."""
    config: dict[str, Any]
    """A `SchedulerConfig`, field by field."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call, or the end of the recording."""

    call: str
    """The method's name; empty: nothing more was recorded, and `raised` says why."""
    arguments: msgspec.Raw
    """By name; `decode_arguments` reads them."""
    at: float
    """When it was made, in the seconds of the core's `now`."""
    plan: dict[str, Any] | None = None
    """The plan that `schedule` returned, as `describe_plan` gives it."""
    raised: str = ""
    """The class of the exception that the core raised; empty: none."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """The file ends within a frame: its process was killed while it wrote."""

    num_bytes: int
    """How much of the frame was written."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A journal that is being read."""

    origin: Origin
    config: SchedulerConfig
    entries: Iterator[Entry | CutOff] = field(repr=False)


# --- writing ------------------------------------------------------------------------------------


def encode_origin(origin: Origin) -> bytes:
    """Return the beginning of a file."""
    return MAGIC + _frame(_ENCODER.encode(origin))


def encode_entry(
    call: str,
    arguments: dict[str, object],
    at: float,
    plan: Plan | None = None,
    raised: str = "",
) -> bytes:
    """Return the frame of one call, or of the end; fields as in `Entry`."""
    raw = msgspec.Raw(_ENCODER.encode({k: _without_defaults(v) for k, v in arguments.items()}))
    kept = None if plan is None else describe_plan(plan)
    return _frame(_ENCODER.encode(Entry(call, raw, at, kept, raised)))


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the plan's fields as plain values that can be compared, and read by a person.

    Of a new sequence, tokens are given by number and checksum: its request has them already.
    """
    described: dict[str, Any] = {"num_scheduled_tokens": plan.num_scheduled_tokens}
    for each in fields(plan):
        value = getattr(plan, each.name)
        if each.name == "new_sequences":
            described[each.name] = [
                {
                    "seq_id": new.seq_id,
                    "row": new.row,
                    "num_tokens": len(new.token_ids),
                    "tokens_crc": crc32(new.token_ids.astype("<i4", copy=False).tobytes()),
                    "num_computed_tokens": new.num_computed_tokens,
                    "block_ids": new.block_ids.tolist(),
                }
                for new in value
            ]
        elif each.name not in _FOLLOWS and not (isinstance(value, np.ndarray) and not value.size):
            described[each.name] = value.tolist() if isinstance(value, np.ndarray) else value
    return described


def _without_defaults(value: object) -> object:
    """Return a map of a dataclass's fields that differ from their defaults; most are empty."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return {
        each.name: member
        for each in fields(value)
        if not _is_default(member := getattr(value, each.name), each)
    }


def _is_default(member: object, of: Field[Any]) -> bool:
    if isinstance(member, np.ndarray):
        return of.default_factory is not MISSING and not member.size
    return of.default is not MISSING and member == of.default


def _frame(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), crc32(payload)) + payload


def _encode_value(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} has no place in a recording")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encode_value)

# --- reading ------------------------------------------------------------------------------------


def read_recording(file: BinaryIO) -> Recording:
    """Read the origin; the entries are read as the iterator goes.

    Raises:
        RecordingError: It is not a recording, it is damaged, or it has another format. The iterator
            raises it, too.
    """
    frames = _read_frames(file)
    first = next(frames, None)
    if not isinstance(first, bytes):
        raise RecordingError("it ends before its header does")
    origin = _decode(first, Origin)
    if origin.format_version != FORMAT_VERSION:
        raise RecordingError(
            f"its format_version is {origin.format_version}, written by Quire "
            f"{origin.quire_version}; this one reads {FORMAT_VERSION}"
        )
    unknown = origin.config.keys() - {each.name for each in fields(SchedulerConfig)}
    if unknown:
        raise RecordingError(f"this release's core has no setting {', '.join(sorted(unknown))}")
    return Recording(origin, _convert(origin.config, SchedulerConfig), map(_entry, frames))


def decode_arguments(entry: Entry) -> dict[str, Any]:
    """Return the arguments of a call, by name.

    Raises:
        RecordingError: They are not what the core's method takes.
    """
    arguments = _decode(bytes(entry.arguments), _ARGUMENTS[entry.call])
    return {name: getattr(arguments, name) for name in arguments.__struct_fields__}


def _entry(frame: bytes | CutOff) -> Entry | CutOff:
    if isinstance(frame, CutOff):
        return frame
    entry = _decode(frame, Entry)
    if entry.call and entry.call not in CALLS:
        raise RecordingError(f"it has a call {entry.call!r}, which this release does not know")
    return entry


def _read_frames(file: BinaryIO) -> Iterator[bytes | CutOff]:
    if file.read(len(MAGIC)) != MAGIC:
        raise RecordingError(f"it is not a recording: it does not begin with {MAGIC.decode()}")
    number, offset = 0, len(MAGIC)
    while head := file.read(_HEAD.size):
        if len(head) < _HEAD.size:
            yield CutOff(len(head))
            return
        length, expected = _HEAD.unpack(head)
        payload = _read(file, length)
        if len(payload) < length:
            yield CutOff(len(head) + len(payload))
            return
        if crc32(payload) != expected:
            raise RecordingError(
                f"frame {number}, at byte {offset}, is damaged: its checksum is "
                f"{crc32(payload):08x} and should be {expected:08x}"
            )
        yield payload
        number, offset = number + 1, offset + len(head) + length


def _read(file: BinaryIO, length: int) -> bytes:
    """Read up to `length` bytes. Memory grows with the file, not with what it announces."""
    pieces: list[bytes] = []
    while length and (piece := file.read(min(length, _MAX_PIECE_BYTES))):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def _decode(payload: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(payload, type=kind, dec_hook=_decode_value)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise RecordingError(f"a frame cannot be read: {error}") from None


def _convert(value: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RecordingError(f"this release's core cannot take its settings: {error}") from None


def _decode_value(kind: type, value: Any) -> object:
    of = get_origin(kind) or kind
    if of is np.ndarray:
        dtype, content = value
        if np.dtype(dtype).hasobject:
            raise ValueError("an array of objects is refused")
        return np.frombuffer(content, np.dtype(dtype))
    if issubclass(of, np.generic):
        return of(value)
    raise NotImplementedError(kind)


def _arguments_of(name: str) -> type[msgspec.Struct]:
    """Make the class that a method's arguments are read into."""
    method = getattr(Scheduler, name)
    hints = get_type_hints(method)
    members: list[Any] = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        hint: Any = hints[parameter.name]
        if get_origin(hint) in (Iterable, Collection):
            hint = tuple.__class_getitem__((*get_args(hint), ...))  # a recording has a tuple
        if parameter.default is parameter.empty:
            members.append((parameter.name, hint))
        else:
            members.append((parameter.name, hint, parameter.default))
    return msgspec.defstruct(name, members)


_ARGUMENTS: Final = MappingProxyType({name: _arguments_of(name) for name in CALLS})
