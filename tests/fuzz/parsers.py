"""Fuzzes every parser of data from another process: it must return a value or a clear error."""

import contextlib
import io
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from hypothesis import strategies as st
from pydantic import ValidationError

from contract.arrays import ints
from contract.codec.info import worker_info_from_proto
from contract.codec.request import generate_request_from_proto, resume_request_from_proto
from contract.codec.sampling import sampling_to_proto
from contract.codec.state import check_holdings, holdings_from_proto
from contract.codec.step import result_from_proto
from contract.errors import InvalidArgumentError, QuireError
from contract.info import MemoryLevel, ModelInfo
from contract.request import Model as RouterModelInfo
from contract.step import Plan, Result
from contract.worker_limits import Limits
from gpu_worker.service.step_wire import (
    host_blocks_to_pull,
    host_blocks_to_read,
    plan_of,
)
from quire.v1 import inference_pb2, kv_pb2, scheduler_pb2, worker_pb2
from router.access.api_keys import ApiKeysError, read_keys_file
from router.http.errors import error_from_validation, error_response
from router.http.requests.chat import ChatBody
from router.http.requests.completions import CompletionBody
from router.http.strict_json import parse_json
from router.request.validation import check_request, complete_sampling
from router.schedulers.messages import Refusal
from router.schedulers.wire import message_from_proto
from router.text.structured_output import to_grammar
from rpc.status import DETAILS_KEY, error_to_status, status_to_error
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.errors import RequestRefusedError
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.entries import (
    FORMAT_VERSION,
    MAGIC,
    JournalEntry,
    Origin,
    RecordingError,
    decode_arguments,
    encode_entry,
    encode_origin,
    read_recording,
)
from scheduler_svc.wire.reports import kv_query_from_proto
from scheduler_svc.wire.request import request_from_proto
from tests.fuzz import examples
from tests.fuzz.fuzzing import Case, Check, Target
from tests.fuzz.http import bodies
from tests.fuzz.messages import wire

_MAX_BYTES_PER_BYTE = 300
_MAX_BYTES = 4 * 2**20
"""Memory that a parser may take for a case: no peer may make it waste more."""

MODEL = ModelInfo("fake", 64, 1000, (0,), structured_output=True)
ROUTER_MODEL = RouterModelInfo("fake", 64, 1000, (0,), structured_output=True)
LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=32,
    max_num_batched_tokens=16,
    num_blocks=12,
    block_size=4,
    vocab_size=97,
    num_host_blocks=6,
    num_disk_blocks=5,
)


def _checked(parse: Callable[[bytes], object], *errors: type[Exception]) -> Check:
    """Every exception of `parse` is a failure, except `errors` and errors that name their field."""

    def check(case: Case) -> None:
        tracemalloc.start()
        try:
            for data in case:
                _try(parse, data, errors)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        most = _MAX_BYTES + _MAX_BYTES_PER_BYTE * sum(map(len, case))
        assert peak < most, f"{peak} bytes of memory for {sum(map(len, case))}"

    return check


def _try(
    parse: Callable[[bytes], object], data: bytes, errors: tuple[type[Exception], ...]
) -> None:
    try:
        parse(data)
    except errors:
        pass
    except QuireError as error:
        if errors:
            raise
        if isinstance(error, InvalidArgumentError) and not error.field.strip():
            raise AssertionError(f"no field is named: {error}") from error
        error_to_status(error)


def _opened(
    parse: Callable[[bytes], object], *errors: type[Exception]
) -> Callable[[], contextlib.AbstractContextManager[Check]]:
    return lambda: contextlib.nullcontext(_checked(parse, *errors))


def _of_messages(name: str, parse: Callable[[Any], object], *known: Message) -> Target:
    """A target that parses messages; gRPC refuses other bytes before."""
    kind = type(known[0])

    def parse_data(data: bytes) -> object:
        try:
            message = kind.FromString(data)
        except DecodeError:
            return None
        return parse(message)

    return Target(name, st.tuples(wire(*known)), _opened(parse_data), kind)


# --- the router's ------------------------------------------------------------------------------


def _generate(message: inference_pb2.GenerateRequest) -> None:
    request = generate_request_from_proto(message)
    check_request(request, ROUTER_MODEL, 1000)
    if request.sampling.structured is not None:
        to_grammar(request.sampling.structured)
    num_tokens = len(request.prompt)
    sampling_to_proto(complete_sampling(request.sampling, num_tokens, ROUTER_MODEL, 1))


def _news(message: scheduler_pb2.ConnectResponse) -> None:
    news = message_from_proto(message)
    if isinstance(news, Refusal):
        error_to_status(news.error)  # clients see it
        error_response(news.error)


def _status(message: status_pb2.Status) -> None:
    """A peer's error; its details may be anything."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = grpc.aio.Metadata((DETAILS_KEY, message.SerializeToString()))
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=message.message)
    told = status_to_error(error)
    error_to_status(told)
    error_response(told)


def _retry_status(seconds: int) -> status_pb2.Status:
    status = status_pb2.Status(code=8, message="full")
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=seconds)))
    return status


def _bad_request_status() -> status_pb2.Status:
    status = status_pb2.Status(code=3, message="n is 0")
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="n", description="is 0")
    status.details.add().Pack(bad)
    return status


def _body(schema: Any) -> Callable[[bytes], None]:
    def parse(data: bytes) -> None:
        value = parse_json(data)
        try:
            body = schema.model_validate(value)
        except ValidationError as error:
            error_response(error_from_validation(error))
            return
        body.check()
        body.sampling(max_tokens=1, logprobs=None)

    return parse


def _keys_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        path.write_bytes(data)
        read_keys_file(path)


_KEYS_FILE = b"""[[keys]]
tenant = "a"
key = "secret"
operator = true
[[keys]]
tenant = "b"
sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
[tenants.a]
requests_per_minute = 60
"""
_TOML_PARTS = [
    *_KEYS_FILE.splitlines(keepends=True),
    b'key = ""\n', b"sha256 = 1\n", b"[[", b"]]", b"\xff", b"\0", b"[tenants.c]\n", b"= ",
    b"[" * 900, b"key = " + b"[" * 2000, b"9" * 5000, b'"\\uD800"', b"1e999", b"inf", b"nan",
]  # fmt: skip


@st.composite
def _patched(draw: st.DrawFn, whole: bytes, parts: list[bytes]) -> bytes:
    """A file with some parts replaced."""
    data = whole
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 16)))
        data = data[:start] + draw(st.sampled_from(parts) | st.binary(max_size=6)) + data[end:]
    return data


# --- the scheduler's ---------------------------------------------------------------------------

_CORE = SchedulerConfig(
    num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64
)


def _submit(message: scheduler_pb2.Submit) -> None:
    """Parse a request and plan it."""
    request = request_from_proto(message, SourceId(0), MODEL, 1.0)
    core = Scheduler(_CORE)
    with contextlib.suppress(RequestRefusedError):
        core.submit(request, 1.0)
        core.schedule(1.0)


def _recording_payloads() -> list[bytes]:
    core = Scheduler(_CORE)
    request = Request(
        source=SourceId(0),
        first_seq_key=SeqKey(1),
        request_id="a",
        prompt_token_ids=ints([1, 2, 3]),
        n=2,
        max_tokens=4,
        sampling=b"",
        priority=1,
    )
    core.submit(request, 1.0)
    plan = core.schedule(1.0)
    assert isinstance(plan, Plan)
    result = Result(plan.step_id, ints([0]), ints([7]))
    frames = [
        encode_origin(Origin(FORMAT_VERSION, "0", "w", 1, 1.0, asdict(_CORE)))[len(MAGIC) :],
        encode_entry("submit", {"request": request, "now": 1.0}, 1.0),
        encode_entry("schedule", {"now": 1.0}, 1.0, plan),
        encode_entry("update", {"outcome": result}, 2.0),
        encode_entry("cancel", {"source": 0, "seq_keys": (1,)}, 2.0),
        encode_entry("defragment", {}, 2.0),
        encode_entry("shrink", {"num_blocks": 4}, 2.0),
        encode_entry("set_memory_level", {"level": MemoryLevel.WARNING}, 2.0),
        encode_entry("", {}, 0.0, raised="over"),
    ]
    return [frame[_FRAME_HEAD:] for frame in frames]


def _holdings(message: worker_pb2.ReadHoldingsResponse) -> None:
    """Parse a worker's holdings and check them against its info."""
    info = worker_info_from_proto(examples.WORKER_INFOS[0])
    check_holdings(holdings_from_proto([message, message]), info)


_FRAME_HEAD = 8
_PAYLOADS = _recording_payloads()
_PARTS = [b"\x90", b"\xc0", b"\x80", b"\xa3|O8", b"\xdd\xff\xff\xff\xff", b"\x91" * 3000, b""]
"""MessagePack: an array, nil, a map, a dtype of objects, an array with too large a length, ..."""


def _frame(payload: bytes) -> bytes:
    return struct.pack("<II", len(payload), crc32(payload)) + payload


@st.composite
def _recordings(draw: st.DrawFn) -> bytes:
    """Recordings: whole, with bad frames, or patched anywhere."""
    payloads = [_PAYLOADS[0], *draw(st.lists(st.sampled_from(_PAYLOADS[1:]), max_size=4))]
    if draw(st.booleans()):
        place = draw(st.integers(0, len(payloads) - 1))
        payloads[place] = draw(_patched(payloads[place], _PARTS))
    data = MAGIC + b"".join(map(_frame, payloads))
    return draw(_patched(data, [b"\xff\xff\xff\xff"])) if draw(st.booleans()) else data


def _recording(data: bytes) -> None:
    for entry in read_recording(io.BufferedReader(io.BytesIO(data))).entries:
        if isinstance(entry, JournalEntry) and entry.call:
            decode_arguments(entry)


TARGETS = (
    _of_messages("generate-request", _generate, *examples.GENERATE),
    _of_messages(
        "resume-request",
        lambda message: resume_request_from_proto(message, "", None),
        *examples.RESUME,
    ),
    _of_messages("scheduler-news", _news, *examples.CONNECT_RESPONSES),
    _of_messages("status", _status, _retry_status(1), _retry_status(2**62), _bad_request_status()),
    Target("chat-body", st.tuples(bodies("chat")), _opened(_body(ChatBody))),
    Target("completion-body", st.tuples(bodies("completion")), _opened(_body(CompletionBody))),
    Target(
        "keys-file",
        st.tuples(_patched(_KEYS_FILE, _TOML_PARTS)),
        _opened(_keys_file, ApiKeysError),
    ),
    _of_messages("submit", _submit, *examples.SUBMITS),
    _of_messages("kv-query", kv_query_from_proto, kv_pb2.KvQuery(max_sequences=3, ref_counts=True)),
    _of_messages("worker-info", worker_info_from_proto, *examples.WORKER_INFOS),
    _of_messages(
        "step-result", lambda message: result_from_proto(message, 0, 4), *examples.STEP_RESULTS
    ),
    _of_messages("holdings", _holdings, *examples.HOLDINGS),
    Target("recording", st.tuples(_recordings()), _opened(_recording, RecordingError)),
    _of_messages(
        "step-batch",
        lambda message: plan_of(message, LIMITS),
        *examples.STEP_BATCHES,
    ),
    _of_messages(
        "read-kv",
        lambda message: host_blocks_to_read(message, LIMITS),
        worker_pb2.ReadKvRequest(epoch=1),
    ),
    _of_messages(
        "pull-kv",
        lambda message: host_blocks_to_pull(message, LIMITS),
        worker_pb2.PullKvRequest(epoch=1),
    ),
)
