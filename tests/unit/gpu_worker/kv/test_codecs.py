"""Codecs of KV: lossless ones keep each bit, quantized ones stay within their error."""

import threading

import numpy as np
import pytest
import torch

from gpu_worker.kv.codecs.lossless import LosslessCodec
from gpu_worker.kv.codecs.names import Codec, CodecSpec, parse_codec
from gpu_worker.kv.codecs.quantized import QuantizedCodec
from gpu_worker.kv.codecs.records import QuantizedRecords

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEAD_DIM = 16
NUM_ROWS = 24


def kv(dtype, num_blocks=3, seed=0):
    """Random numbers of very different sizes: [num_blocks, NUM_ROWS, HEAD_DIM]."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(num_blocks, NUM_ROWS, HEAD_DIM, generator=generator)
    sizes = torch.rand(num_blocks, NUM_ROWS, 1, generator=generator) * 8 - 4
    return (numbers * sizes.exp()).to(dtype)


def as_bytes(numbers):
    return numbers.view(len(numbers), -1).view(torch.uint8)


@pytest.mark.parametrize("text", ["none", "lz4", "zstd", "gzip:0", "zstd:22", "int8", "fp8"])
def test_a_codec_is_parsed_and_printed_alike(text):
    assert str(parse_codec(text)) == text


def test_a_level_is_parsed():
    assert parse_codec("zstd:3") == CodecSpec(Codec.ZSTD, 3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("brotli", "must be one of none, lz4, zstd, gzip, int8, fp8"),
        ("", "must be one of"),
        ("int8:1", "int8 takes no level"),
        ("none:0", "none takes no level"),
        ("zstd:23", r"the level of zstd must be in \[1, 22\]"),
        ("lz4:0", r"the level of lz4 must be in \[1, 12\]"),
        ("gzip:-1", r"the level of gzip must be in \[0, 3\]"),
        ("zstd:", "the level of zstd must be in"),
    ],
)
def test_an_unknown_codec_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_codec(text)


LOSSLESS = ["lz4", "lz4:9", "zstd", "zstd:3", "gzip", "gzip:3"]


def lossless(text, block, itemsize):
    return LosslessCodec(parse_codec(text), len(block), itemsize)


def record_of(codec, block):
    return np.frombuffer(bytearray().join(codec.encode(block)), np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", LOSSLESS)
def test_lossless_is_bit_identical(text, dtype):
    numbers = kv(dtype)
    numbers[:, 0, :4] = torch.tensor([float("nan"), -0.0, float("-inf"), 0.0])
    numbers[0, 4:] = 0  # so that all have something to compress
    block = as_bytes(numbers).numpy()[0]
    codec = lossless(text, block, dtype.itemsize)
    record = record_of(codec, block)
    assert len(record) < len(block) == codec.record_bytes
    out = np.empty_like(block)
    codec.decode(record, out)
    assert (out == block).all()


def test_exponents_apart_compress_better_than_bytes_as_they_are():
    block = as_bytes(torch.randn(1, 512, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    block = block.numpy()[0]
    apart = len(record_of(lossless("zstd", block, 2), block))
    plain = len(record_of(lossless("zstd", block, 1), block))
    assert apart < 0.75 * len(block)
    assert apart < 0.9 * plain


@pytest.mark.parametrize("text", LOSSLESS)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_noise_is_the_record_itself(text, itemsize):
    block = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    (record,) = lossless(text, block, itemsize).encode(block)
    assert record.obj is block


@pytest.mark.parametrize("text", ["lz4", "zstd", "gzip"])
def test_threads_share_a_lossless_codec(text):
    blocks = as_bytes(kv(torch.bfloat16, num_blocks=8)).numpy()
    codec = lossless(text, blocks[0], 2)
    wrong = []

    def work(block):
        for _ in range(20):
            record = record_of(codec, block)
            out = np.empty_like(block)
            if len(record) < len(block):
                codec.decode(record, out)
                wrong.extend([1] * (not (out == block).all()))

    threads = [threading.Thread(target=work, args=(block,)) for block in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def quantized(text, dtype):
    block_bytes = NUM_ROWS * HEAD_DIM * dtype.itemsize
    return QuantizedCodec(parse_codec(text), block_bytes, HEAD_DIM, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("text", "most"), [("int8", 1 / 120), ("fp8", 1 / 25)])
def test_a_quantized_number_is_as_near_as_promised(text, most, dtype):
    numbers = kv(dtype, num_blocks=50)
    before = numbers.clone()
    codec = quantized(text, dtype)
    encoded = codec.encode(as_bytes(numbers))
    assert encoded.shape == (50, codec.record_bytes)
    assert codec.record_bytes == NUM_ROWS * (HEAD_DIM + 2)
    decoded = codec.decode(encoded).view(dtype).view_as(numbers)
    assert torch.equal(numbers, before), "encoding changes nothing"
    largest = numbers.float().abs().amax(-1, keepdim=True)
    assert ((decoded.float() - numbers.float()).abs() <= most * largest).all()


@pytest.mark.parametrize("text", ["int8", "fp8"])
def test_each_row_has_its_own_scale(text):
    numbers = torch.ones(1, NUM_ROWS, HEAD_DIM)
    numbers[0, 3] *= 1e-6
    numbers[0, 4] *= 1e6
    numbers[0, 5] = 0
    codec = quantized(text, torch.float32)
    decoded = codec.decode(codec.encode(as_bytes(numbers))).view(torch.float32).view_as(numbers)
    assert torch.allclose(decoded, numbers, rtol=1 / 64, atol=0)


@pytest.mark.parametrize("text", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_does_not_become_one(text, bad):
    numbers = torch.ones(1, NUM_ROWS, HEAD_DIM)
    numbers[0, 7, 2] = bad
    codec = quantized(text, torch.float32)
    decoded = codec.decode(codec.encode(as_bytes(numbers))).view(torch.float32).view_as(numbers)
    is_finite = decoded.isfinite()
    assert not is_finite[0, 7, 2]
    assert is_finite[0, :7].all()
    assert is_finite[0, 8:].all()


@pytest.mark.parametrize("text", ["int8", "fp8"])
def test_records_in_parts_hold_the_same_numbers(text):
    numbers = kv(torch.bfloat16)
    blocks = as_bytes(numbers)
    whole = quantized(text, torch.bfloat16)
    part = QuantizedCodec(parse_codec(text), blocks.shape[1] // 4, HEAD_DIM, torch.bfloat16)
    records = QuantizedRecords(part, 4)
    assert records.record_bytes == whole.record_bytes
    record = record_of(records, blocks.numpy()[1])
    assert len(record) == records.record_bytes
    out = np.empty(blocks.shape[1], np.uint8)
    records.decode(record, out)
    expected = whole.decode(whole.encode(blocks[1:2]))[0]
    assert torch.equal(torch.from_numpy(out), expected)
