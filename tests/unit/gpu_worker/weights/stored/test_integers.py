"""What the bits of AWQ and GPTQ mean, written out."""

import pytest
import torch

from gpu_worker.weights.stored.format import IntegerFormat, Packing
from gpu_worker.weights.stored.integers import unpack_integers, unpack_words

AWQ = IntegerFormat(Packing.AWQ, 4, 32, zero_shift=0)


def words(*numbers):
    return torch.tensor(numbers, dtype=torch.int64).to(torch.int32)


def test_the_lowest_bits_are_first():
    assert unpack_words(words(0x76543210), 4).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert unpack_words(words(0xFEDCBA98, 0x1), 4).tolist() == [*range(8, 16), 1, *[0] * 7]
    assert unpack_words(words(0xFF804001), 8).tolist() == [0x01, 0x40, 0x80, 0xFF]


def test_awq_by_hand():
    """Output j's nibble: 0 4 1 5 2 6 3 7 from the lowest, so a word that reads 75316420 is 0..7."""
    row = 0x75316420
    tensors = {
        "qweight": words(row, *[0] * 31).view(32, 1),
        "qzeros": words(0x00000021).view(1, 1),
        "scales": torch.tensor([[1.0, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.25]]),
    }
    weight = unpack_integers(AWQ, tensors).dequantized()
    # Zero points: output 0 has 1, output 2 has 2, the others 0.
    assert weight[:, 0].tolist() == [-1.0, 2.0, 0.0, 3.0, 4.0, 5.0, 6.0, 1.75]
    assert weight[:, 1].tolist() == [-1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("zero_shift", "zeros"), [(1, 0xF2106543), (0, 0x03217654)])
def test_gptq_by_hand(zero_shift, zeros):
    """Inputs in order along a column of words; zero points in order, in the first format less 1."""
    stored = IntegerFormat(Packing.GPTQ, 4, 32, zero_shift)
    qweight = torch.zeros(4, 8, dtype=torch.int32)
    qweight[0, 0], qweight[3, 7] = words(0x00000A21)[0], words(0xF0000000)[0]
    tensors = {
        "qweight": qweight,
        "qzeros": words(zeros).view(1, 1),
        "scales": torch.tensor([[1.0, 1, 1, 1, 1, 1, 1, 0.5]]),
    }
    weight = unpack_integers(stored, tensors).dequantized()
    assert weight[0, :4].tolist() == [1 - 4, 2 - 4, 10 - 4, 0 - 4]
    assert weight[:, 5].tolist() == [-4.0, -5.0, -6.0, -7.0, -1.0, -2.0, -3.0, 0.0]
    assert weight[7, 30:].tolist() == [0.0, 7.5]


def test_gptq_of_eight_bits_by_hand():
    stored = IntegerFormat(Packing.GPTQ, 8, None, zero_shift=1)
    tensors = {
        "qweight": words(0xFF807F00, 0, 0, 0).view(1, 4),
        "qzeros": words(0x0000007F).view(1, 1),
        "scales": torch.tensor([[0.5, 1, 1, 1]]),
    }
    weight = unpack_integers(stored, tensors)
    assert weight.dequantized()[0].tolist() == [-64.0, -0.5, 0.0, 63.5]
    assert weight.values[0].tolist() == [-128, -1, 0, 127]
