"""Searches for the request bodies, of at most the allowed size, that cost a router the most.

A body is a *place* that is filled with many copies of one *unit*. A place is a field of an HTTP
route's body or of a gRPC method's message. A search draws places and units at random, and also
draws bodies that resemble the worst ones found so far. A call with a stream of requests also gets
bodies of many small messages.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from quire.kserve import open_inference_pb2
from quire.openengine import openengine_pb2  # noqa: F401 - its descriptors
from quire.v1 import (
    adapters_pb2,  # noqa: F401 - their descriptors
    common_pb2,
    inference_pb2,
    loading_pb2,  # noqa: F401
    requests_pb2,  # noqa: F401
)
from quire.vllm_engine import vllm_engine_pb2  # noqa: F401 - its descriptors

_COUNTS: Final = (17, 65, 1_024, 4_095, 5_400, 8_190, 10_900, 16_300, 32_700, 10**9)
"""Numbers of units: just below a limit, or as many as fit."""

# --- HTTP -----------------------------------------------------------------------------------------

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_MESSAGES, _COUNT = "/v1/messages", "/v1/messages/count_tokens"
_RESPONSES, _EMBEDDINGS, _BATCHES = "/v1/responses", "/v1/embeddings", "/v1/batches"
FILES: Final = "/v1/files"
BOUNDARY: Final = b"boundary"
"""Separates the parts of an upload."""
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
    "references": b'{"$ref":"#/$defs/a"}',
    "items": b'{"role":"user","content":"x"}',
    "items in parts": b'{"role":"user","content":[{"type":"input_text","text":"x"}]}',
    "called items": b'{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}',
    "results": b'{"type":"function_call_output","call_id":"a","output":"x"}',
    "thoughts": b'{"type":"reasoning","summary":[{"type":"summary_text","text":"x"}]}',
    "blocks": b'{"role":"assistant","content":[{"type":"thinking","thinking":"x"},'
    b'{"type":"tool_use","id":"a","name":"f","input":{"a":1}}]}',
    "tool results": b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"a",'
    b'"content":[{"type":"text","text":"x"}]}]}',
    "marked parts": b'{"type":"text","text":"x","cache_control":{"type":"ephemeral"}}',
    "input schemas": b'{"name":"f","input_schema":{"a":[1,2,3]}}',
    "flat functions": b'{"type":"function","name":"f","parameters":{"a":[1,2,3]}}',
    "documents": b'{"text":"x"}',
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
    "messages of Anthropic": (_MESSAGES, b'{"max_tokens":1,"messages":[%b]}'),
    "counted messages": (_COUNT, b'{"messages":[%b]}'),
    "blocks": (_MESSAGES, b'{"max_tokens":1,"messages":[{"role":"user","content":[%b]}]}'),
    "counted blocks": (_COUNT, b'{"messages":[{"role":"assistant","content":[%b]}]}'),
    "system": (_COUNT, b'{"messages":[{"role":"user","content":"x"}],"system":[%b]}'),
    "counted tools": (_COUNT, b'{"messages":[{"role":"user","content":"x"}],"tools":[%b]}'),
    "stop_sequences": (
        _MESSAGES,
        b'{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"stop_sequences":[%b]}',
    ),
    "input": (_RESPONSES, b'{"max_output_tokens":1,"input":[%b]}'),
    "unstored input": (_RESPONSES, b'{"max_output_tokens":1,"store":false,"input":[%b]}'),
    "input content": (
        _RESPONSES,
        b'{"max_output_tokens":1,"input":[{"role":"user","content":[%b]}]}',
    ),
    "tools of a response": (_RESPONSES, b'{"max_output_tokens":1,"input":"x","tools":[%b]}'),
    "include": (_RESPONSES, b'{"max_output_tokens":1,"input":"x","include":[%b]}'),
    "embedded": (_EMBEDDINGS, b'{"input":[%b]}'),
    "documents": ("/rerank", b'{"query":"x","documents":[%b]}'),
    "text_1": ("/score", b'{"text_2":"x","text_1":[%b]}'),
    "text_2": ("/score", b'{"text_1":"x","text_2":[%b]}'),
}
_OBJECTS: Final = {
    "top": (_CHAT, b"{" + _HELLO + b",%b}"),
    "logit_bias": (_CHAT, b"{" + _HELLO + b',"logit_bias":{%b}}'),
    "metadata": (_CHAT, b"{" + _HELLO + b',"metadata":{%b}}'),
    "template": (_CHAT, b"{" + _HELLO + b',"chat_template_kwargs":{%b}}'),
    "message": (_CHAT, b'{"max_tokens":1,"messages":[{"role":"user","content":"x",%b}]}'),
    "properties": (_CHAT, b"{" + _HELLO + b"," + _SCHEMA % b'"properties":{%b}' + b"}"),
    "adapter": ("/v1/load_lora_adapter", b'{"lora_name":"a","lora_path":"b",%b}'),
    "response": (_RESPONSES, b'{"max_output_tokens":1,"input":"x",%b}'),
    "metadata of a response": (_RESPONSES, b'{"max_output_tokens":1,"input":"x","metadata":{%b}}'),
    "message of Anthropic": (
        _MESSAGES,
        b'{"max_tokens":1,"messages":[{"role":"user","content":"x"}],%b}',
    ),
    "tool input": (
        _COUNT,
        (
            b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f",'
            b'"input":{%b}}]}]}'
        ),
    ),
    "input_schema": (
        _COUNT,
        b'{"messages":[{"role":"user","content":"x"}],"tools":[{"name":"f","input_schema":{%b}}]}',
    ),
    "embedding": (_EMBEDDINGS, b'{"input":"x",%b}'),
    "batch": (_BATCHES, b'{"input_file_id":"x","endpoint":"a","completion_window":"24h",%b}'),
    "metadata of a batch": (
        _BATCHES,
        (
            b'{"input_file_id":"x","endpoint":"/v1/completions","completion_window":"24h",'
            b'"metadata":{%b}}'
        ),
    ),
    "$defs": (_CHAT, b"{" + _HELLO + b"," + _SCHEMA % b'"$defs":{%b}' + b"}"),
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
    "shown tokens": ("/tokenize", b'{"return_token_strs":true,"prompt":"%b"}'),
    "counted content": (_COUNT, b'{"messages":[{"role":"user","content":"%b"}]}'),
    "thinking": (
        _COUNT,
        b'{"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"%b"}]}]}',
    ),
    "input": (_RESPONSES, b'{"max_output_tokens":1,"input":"%b"}'),
    "instructions": (_RESPONSES, b'{"max_output_tokens":1,"input":"x","instructions":"%b"}'),
    "encrypted_content": (
        _RESPONSES,
        b'{"input":[{"type":"reasoning","summary":[],"encrypted_content":"%b"}]}',
    ),
    "previous_response_id": (_RESPONSES, b'{"input":"x","previous_response_id":"%b"}'),
    "embedded": (_EMBEDDINGS, b'{"input":"%b"}'),
    "query": ("/rerank", b'{"query":"%b","documents":["x"]}'),
    "text_1": ("/score", b'{"text_2":"x","text_1":"%b"}'),
    "input_file_id": (
        _BATCHES,
        b'{"endpoint":"/v1/completions","completion_window":"24h","input_file_id":"%b"}',
    ),
    "white space": (_COMPLETION, b'{"prompt":%b"x"}'),
    "raw": (_COMPLETION, b"%b"),
}

# --- uploads --------------------------------------------------------------------------------------

_DISPOSITION: Final = b"--boundary\r\nContent-Disposition: form-data; name="
_PURPOSE: Final = _DISPOSITION + b'"purpose"\r\n\r\nbatch\r\n'
_END: Final = b"\r\n--boundary--\r\n"
_UPLOADS: Final = {
    "file": _PURPOSE + _DISPOSITION + b'"file"; filename="a"\r\n\r\n%b' + _END,
    "purpose": _DISPOSITION + b'"purpose"\r\n\r\n%b' + _END,
    "name": _DISPOSITION + b'"%b"\r\n\r\nx' + _END,
    "filename": _PURPOSE + _DISPOSITION + b'"file"; filename="%b"\r\n\r\nx' + _END,
    "headers": _DISPOSITION + b'"file"\r\n%b\r\n\r\nx' + _END,
    "parts": b"%b" + _END,
    "raw": b"%b",
}
_UPLOADED: Final = {
    "letters": b"a",
    "empty lines": b"\n",
    "lines": b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n',
    "ends of lines": b"\r\n",
    "near boundaries": b"\r\n--boundar",
    "boundaries": b"\r\n--boundary\r\n",
    "purposes": _PURPOSE,
    "headers": b"a: b\r\n",
    "percent": b"%41",
    "quotes": b'\\"; ',
}

# --- gRPC -----------------------------------------------------------------------------------------

_SERVICES: Final = (
    "quire.v1.InferenceService",
    "quire.v1.AdapterService",
    "quire.v1.LoadingService",
    "quire.v1.RequestService",
    "inference.GRPCInferenceService",
    "vllm.grpc.engine.VllmEngine",
    "openengine.v1.Inference",
)
_MANY: Final = "/quire.v1.InferenceService/GenerateMany"
_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
_ONE_TOKEN: Final = common_pb2.SamplingParams(max_tokens=1)
_STREAMED: Final = {
    "generate": (
        _MANY,
        inference_pb2.GenerateManyRequest(
            generate=inference_pb2.GenerateRequest(text="x", sampling=_ONE_TOKEN)
        ),
    ),
    "generate from tokens": (
        _MANY,
        inference_pb2.GenerateManyRequest(
            generate=inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=[1]), sampling=_ONE_TOKEN
            )
        ),
    ),
    "generate nothing": (
        _MANY,
        inference_pb2.GenerateManyRequest(generate=inference_pb2.GenerateRequest()),
    ),
    "another model": (
        _MANY,
        inference_pb2.GenerateManyRequest(
            generate=inference_pb2.GenerateRequest(text="x", model="y")
        ),
    ),
    "resume": (
        _MANY,
        inference_pb2.GenerateManyRequest(resume=inference_pb2.ResumeRequest(request_id="x")),
    ),
    "leave": (_MANY, inference_pb2.GenerateManyRequest(leave=inference_pb2.LeaveRequest())),
    "no action": (_MANY, inference_pb2.GenerateManyRequest()),
    "infer": (_INFER, open_inference_pb2.ModelInferRequest(model_name="x")),
    "infer nothing": (_INFER, open_inference_pb2.ModelInferRequest()),
}
"""Messages that a stream repeats; the requests of `GenerateMany` are numbered."""
_ENVELOPE_BYTES: Final = 9
"""gRPC's prefix of a message, and room for a request's number."""
_REPEATED: Final = {"alone": b"", "with an unknown field": b"\x82\x7d\x40" + b"a" * 64}
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
    """"list", "object", "text", "upload", "grpc" or "stream"."""
    place: str
    """A field; for gRPC, a method and the numbers of the fields that lead to the field."""
    unit: str
    count: int

    def __str__(self) -> str:
        many = "as many as fit" if self.count == _COUNTS[-1] else f"{self.count:,}"
        return f"{self.kind} {self.place}: {many} {self.unit}"


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of a request's body, and the path to which they are sent."""

    shape: Shape
    path: str
    """A route, or a gRPC method."""
    data: bytes
    """The HTTP body, the gRPC message, or a stream's messages one after another."""
    ends: Sequence[int] = ()
    """The offsets in `data` at which the messages of a stream end."""

    @property
    def is_http(self) -> bool:
        return self.shape.kind not in {"grpc", "stream"}

    @property
    def messages(self) -> Sequence[bytes]:
        """The messages of a stream."""
        return [self.data[start:end] for start, end in pairwise((0, *self.ends))]


def draw_shape(rng: random.Random) -> Shape:
    """Draw a random shape."""
    match kind := rng.choice(("list", "list", "object", "text", "upload", "grpc", "stream")):
        case "list":
            place, unit = rng.choice([*_LISTS]), rng.choice([*_VALUES])
        case "object":
            place, unit = rng.choice([*_OBJECTS]), rng.choice([*_VALUES])
        case "text":
            place, unit = rng.choice([*_STRINGS]), rng.choice([*_TEXTS])
        case "upload":
            place, unit = rng.choice([*_UPLOADS]), rng.choice([*_UPLOADED])
        case "stream":
            place, unit = rng.choice([*_STREAMED]), rng.choice([*_REPEATED])
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
    if shape.kind == "stream":
        return _stream(shape, max_bytes)
    match shape.kind:
        case "upload":
            path, around = FILES, _UPLOADS[shape.place]
            unit = _UPLOADED[shape.unit]
            filled = unit * min(shape.count, (max_bytes - len(around)) // len(unit))
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


def _stream(shape: Shape, max_bytes: int) -> Body:
    path, message = _STREAMED[shape.place]
    same = message.SerializeToString() + _REPEATED[shape.unit]
    data, ends = bytearray(), []
    room = max_bytes // (len(same) + _ENVELOPE_BYTES)
    for _ in range(min(shape.count, room)):
        if path == _MANY:
            data += b"\x08" + _varint(len(ends) + 1)
        data += same
        ends.append(len(data))
    return Body(shape, path, bytes(data), ends)


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
    """Fill the field that is last in `numbers`; the other fields are the messages around it."""
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
