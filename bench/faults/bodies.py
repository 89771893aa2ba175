"""Searches for the request bodies, of at most the allowed size, that cost a router the most.

A body is a *place* (an HTTP route's field, or a field of a gRPC method's message) filled with many
of one *unit*. A search draws both, and draws bodies like the worst ones that it has found.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from quire.kserve import open_inference_pb2  # noqa: F401 - its descriptors
from quire.v1 import adapters_pb2, inference_pb2, loading_pb2  # noqa: F401 - their descriptors

_COUNTS: Final = (17, 65, 1_024, 4_095, 5_400, 8_190, 10_900, 16_300, 32_700, 10**9)
"""Numbers of units: just below a limit, or as many as fit."""

# --- HTTP -----------------------------------------------------------------------------------------

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_HELLO = b'"messages":[{"role":"user","content":"x"}],"max_tokens":1'
_SCHEMA = b'"response_format":{"type":"json_schema","json_schema":{"schema":{%b}}}'

_VALUES: Final = {
    "nothing": b"null",
    "digits": b"1",
    "token ids": b"4000",
    "long integers": b"9" * 4000,
    "floats": b"1.2345678901234567e-105",
    "short floats": b"1e9",
    "empty texts": b'""',
    "letters": b'"a"',
    "escapes": b'"' + rb"\u0041" * 40 + b'"',
    "pairs": b'"' + rb"\ud83d\ude00" * 20 + b'"',
    "lists": b"[]",
    "lists of digits": b"[" + b"1," * 400 + b"1]",
    "objects": b"{}",
    "nested lists": b"[" * 90 + b"]" * 90,
    "nested objects": b'{"a":' * 90 + b"1" + b"}" * 90,
    "messages": b'{"role":"user","content":"x"}',
    "messages in parts": b'{"role":"user","content":[{"type":"text","text":"x"}]}',
    "tool messages": b'{"role":"tool","tool_call_id":"a","content":"x"}',
    "calls": b'{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":'
    b'{"name":"f","arguments":"{}"}}]}',
    "parts": b'{"type":"text","text":"x"}',
    "functions": b'{"type":"function","function":{"name":"f","parameters":{"a":[1,2,3]}}}',
    "schemas": b'{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}',
}
_TEXTS: Final = {
    "letters": b"a",
    "words": b"the quick ",
    "code": b"def f(x):\\n  ",
    "spaces": b" ",
    "newlines": rb"\n",
    "escaped letters": rb"\u0041",
    "escaped pairs": rb"\ud83d\ude00",
    "umlauts": "ü".encode(),
    "emoji": "🙂".encode(),
    "brackets": b"[{",
    "regex": b"(a|b)*",
    "rules": rb"a: b c\nb: \"x\"\n",
    "lists as text": b"[],",
    "digits as text": b"1,",
}
_LISTS: Final = {
    "messages": (_CHAT, b'{"max_tokens":1,"messages":[%b]}'),
    "content": (_CHAT, b'{"max_tokens":1,"messages":[{"role":"user","content":[%b]}]}'),
    "stop": (_CHAT, b"{" + _HELLO + b',"stop":[%b]}'),
    "stop_token_ids": (_CHAT, b"{" + _HELLO + b',"stop_token_ids":[%b]}'),
    "tools": (_CHAT, b"{" + _HELLO + b',"tools":[%b]}'),
    "one tool": (
        _CHAT,
        b"{" + _HELLO + b',"tool_choice":"required","tools":[{"type":"function",'
        b'"function":{"name":"f","parameters":{"enum":[%b]}}}]}',
    ),
    "template": (_CHAT, b"{" + _HELLO + b',"chat_template_kwargs":{"x":[%b]}}'),
    "enum": (_CHAT, b"{" + _HELLO + b"," + _SCHEMA % b'"enum":[%b]' + b"}"),
    "anyOf": (_CHAT, b"{" + _HELLO + b"," + _SCHEMA % b'"anyOf":[%b]' + b"}"),
    "guided_choice": (_COMPLETION, b'{"prompt":"x","guided_choice":[%b]}'),
    "prompt": (_COMPLETION, b'{"max_tokens":1,"prompt":[%b]}'),
    "prompts": (_COMPLETION, b'{"max_tokens":1,"prompt":[[1],%b]}'),
    "many prompts": (_COMPLETION, b'{"max_tokens":1,"n":64,"prompt":["a",%b]}'),
    "unknown list": (_COMPLETION, b'{"prompt":"x","unknown":[%b]}'),
    "tokens": ("/detokenize", b'{"tokens":[%b]}'),
    "tokenize": ("/tokenize", b'{"messages":[%b]}'),
}
_OBJECTS: Final = {
    "top": (_CHAT, b"{" + _HELLO + b",%b}"),
    "logit_bias": (_CHAT, b"{" + _HELLO + b',"logit_bias":{%b}}'),
    "metadata": (_CHAT, b"{" + _HELLO + b',"metadata":{%b}}'),
    "template": (_CHAT, b"{" + _HELLO + b',"chat_template_kwargs":{%b}}'),
    "message": (_CHAT, b'{"max_tokens":1,"messages":[{"role":"user","content":"x",%b}]}'),
    "properties": (_CHAT, b"{" + _HELLO + b"," + _SCHEMA % b'"properties":{%b}' + b"}"),
    "adapter": ("/v1/load_lora_adapter", b'{"lora_name":"a","lora_path":"b",%b}'),
}
_STRINGS: Final = {
    "prompt": (_COMPLETION, b'{"max_tokens":1,"prompt":"%b"}'),
    "echo": (_COMPLETION, b'{"max_tokens":1,"echo":true,"prompt":"%b"}'),
    "content": (_CHAT, b'{"max_tokens":1,"messages":[{"role":"user","content":"%b"}]}'),
    "role": (_CHAT, b'{"max_tokens":1,"messages":[{"role":"%b","content":"x"}]}'),
    "arguments": (
        _CHAT,
        (
            b'{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[{"id":"a",'
            b'"type":"function","function":{"name":"f","arguments":"{\\"a\\":[%b1]}"}}]}]}'
        ),
    ),
    "stop": (_CHAT, b"{" + _HELLO + b',"stop":"%b"}'),
    "key": (_CHAT, b"{" + _HELLO + b',"%b":1}'),
    "model": (_CHAT, b"{" + _HELLO + b',"model":"%b"}'),
    "request_id": (_CHAT, b"{" + _HELLO + b',"request_id":"%b"}'),
    "guided_regex": (_COMPLETION, b'{"prompt":"x","guided_regex":"%b"}'),
    "guided_json": (_COMPLETION, b'{"prompt":"x","guided_json":"{\\"enum\\":[%b1]}"}'),
    "guided_grammar": (_COMPLETION, b'{"prompt":"x","guided_grammar":"start: %b"}'),
    "tokenize": ("/tokenize", b'{"prompt":"%b"}'),
    "white space": (_COMPLETION, b'{"prompt":%b"x"}'),
    "raw": (_COMPLETION, b"%b"),
}

# --- gRPC -----------------------------------------------------------------------------------------

_SERVICES: Final = (
    "quire.v1.InferenceService",
    "quire.v1.AdapterService",
    "inference.GRPCInferenceService",
)
_WIRE_VALUES: Final = {
    "empty": b"",
    "a letter": b"a",
    "a field": b"\x0a\x01a",
    "an empty field": b"\x0a\x00",
    "ones": b"\x01" * 64,
    "zero bytes": b"\0" * 64,
    "long": b"a" * 4096,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters that determine a body."""

    kind: str
    """"list", "object", "text" or "grpc"."""
    place: str
    """A field, or for gRPC a method and the numbers of the fields that lead to it."""
    unit: str
    count: int

    def __str__(self) -> str:
        many = "as many as fit" if self.count == _COUNTS[-1] else f"{self.count:,}"
        return f"{self.kind} {self.place}: {many} {self.unit}"


@dataclass(frozen=True, slots=True)
class Body:
    """A request's bytes, and where they go."""

    shape: Shape
    path: str
    """A route, or a gRPC method."""
    data: bytes

    @property
    def is_http(self) -> bool:
        return self.shape.kind != "grpc"


def draw_shape(rng: random.Random) -> Shape:
    """Draw a random shape."""
    match kind := rng.choice(("list", "list", "object", "text", "grpc")):
        case "list":
            place, unit = rng.choice([*_LISTS]), rng.choice([*_VALUES])
        case "object":
            place, unit = rng.choice([*_OBJECTS]), rng.choice([*_VALUES])
        case "text":
            place, unit = rng.choice([*_STRINGS]), rng.choice([*_TEXTS])
        case _:
            place, unit = _draw_grpc_place(rng), rng.choice([*_WIRE_VALUES])
    return Shape(kind, place, unit, rng.choice(_COUNTS))


def draw_like(rng: random.Random, shape: Shape) -> Shape:
    """Return a copy of a shape with one change."""
    while (other := draw_shape(rng)).kind != shape.kind:
        pass
    match rng.randrange(3):
        case 0:
            return replace(shape, place=other.place)
        case 1:
            return replace(shape, unit=other.unit)
        case _:
            return replace(shape, count=other.count)


def make(shape: Shape, max_bytes: int) -> Body:
    """Make the body of a shape, of at most `max_bytes`."""
    if shape.kind == "grpc":
        method, *numbers = shape.place.split()
        data = _message(method, [*map(int, numbers)], shape, max_bytes)
        return Body(shape, method, data)
    match shape.kind:
        case "list":
            path, around = _LISTS[shape.place]
            filled = _joined(_VALUES[shape.unit], shape.count, max_bytes - len(around))
        case "object":
            path, around = _OBJECTS[shape.place]
            filled = _members(_VALUES[shape.unit], shape.count, max_bytes - len(around))
        case _:
            path, around = _STRINGS[shape.place]
            text = _TEXTS[shape.unit]
            filled = text * min(shape.count, (max_bytes - len(around)) // len(text))
    before, _, after = around.partition(b"%b")
    return Body(shape, path, before + filled + after)


def _joined(value: bytes, count: int, room: int) -> bytes:
    return b",".join([value] * max(1, min(count, room // (len(value) + 1))))


def _members(value: bytes, count: int, room: int) -> bytes:
    count = max(1, min(count, room // (len(value) + 10)))  # a name of up to 7 characters
    return b",".join(b'"%d":%b' % (i, value) for i in range(count))


def _draw_grpc_place(rng: random.Random) -> str:
    pool = descriptor_pool.Default()
    method = rng.choice(pool.FindServiceByName(rng.choice(_SERVICES)).methods)
    numbers: list[int] = []
    message: Descriptor | None = method.input_type
    while message is not None and message.fields:
        field = rng.choice(message.fields)
        numbers.append(field.number)
        message = field.message_type
        if field.is_repeated and rng.randrange(2):
            break
    return " ".join([f"/{method.containing_service.full_name}/{method.name}", *map(str, numbers)])


def _message(method: str, numbers: Sequence[int], shape: Shape, max_bytes: int) -> bytes:
    """Fill the innermost field; the other fields are the messages around it."""
    message = descriptor_pool.Default().FindMethodByName(method[1:].replace("/", ".")).input_type
    is_number = False
    for number in numbers:
        field = message.fields_by_number[number]
        is_number = field.cpp_type not in {
            FieldDescriptor.CPPTYPE_MESSAGE,
            FieldDescriptor.CPPTYPE_STRING,
        }
        message = field.message_type
    room = max_bytes - 8 * len(numbers)
    if not numbers:
        return _field(2000, _WIRE_VALUES[shape.unit])
    *outer, last = numbers
    if is_number and shape.unit == "ones":  # packed
        data = _field(last, b"\x01" * min(shape.count * 64, room))
    elif is_number:
        unit = _varint(last << 3) + b"\x01"
        data = unit * min(shape.count, room // len(unit))
    else:
        unit = _field(last, _WIRE_VALUES[shape.unit])
        data = unit * min(shape.count, room // len(unit))
    for number in reversed(outer):
        data = _field(number, data)
    return data


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
