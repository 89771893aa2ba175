"""gRPC requests are bounded as bytes: their size, their fields, the tenant's quota."""

import grpc
import grpc.aio
import pytest
from keyed_router import ALICE, bearer, failure, keyed_settings, running

from contract.errors import InvalidArgumentError
from quire.kserve import open_inference_pb2 as kserve_pb2
from quire.v1 import common_pb2, inference_pb2
from router.grpc.bounds import MAX_FIELDS, MAX_SMALL_BYTES, check_num_fields

pytestmark = pytest.mark.timeout(120)

MIB = 2**20
INFERENCE = "/quire.v1.InferenceService/"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture
async def router(model_dir, tmp_path):
    settings = keyed_settings(model_dir, tmp_path).model_copy(update={"accept_compressed": True})
    async with running(settings, tmp_path) as router:
        yield router


def field(number, data):
    """A field that holds bytes, as on the wire."""
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def varint(value):
    data = b""
    while value > 0x7F:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])


def refusal(router, path, data, **kwargs):
    make = router.channel.unary_stream if path.endswith("/Generate") else router.channel.unary_unary
    return failure(make(path)(data, metadata=bearer(ALICE), **kwargs))


EMPTY = field(1, b"") * (500_000)


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("Tokenize", field(3, EMPTY)),
        ("Generate", field(6, b"") * 500_000),
        ("Generate", field(4, b"\x08\x01" * 500_000)),  # token ids that are not packed
        ("GenerateOnce", field(1, field(6, b"") * 500_000)),
        ("GenerateOnce", b"\x0b" * 200_000),  # groups
        ("Generate", b"\xf8\x7f\x00" * 300_000),  # an unknown field
        ("Generate", field(5, field(9, field(1, b"")) * 200_000)),  # a map's entries
        ("Detokenize", b"\x10\x01" * 500_000),
    ],
)
async def test_messages_of_too_many_fields_are_refused_before_they_are_parsed(router, path, data):
    error = await refusal(router, INFERENCE + path, data)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"has more than {MAX_FIELDS} fields" in error.details()


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
@pytest.mark.parametrize(
    ("path", "most", "setting"),
    [
        (INFERENCE + "Generate", MIB, " (--max-body-mb)"),
        (INFERENCE + "Tokenize", MIB, " (--max-body-mb)"),
        (INFER, MIB, " (--max-body-mb)"),
        (INFERENCE + "Resume", MAX_SMALL_BYTES, ""),
        (INFERENCE + "Cancel", MAX_SMALL_BYTES, ""),
        ("/quire.v1.AdapterService/LoadAdapter", MAX_SMALL_BYTES, ""),
        ("/grpc.health.v1.Health/Check", MAX_SMALL_BYTES, ""),
    ],
)
async def test_each_method_has_its_limit(router, path, most, setting, compression):
    data = field(15, b"x" * most)
    error = await refusal(router, path, data, compression=compression)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        f"request has {len(data)} bytes; it must have at most {most}{setting}"
    )


@pytest.mark.parametrize("num_bytes", [4 * MIB + 1, 60 * MIB])
async def test_what_is_far_too_large_after_decompression_never_arrives(router, num_bytes):
    data = bytes(num_bytes)
    error = await refusal(router, INFERENCE + "Resume", data, compression=grpc.Compression.Gzip)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()


async def test_a_stream_of_requests_is_bounded_too(router):
    call = router.channel.stream_stream(STREAM_INFER)(
        iter([field(5, b"") * 500_000]), metadata=bearer(ALICE)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"has more than {MAX_FIELDS} fields" in caught.value.details()


@pytest.mark.parametrize(
    "tensor",
    [
        {"datatype": "BYTES", "shape": [1] * 9},
        {"datatype": "INT32", "shape": [2000], "contents": {"int_contents": [1] * 2000}},
    ],
)
async def test_tensors_are_bounded(router, tensor):
    request = kserve_pb2.ModelInferRequest(model_name="tiny", inputs=[{"name": "x", **tensor}])
    error = await refusal(router, INFER, request.SerializeToString())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "entries; it must have at most" in error.details()


@pytest.mark.parametrize(
    ("datatype", "raw"), [("BOOL", bytes(2000)), ("BYTES", bytes(8000)), ("FP16", bytes(4000))]
)
async def test_raw_tensors_are_bounded(router, datatype, raw):
    request = kserve_pb2.ModelInferRequest(
        model_name="tiny",
        inputs=[{"name": "x", "datatype": datatype, "shape": [2000]}],
        raw_input_contents=[raw],
    )
    error = await refusal(router, INFER, request.SerializeToString())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "entries; it must have at most 1024" in error.details()


# --- the count ------------------------------------------------------------------------------------

GENERATE = inference_pb2.GenerateRequest.DESCRIPTOR


def test_a_message_of_as_many_fields_as_may_be_is_taken():
    check_num_fields(field(6, b"") * 10, GENERATE, most=10)
    with pytest.raises(InvalidArgumentError, match="more than 10 fields"):
        check_num_fields(field(6, b"") * 11, GENERATE, most=10)


def test_what_a_packed_list_or_a_text_holds_is_not_counted():
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=range(100_000)),
        sampling=common_pb2.SamplingParams(temperature=1, seed=2**64 - 1),
        cache_pin_s=1.0,
        stop=["\x0a\x00" * 50_000],
    )
    check_num_fields(request.SerializeToString(), GENERATE, most=8)


@pytest.mark.parametrize("end", [b"\x80" * 100_000, b"\x32\xff", b"\x09", b""])
def test_entries_before_a_damaged_end_are_counted(end):
    with pytest.raises(InvalidArgumentError, match="fields"):
        check_num_fields(field(5, field(9, b"") * 1000) + end, GENERATE, most=100)
