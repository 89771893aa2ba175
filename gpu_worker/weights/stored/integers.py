"""Unpacks linear maps of AWQ and GPTQ: integers in words of 32 bits.

Symbols: `N` output features of a linear map, `K` its input features, `G` groups of input features,
`W` integers in a word.
"""

from collections.abc import Mapping
from typing import Final

import torch

from gpu_worker.weights.quantized_linear import Quantization, QuantizedWeight
from gpu_worker.weights.stored.format import IntegerFormat, Packing
from gpu_worker.weights.tensor_file import TensorSpec

_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of the eight consecutive outputs in a word: the nibble that holds it; 0 is the
lowest."""


def integer_tensors(stored: IntegerFormat, num_out: int, num_in: int) -> dict[str, TensorSpec]:
    """Return shape and dtype of each tensor of a map, except `g_idx`.

    The keys are the tensors' names without the map's name, such as "qweight".
    """
    per_word = 32 // stored.bits
    num_groups = num_in // (stored.group_size or num_in)
    weight = (num_in // per_word, num_out)
    if stored.packing is Packing.AWQ:
        weight = (num_in, num_out // per_word)
    return {
        "qweight": (weight, torch.int32),
        "qzeros": ((num_groups, num_out // per_word), torch.int32),
        "scales": ((num_groups, num_out), torch.float32),
    }


def unpack_integers(stored: IntegerFormat, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """Return a map's weight, `(q - zero) * scale` for packed integers q, without rounding.

    Args:
        stored: How the map is packed.
        tensors: The map's tensors, by the names that `integer_tensors` gives.
    """
    bits, middle = stored.bits, 2 ** (stored.bits - 1)
    if stored.packing is Packing.AWQ:
        values = _in_awq_order(unpack_words(tensors["qweight"], bits)).t()
        zeros = _in_awq_order(unpack_words(tensors["qzeros"], bits))
    else:
        values = unpack_words(tensors["qweight"].t(), bits)
        zeros = unpack_words(tensors["qzeros"], bits)
    # Arithmetic wraps around: with a shift of 1, zero point 0 is stored as the largest integer.
    zeros = (zeros + stored.zero_shift) & (2 * middle - 1)  # uint8[G, N]
    scales = tensors["scales"].t()  # [N, G]
    return QuantizedWeight(
        quantization=Quantization.INT4 if bits == 4 else Quantization.INT8,  # noqa: PLR2004
        values=(values.to(torch.int16) - middle).to(torch.int8).contiguous(),
        scales=scales.contiguous(),
        offsets=((middle - zeros.t().float()) * scales).contiguous(),
    )


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack `int32[..., M]` to `uint8[..., M * W]`, lowest bits first."""
    out = torch.empty(*words.shape, 32 // bits, dtype=torch.uint8)
    for place in range(32 // bits):
        out[..., place] = (words >> (bits * place)) & (2**bits - 1)
    return out.flatten(-2)


def _in_awq_order(nibbles: torch.Tensor) -> torch.Tensor:
    by_word = nibbles.view(*nibbles.shape[:-1], -1, len(_AWQ_PLACES))
    return by_word[..., list(_AWQ_PLACES)].flatten(-2)
