"""Blocks of GGUF against the decoder of the package `gguf`."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from gpu_worker.weights.quantized_linear import Quantization
from gpu_worker.weights.stored.gguf_blocks import unpack_blocks
from tests.gguf_fixture import K_KINDS, SMALL_KINDS, random_blocks


@pytest.mark.parametrize("kind", [*SMALL_KINDS, *K_KINDS])
def test_blocks_are_decoded_as_by_ggml(kind):
    number = GGMLQuantizationType[kind]
    if kind in K_KINDS:
        raw = random_blocks(kind, 5, 768)
    else:
        weight = np.random.default_rng(1).normal(size=(5, 768)).astype(np.float32)
        raw = gguf.quantize(weight, number)
    unpacked = unpack_blocks(kind, torch.from_numpy(raw))
    expected = torch.from_numpy(gguf.dequantize(raw, number))
    torch.testing.assert_close(unpacked.dequantized(), expected, rtol=1e-6, atol=1e-6)
    is_int4 = unpacked.quantization is Quantization.INT4
    assert is_int4 == kind.startswith("Q4")
    assert unpacked.scales.shape[1] == 768 // (16 if kind == "Q6_K" else 32)
    low, high = (-8, 7) if is_int4 else (-127, 127)
    assert low <= unpacked.values.min() <= unpacked.values.max() <= high
