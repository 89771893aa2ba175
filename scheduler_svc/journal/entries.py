"""The format of recordings: the calls of one scheduler core, in order, with their results.

A file begins with `MAGIC`. Frames follow. A frame has the length and the CRC-32 of its payload,
both as little-endian u32, and then the payload, in MessagePack. The first payload is an `Origin`,
and each later one is a `JournalEntry`.

The core's own classes are encoded directly: an object becomes a map from the names of its fields to
their values, and a numpy array becomes `[dtype, bytes]`. So there is no schema besides the core's
methods and classes. To record a new method of the core, it is enough to mark the method with
`core_input`.
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
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.inputs import input_names
from scheduler_svc.core.scheduler import Scheduler

FORMAT_VERSION: Final = 2
"""The version of this format. Every change that an older reader would misread increments it."""
MAGIC: Final = b"QUIREREC"

CALLS: Final = input_names(Scheduler)
"""The methods of `Scheduler` whose calls are recorded."""

_HEAD: Final = struct.Struct("<II")
_MAX_PIECE_BYTES: Final = 2**20
_FOLLOWS: Final = {"labelled_block_ids", "labels", "pins", "trace_events", "serialize"}
"""Fields of a plan that are not recorded, since they follow from the calls and recorded fields."""

_T = TypeVar("_T")


class RecordingError(Exception):
    """A file cannot be read as a recording. The message says where and why."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Describes the recorded core."""

    format_version: int
    quire_version: str
    worker_id: str
    epoch: int
    started_at_s: float
    """When the recording began, on the wall clock."""
    config: dict[str, Any]
    """The fields of the core's `SchedulerConfig`."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One call of the core, or the end of the recording."""

    call: str
    """The name of the called method; empty: the entry marks the end of the recording."""
    arguments: msgspec.Raw
    """The arguments by name; `decode_arguments` decodes them."""
    at: float
    """When the call was made, on the clock of the core's `now` arguments."""
    plan: dict[str, Any] | None = None
    """The plan that `schedule` returned, as `describe_plan` describes it."""
    raised: str = ""
    """The class name of the exception that the core raised; empty: no exception. In the last entry:
    why the recording ended."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """Marks a file that ends within a frame, because the process was killed while it wrote."""

    num_bytes: int
    """Number of bytes of the incomplete frame."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording that is being read; `entries` reads its calls one by one."""

    origin: Origin
    config: SchedulerConfig
    entries: Iterator[JournalEntry | CutOff] = field(repr=False)


# --- writing ------------------------------------------------------------------------------------


def encode_origin(origin: Origin) -> bytes:
    """Return the beginning of a recording's file."""
    return MAGIC + _frame(_ENCODER.encode(origin))


def encode_entry(
    call: str,
    arguments: dict[str, object],
    at: float,
    plan: Plan | None = None,
    raised: str = "",
) -> bytes:
    """Return the frame of a `JournalEntry` that has the arguments as its fields."""
    raw = msgspec.Raw(_ENCODER.encode({k: _without_defaults(v) for k, v in arguments.items()}))
    kept = None if plan is None else describe_plan(plan)
    return _frame(_ENCODER.encode(JournalEntry(call, raw, at, kept, raised)))


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan as plain values, which people can read and code can compare.

    A new sequence's tokens are replaced by their number and checksum, because the entries of
    earlier calls already contain these tokens.
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
    """Return the fields of a dataclass object that differ from their defaults.

    Return any other value unchanged.
    """
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
    raise NotImplementedError(f"{type(value).__name__} cannot be recorded")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encode_value)

# --- reading ------------------------------------------------------------------------------------


def read_recording(file: BinaryIO) -> Recording:
    """Read the origin of a recording; `Recording.entries` reads the entries one by one.

    Raises:
        RecordingError: The file is not a recording, is damaged, or has another format version. The
            iterator `entries` may also raise it.
    """
    frames = _read_frames(file)
    first = next(frames, None)
    if not isinstance(first, bytes):
        raise RecordingError("the file ends within its header")
    origin = _decode(first, Origin)
    if origin.format_version != FORMAT_VERSION:
        raise RecordingError(
            f"its format_version is {origin.format_version}, written by Quire "
            f"{origin.quire_version}; this one reads {FORMAT_VERSION}"
        )
    unknown = origin.config.keys() - {each.name for each in fields(SchedulerConfig)}
    if unknown:
        raise RecordingError(f"this version's core has no setting {', '.join(sorted(unknown))}")
    return Recording(origin, _convert(origin.config, SchedulerConfig), map(_entry, frames))


def decode_arguments(entry: JournalEntry) -> dict[str, Any]:
    """Return the arguments of a call, by name.

    Raises:
        RecordingError: The arguments do not match the signature of the core's method.
    """
    arguments = _decode(bytes(entry.arguments), _ARGUMENTS[entry.call])
    return {name: getattr(arguments, name) for name in arguments.__struct_fields__}


def _entry(frame: bytes | CutOff) -> JournalEntry | CutOff:
    if isinstance(frame, CutOff):
        return frame
    entry = _decode(frame, JournalEntry)
    if entry.call and entry.call not in CALLS:
        raise RecordingError(f"it has a call {entry.call!r}, which this version does not know")
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
    """Read up to `length` bytes, in pieces, so that a wrong length cannot exhaust the memory."""
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
        raise RecordingError(f"this version's core cannot use its settings: {error}") from None


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
    """Make a struct class into which the arguments of a method are decoded."""
    method = getattr(Scheduler, name)
    hints = get_type_hints(method)
    members: list[Any] = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        hint: Any = hints[parameter.name]
        if get_origin(hint) in (Iterable, Collection):
            hint = tuple.__class_getitem__((*get_args(hint), ...))  # recordings have tuples
        if parameter.default is parameter.empty:
            members.append((parameter.name, hint))
        else:
            members.append((parameter.name, hint, parameter.default))
    return msgspec.defstruct(name, members)


_ARGUMENTS: Final = MappingProxyType({name: _arguments_of(name) for name in CALLS})
