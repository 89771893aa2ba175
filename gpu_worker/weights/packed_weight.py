"""Weights as other programs pack them, made into ours: AWQ and GPTQ integers, scaled fp8.

Symbols: `N` output features of a linear map, `K` its input features, `G` groups of these, `W` how
many integers a word of 32 bits holds.
"""

import math
from collections.abc import Mapping
from typing import Final

import torch

from gpu_worker.weights.quantized_linear import Quantization, QuantizedWeight
from gpu_worker.weights.stored_format import Fp8Format, IntegerFormat, Packing, ScaleShape

_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of each of eight outputs in a row, the nibble of their word that it is in."""
_MOST_GROUP: Final = 128
_LEAST_GROUP: Final = 32
"""The sizes of groups that packed maps take are the powers of two between."""

TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""


def integer_tensors(stored: IntegerFormat, num_out: int, num_in: int) -> dict[str, TensorSpec]:
    """By the end of its name, each tensor of a map `[N, K]`, but GPTQ's `g_idx`."""
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
    """The weight `(q - zero) * scale` of a map; exact, with scales and offsets in float32.

    Args:
        stored: how it is packed.
        tensors: as `integer_tensors` has them.
    """
    bits, middle = stored.bits, 2 ** (stored.bits - 1)
    if stored.packing is Packing.AWQ:
        values = _in_awq_order(unpack_words(tensors["qweight"], bits)).t()
        zeros = _in_awq_order(unpack_words(tensors["qzeros"], bits))
    else:
        values = unpack_words(tensors["qweight"].t(), bits)
        zeros = unpack_words(tensors["qzeros"], bits)
    # Past the last integer it begins again: what was 0 is stored as the largest, if it lacks 1.
    zeros = (zeros + stored.zero_shift) & (2 * middle - 1)  # uint8[G, N]
    scales = tensors["scales"].t()  # [N, G]
    return QuantizedWeight(
        quantization=Quantization.INT4 if bits == 4 else Quantization.INT8,  # noqa: PLR2004
        values=(values.to(torch.int16) - middle).to(torch.int8).contiguous(),
        scales=scales.contiguous(),
        offsets=((middle - zeros.t().float()) * scales).contiguous(),
    )


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`int32[..., M]` to the `uint8[..., M * W]` in them, the lowest bits first."""
    out = torch.empty(*words.shape, 32 // bits, dtype=torch.uint8)
    for place in range(32 // bits):
        out[..., place] = (words >> (bits * place)) & (2**bits - 1)
    return out.flatten(-2)


def _in_awq_order(nibbles: torch.Tensor) -> torch.Tensor:
    by_word = nibbles.view(*nibbles.shape[:-1], -1, len(_AWQ_PLACES))
    return by_word[..., list(_AWQ_PLACES)].flatten(-2)


def cut_weight(weight: QuantizedWeight, rows: slice, columns: slice) -> QuantizedWeight | None:
    """A part of a weight, in groups of a size that packed maps take; None: there is no such size.

    A group may be made several of the same scale, so that none is cut in two.
    """
    num_in = weight.values.shape[1]
    start, stop, _ = columns.indices(num_in)
    group_size = num_in // weight.scales.shape[1]
    size = math.gcd(group_size, start, stop, _MOST_GROUP)
    if weight.quantization is Quantization.INT8 and group_size == num_in:
        size = stop - start
        groups = slice(0, 1)
    elif size < _LEAST_GROUP:
        return None
    else:
        groups = slice(start // size, stop // size)

    def of_groups(numbers: torch.Tensor) -> torch.Tensor:
        return numbers[rows].repeat_interleave(max(1, group_size // size), 1)[:, groups]

    return QuantizedWeight(
        weight.quantization,
        weight.values[rows, columns],
        of_groups(weight.scales),
        None if weight.offsets is None else of_groups(weight.offsets),
    )


def fp8_tensors(stored: Fp8Format, num_out: int, num_in: int) -> dict[str, TensorSpec]:
    """By the end of its name, each tensor of a map `[N, K]`."""
    if stored.scale_shape is ScaleShape.TENSOR:
        shape: tuple[int, ...] = (1,)
    elif stored.scale_shape is ScaleShape.CHANNEL:
        shape = (num_out, 1)
    else:
        blocks = zip((num_out, num_in), stored.scale_shape, strict=True)
        shape = tuple(-(-size // block) for size, block in blocks)
    return {
        "weight": ((num_out, num_in), torch.float8_e4m3fn),
        stored.scale_name: (shape, torch.float32),
    }


def dequantize_fp8(stored: Fp8Format, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight of a map: float32 `[N, K]`; `tensors` are as `fp8_tensors` has them."""
    weight, scales = tensors["weight"].float(), tensors[stored.scale_name]
    if not isinstance(stored.scale_shape, ScaleShape):
        for dim, block in enumerate(stored.scale_shape):
            scales = scales.repeat_interleave(block, dim).narrow(dim, 0, weight.shape[dim])
    return weight * scales
