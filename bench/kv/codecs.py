"""Measures the codecs of the lower tiers on real KV: ratio, speed and loss."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from kv.real_model import BLOCK_SIZE, Engine, load_engine, texts

from gpu_worker.kv.codecs.lossless import LosslessCodec
from gpu_worker.kv.codecs.names import parse_codec
from gpu_worker.kv.codecs.quantized import QuantizedCodec
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.loading.measure_rates import least_s

LOSSLESS = ("lz4", "zstd", "zstd:3", "gzip")
QUANTIZED = ("int8", "fp8")
_LENGTH = 960
_NUM_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class CodecCost:
    """One codec on one kind of KV."""

    ratio: float
    """Bytes before ÷ bytes after."""
    encode_gb_s: float
    decode_gb_s: float
    max_error: float = 0.0
    """Largest change of a number, relative to the largest in its row."""
    perplexity: float | None = None
    """Perplexity of the second half of texts; the KV of the first half went through the codec."""


@dataclass(frozen=True, slots=True)
class CodecTable:
    """The costs by codec; lossless codecs use one thread, and "plain" ones do not split bytes."""

    costs: dict[str, CodecCost]
    perplexity: float
    """Perplexity with unchanged KV."""


def measure_codecs(model: Path, dtype: torch.dtype, num_texts: int) -> CodecTable:
    """Compute KV with the model, then encode and decode it with each codec."""
    blocks_per_text = _LENGTH // BLOCK_SIZE
    engine = load_engine(model, num_texts * blocks_per_text, dtype, "cpu")
    samples = list(texts(model, _LENGTH, num_texts))
    for index, token_ids in enumerate(samples):
        engine.run(token_ids, index * blocks_per_text, 0, _LENGTH)
    kv = engine.pool.blocks_as_bytes.clone()  # [B, Y]
    costs = {}
    for name in LOSSLESS:
        codec = LosslessCodec(parse_codec(name), kv.shape[1], dtype.itemsize)
        costs[name] = _lossless(codec, kv.numpy())
        plain = LosslessCodec(parse_codec(name), kv.shape[1], 1)
        costs[f"{name}, plain"] = _lossless(plain, kv.numpy())
    for name in QUANTIZED:
        quantized = QuantizedCodec(parse_codec(name), kv.shape[1], engine.config.head_dim, dtype)
        costs[name] = _quantized(engine, samples, quantized, kv)
    return CodecTable(costs, _perplexity(engine, samples, None))


def _lossless(codec: LosslessCodec, blocks: np.ndarray) -> CodecCost:
    records, out = [], np.empty_like(blocks)

    def encode() -> None:
        records[:] = [b"".join(codec.encode(block)) for block in blocks]

    def decode() -> None:
        for record, block in zip(packed, out, strict=True):
            if len(record) < len(block):
                codec.decode(record, block)
            else:
                block[:] = record

    encode_s = least_s(encode, _NUM_ROUNDS)
    packed = [np.frombuffer(record, np.uint8) for record in records]
    decode_s = least_s(decode, _NUM_ROUNDS)
    assert (out == blocks).all()
    num_coded = sum(map(len, records))
    return CodecCost(
        blocks.size / num_coded, blocks.size / encode_s / 1e9, blocks.size / decode_s / 1e9
    )


def _quantized(
    engine: Engine, samples: list[np.ndarray], codec: QuantizedCodec, kv: torch.Tensor
) -> CodecCost:
    encoded = codec.encode(kv)
    decoded = codec.decode(encoded)
    encode_s = least_s(lambda: codec.encode(kv), _NUM_ROUNDS)
    decode_s = least_s(lambda: codec.decode(encoded), _NUM_ROUNDS)
    shape = (-1, engine.config.head_dim)
    before, after = (
        b.view(engine.pool.layout.dtypes[0]).view(shape).float() for b in (kv, decoded)
    )
    errors = (after - before).abs().amax(1) / before.abs().amax(1)
    return CodecCost(
        kv.numel() / encoded.numel(),
        kv.numel() / encode_s / 1e9,
        kv.numel() / decode_s / 1e9,
        float(errors.max()),
        _perplexity(engine, samples, codec),
    )


def _perplexity(engine: Engine, samples: list[np.ndarray], codec: QuantizedCodec | None) -> float:
    """Return the perplexity of the texts' second halves; the first halves' KV was swapped."""
    half = _LENGTH // 2
    blocks = np.arange(half // BLOCK_SIZE, dtype=np.int32)
    losses = []
    for token_ids in samples:
        engine.run(token_ids, 0, 0, half)
        host = HostPool(engine.pool.blocks_as_bytes, len(blocks), codec=codec)
        host.swap_out(blocks, blocks)
        host.swap_in(blocks, blocks)
        engine.run(token_ids, 0, half, _LENGTH)
        losses.append(engine.losses(token_ids, half))
    return math.exp(torch.cat(losses).mean())
