"""Unpacks the blocks of GGUF's quantized tensors into integers, scales and offsets.

The layouts come from ggml (`ggml-common.h`). Symbols: `N` rows, `K` numbers of a row, `B` blocks
of a row.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch

from gpu_worker.weights.quantized_linear import Quantization, QuantizedWeight
from model_files.gguf_header import TENSOR_TYPES

Parts: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Integers int8[N, B, groups, group size]; scales and offsets float32[N, B, groups]. The
offsets are None if the type of the blocks has none."""


def unpack_blocks(kind: str, rows: torch.Tensor) -> QuantizedWeight:
    """Return the weight that some rows of blocks encode.

    Args:
        kind: A type of `BLOCK_SIZES`.
        rows: uint8 `[N, bytes]`.
    """
    blocks = _split(rows, -1, BLOCK_BYTES[kind])  # [N, B, bytes]
    integers, scales, offsets = _UNPACK[kind](blocks)
    is_int4 = kind.startswith("Q4")
    if is_int4:  # these are from 0 to 15, but `QuantizedWeight` has -8 to 7
        integers = integers - 8
        offsets = 8 * scales if offsets is None else offsets + 8 * scales
        if kind == "Q4_0":
            offsets = torch.zeros_like(scales)
    return QuantizedWeight(
        quantization=Quantization.INT4 if is_int4 else Quantization.INT8,
        values=integers.flatten(1).contiguous(),
        scales=scales.flatten(1).contiguous(),
        offsets=None if offsets is None else offsets.flatten(1).contiguous(),
    )


def _split(numbers: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Split the last dimension into dimensions of these sizes."""
    return numbers.reshape(*numbers.shape[:-1], *sizes)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """Return low nibbles, then high nibbles: `[..., n]` to `[..., 2 n]`."""
    return torch.cat((numbers & 15, numbers >> 4), dim=-1)


def _float16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Read one float16 number of each block: float32 `[N, B, 1]`."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bits of each byte, lowest first: `[..., n]` to `[..., n, 8]`."""
    return (numbers.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1


def _one_group(integers: torch.Tensor) -> torch.Tensor:
    return integers.to(torch.int8).unsqueeze(2)


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _one_group(_halves(blocks[..., 2:])), _float16(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _one_group(_halves(blocks[..., 4:])), _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Parts:
    fives = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]).flatten(2) << 4
    return _one_group(fives) - 16, _float16(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    fives = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]).flatten(2) << 4
    return _one_group(fives), _float16(blocks, 0), _float16(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return _one_group(blocks[..., 2:].view(torch.int8)), _float16(blocks, 0), None


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack scales and offsets of the eight groups of a block: 6-bit numbers in 12 bytes."""
    first, second, third = _split(blocks[..., 4:16], 3, 4).unbind(2)  # [N, B, 4]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=-1)
    return scales.float() * _float16(blocks, 0), -minima.float() * _float16(blocks, 2)


def _k_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Unpack 128 bytes to eight groups of 32 numbers.

    Each 32 bytes have one group in their low nibbles, and the next group in their high nibbles.
    """
    return _split(_halves(_split(numbers, 4, 32)).flatten(2), 8, 32)


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _k_nibbles(blocks[..., 16:]).to(torch.int8), *_k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    high = _bits(blocks[..., 16:48]).transpose(2, 3)  # group by group
    return (_k_nibbles(blocks[..., 48:]) | high << 4).to(torch.int8), *_k_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    low = _halves(_split(blocks[..., :128], 2, 64))  # [N, B, 2, 128]
    pairs = _split(blocks[..., 128:192], 2, 1, 32)
    high = (pairs >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)) & 3  # [N, B, 2, 4, 32]
    sixes = _split((low | high.flatten(3) << 4).flatten(2), 16, 16)
    scales = blocks[..., 192:208].view(torch.int8).float() * _float16(blocks, 208)
    return sixes.to(torch.int8) - 32, scales, None


_UNPACK: Final[dict[str, Callable[[torch.Tensor], Parts]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
BLOCK_SIZES: Final = {
    kind.name: kind.block_size for kind in TENSOR_TYPES.values() if kind.is_quantized
}
"""Maps the name of a type to the count of numbers in a block of that type."""
BLOCK_BYTES: Final = {kind.name: kind.block_bytes for kind in TENSOR_TYPES.values()}
