"""Strategies from protobuf descriptors: new messages, known ones changed, torn bytes.

A new field of a message is fuzzed without further changes.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from contract.codec.packing import pack_int32, pack_uint64

_MAX_REPEATS = 4
_EDGES = (0, 1, 2, 3, 63, 64, 65, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, 3.5e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "\0", "x" * 200, "é" * 100, "a\nb", "\ufffe", "🙂", "{}", "[1]", '{"a":{}}', "../x")

_INTS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def _ints(least: int, most: int) -> st.SearchStrategy[int]:
    edges = sorted({e for edge in _EDGES for e in (edge, -edge) if least <= e <= most})
    return st.one_of(
        st.integers(0, 12), st.sampled_from([*edges, least, most]), st.integers(least, most)
    )


def _packed() -> st.SearchStrategy[bytes]:
    """Packed integers as `bytes` fields hold them: whole, out of range, torn; or any bytes."""
    int32s = st.lists(_ints(-(2**31), 2**31 - 1), max_size=6).map(pack_int32)
    uint64s = st.lists(_ints(0, 2**64 - 1), max_size=4).map(pack_uint64)
    torn = st.tuples(int32s, st.binary(min_size=1, max_size=3)).map(b"".join)
    return st.one_of(int32s, int32s, uint64s, torn, st.binary(max_size=32))


_PACKED = _packed()
_DOUBLES = st.sampled_from(_FLOATS) | st.floats()
_SINGLES = st.sampled_from(_FLOATS) | st.floats(width=32)
_TEXT = st.sampled_from(_TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@cache
def _scalars(cpp_type: int, is_bytes: bool) -> st.SearchStrategy[Any]:
    match cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return _DOUBLES
        case FieldDescriptor.CPPTYPE_FLOAT:
            return _SINGLES
        case FieldDescriptor.CPPTYPE_STRING:
            return _PACKED if is_bytes else _TEXT
        case _:
            return _ints(*_INTS[cpp_type])


def _scalar(draw: st.DrawFn, field: FieldDescriptor) -> Any:
    if field.enum_type is not None and draw(st.booleans()):
        return draw(st.sampled_from([value.number for value in field.enum_type.values]))
    return draw(_scalars(field.cpp_type, field.type == FieldDescriptor.TYPE_BYTES))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _set(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    """Set a field; a repeated field or a message keeps its other content."""
    value = getattr(message, field.name)
    if _is_map(field):
        key_field, value_field = field.message_type.fields
        for _ in range(draw(st.integers(0, 3))):
            value[_scalar(draw, key_field)] = _scalar(draw, value_field)
    elif field.is_repeated:
        for _ in range(draw(st.integers(0, _MAX_REPEATS))):
            if field.message_type is not None:
                _fill(draw, value.add())
            else:
                value.append(_scalar(draw, field))
    elif field.message_type is not None:
        value.SetInParent()
        _fill(draw, value)
    else:
        setattr(message, field.name, _scalar(draw, field))


def _fill(draw: st.DrawFn, message: Message) -> None:
    if fields := list(message.DESCRIPTOR.fields):
        for field in draw(st.lists(st.sampled_from(fields), max_size=min(len(fields), 8))):
            _set(draw, message, field)


def _change(draw: st.DrawFn, message: Message) -> None:
    """Change one thing, at any depth."""
    if not (fields := list(message.DESCRIPTOR.fields)):
        return
    field = draw(st.sampled_from(fields))
    value = getattr(message, field.name)
    is_message = field.message_type is not None and not _is_map(field)
    if is_message and field.is_repeated and len(value) and draw(st.booleans()):
        _change(draw, value[draw(st.integers(0, len(value) - 1))])
    elif is_message and not field.is_repeated and draw(st.integers(0, 3)):
        if draw(st.booleans()) or message.HasField(field.name):
            value.SetInParent()
        _change(draw, value)
    elif draw(st.integers(0, 4)) == 0:
        message.ClearField(field.name)
    else:
        _set(draw, message, field)


@st.composite
def messages(draw: st.DrawFn, known: Sequence[Message]) -> Message:
    """One of the `known` messages with changes, or a new one of their type."""
    like = draw(st.sampled_from(known))
    message = type(like)()
    if draw(st.integers(0, 3)) == 0:
        _fill(draw, message)
    else:
        message.CopyFrom(like)
        for _ in range(draw(st.integers(0, 3))):
            _change(draw, message)
    return message


_UNKNOWN_FIELDS = (
    b"\xfa\xff\x03\x00",  # an unknown field, empty
    b"\x0a\xff\xff\xff\xff\x0f",  # announces 4 GiB that do not follow
    b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\x0b" * 200,  # groups within groups
    b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",  # a varint without an end
    b"\x0a\x02\xc3\x28",  # no UTF-8
    b"\x00",
)


@st.composite
def torn(draw: st.DrawFn, known: Sequence[Message]) -> bytes:
    """Bytes of a message: whole, cut, changed, or joined to others."""
    data = draw(messages(known)).SerializeToString()
    place = draw(st.integers(0, len(data)))
    match draw(st.integers(0, 7)):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + draw(st.binary(max_size=4)) + data[place + 1 :]
        case 2:
            return data + draw(messages(known)).SerializeToString()  # protobuf merges them
        case 3:
            return data[:place] + draw(st.sampled_from(_UNKNOWN_FIELDS)) + data[place:]
        case _:
            return data


def wire(*known: Message) -> st.SearchStrategy[bytes]:
    """Serialized messages of the type of `known`; some are torn."""
    assert len({type(message) for message in known}) == 1, "all of one kind"
    return torn(known)
