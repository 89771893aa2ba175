"""Makes linear maps from a checkpoint's packed weights: AWQ, GPTQ, GGUF, scaled fp8, MXFP4.

Symbols: `N` output features of a linear map, `K` its input features, `G` groups of input features.
"""

import math
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, TypeAlias

import structlog
import torch

from gpu_worker.weights import gpu_linear
from gpu_worker.weights.checkpoint import has_nan
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.linear import Linear, make_linear
from gpu_worker.weights.quantized_linear import (
    Quantization,
    QuantizedWeight,
    can_multiply,
    make_quantized_linear,
)
from gpu_worker.weights.stored.format import (
    MXFP4_GROUP_SIZE,
    Fp8Format,
    GgufFormat,
    IntegerFormat,
    Mxfp4Format,
    StoredFormat,
)
from gpu_worker.weights.stored.fp8 import Fp8Weight, fp8_tensors, unpack_fp8
from gpu_worker.weights.stored.gguf_blocks import BLOCK_BYTES, BLOCK_SIZES, unpack_blocks
from gpu_worker.weights.stored.integers import integer_tensors, unpack_integers
from gpu_worker.weights.stored.mxfp4 import Mxfp4Weight, can_pack_mxfp4, pack_mxfp4
from gpu_worker.weights.tensor_file import Piece, TensorSpec

_MOST_GROUP: Final = 128
_LEAST_GROUP: Final = 32
"""Packed maps take group sizes that are powers of two, from `_LEAST_GROUP` to `_MOST_GROUP`."""
_LEAST_PLAIN_GROUP: Final = 16
"""The smallest group of 8-bit integers without offsets, as in Q6_K; only CPU kernels take groups
smaller than `_LEAST_GROUP`."""


def cut_weight(weight: QuantizedWeight, rows: slice, columns: slice) -> QuantizedWeight | None:
    """Return a part of a weight; None if the part's groups would be too small for packed maps.

    If the part begins or ends within a group, groups are split into smaller groups with the same
    scale.
    """
    num_in = weight.values.shape[1]
    start, stop, _ = columns.indices(num_in)
    group_size = num_in // weight.scales.shape[1]
    size = math.gcd(group_size, start, stop, _MOST_GROUP)
    is_int8 = weight.quantization is Quantization.INT8
    is_plain = is_int8 and weight.offsets is None
    if is_int8 and group_size == num_in:
        size = stop - start
        groups = slice(0, 1)
    elif size < (_LEAST_PLAIN_GROUP if is_plain else _LEAST_GROUP):
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


def _join(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Join weights along N."""
    offsets = None
    if any(part.offsets is not None for part in parts):
        each = (torch.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts)
        offsets = torch.cat(tuple(each))
    return QuantizedWeight(
        parts[0].quantization,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        offsets,
    ).without_zero_offsets()


_Part: TypeAlias = QuantizedWeight | Fp8Weight | torch.Tensor
"""The weight of a piece: quantized, or as float32."""

_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")
_GIB: Final = 1024**3

_log = structlog.get_logger()


class PackedMaps:
    """Makes linear maps from packed tensors, and counts the weights that stay packed.

    Integers stay integers where a kernel can multiply them, and fp8 numbers stay fp8 on a GPU.
    Other weights become `dtype`.
    """

    def __init__(
        self,
        stored: StoredFormat,
        names: AbstractSet[str],
        dtype: torch.dtype,
        device: torch.device,
        fill: Callable[[Piece, torch.Tensor], None],
    ) -> None:
        """Take the arguments of `Weights`.

        On the meta device `fill` reads nothing; it only records which pieces it was asked for.
        """
        self._stored = stored
        self._names = names
        self._dtype = dtype
        self._device = device
        self._fill = fill
        self._num_packed = 0
        self._num_dequantized = 0
        self._marks: Collection[str]
        """Suffixes of tensor names; each packed map has a tensor whose name ends with one of
        them."""
        match stored:
            case IntegerFormat():
                self._marks = ("qweight",)
            case Fp8Format():
                self._marks = (stored.scale_name,)
            case GgufFormat():
                self._marks = BLOCK_SIZES
            case Mxfp4Format():
                self._marks = ()  # the model asks for experts by their own names

    @property
    def unused(self) -> str:
        """A regular expression for the names of tensors that are not used: activations' scales."""
        return r".*\.input_scale"

    def has(self, name: str) -> bool:
        """Whether the checkpoint packs this map."""
        return any(f"{name}.{mark}" in self._names for mark in self._marks)

    def linear(self, pieces: Sequence[Piece], bias: torch.Tensor | None) -> Linear:
        """Make one map of several weights with the same input. The map joins their outputs.

        Args:
            pieces: Weights `[N, K]`, or parts of them. Not all weights need to be packed.
            bias: The bias of the fused map.

        Raises:
            ModelError: A tensor contradicts the format.
        """
        parts = [self._part(piece, has_bias=bias is not None) for piece in pieces]
        if self._device == _META:
            shape = sum(piece.piece_shape[0] for piece in pieces), pieces[0].piece_shape[1]
            return make_linear(torch.empty(shape, dtype=self._dtype, device=_META), bias)
        linear = self._of_integers(parts, bias) or self._of_fp8(parts, bias)
        if linear is not None:
            self._num_packed += sum(math.prod(piece.piece_shape) for piece in pieces)
            return linear
        weight = torch.cat([self._dequantized(part) for part in parts])
        self._num_dequantized += weight.numel()
        return make_linear(weight, bias)

    def _of_integers(self, parts: Sequence[_Part], bias: torch.Tensor | None) -> Linear | None:
        """Make the map of integer parts; None if the parts differ in kind or no kernel takes them.

        Parts are of one kind if all are integers with the same `Quantization` and the same G.
        """
        integers = [part for part in parts if isinstance(part, QuantizedWeight)]
        kinds = {(part.quantization, part.scales.shape[1]) for part in integers}
        if len(integers) < len(parts) or len(kinds) > 1:
            return None
        joined = _join(integers).to(self._device)
        if not can_multiply(joined, self._dtype):
            return None
        return make_quantized_linear(joined, bias, self._dtype)

    def _of_fp8(self, parts: Sequence[_Part], bias: torch.Tensor | None) -> Linear | None:
        """Make the map if all parts are fp8 numbers and the GPU's kernels take them; else None."""
        parts_fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
        if len(parts_fp8) < len(parts) or not gpu_linear.is_here(self._device):
            return None
        values = torch.cat([part.values for part in parts_fp8]).to(self._device)
        num_groups = {part.scales.shape[1] for part in parts_fp8}
        if len(num_groups) > 1 or not gpu_linear.can_pack(
            values.shape[1], min(num_groups), self._dtype
        ):
            return None  # `log` counts it as dequantized
        scales = torch.cat([part.scales for part in parts_fp8]).to(self._device)
        return gpu_linear.pack_fp8(values, scales, bias, self._dtype)

    def mxfp4(self, weight: Mxfp4Weight, bias: torch.Tensor | None) -> Linear:
        """Make the map of a weight that the model has already read onto the device."""
        num_out, num_groups = weight.scales.shape
        if self._device == _META:
            shape = num_out, num_groups * MXFP4_GROUP_SIZE
            return make_linear(torch.empty(shape, dtype=self._dtype, device=_META), bias)
        num_weights = weight.scales.numel() * MXFP4_GROUP_SIZE
        if can_pack_mxfp4(weight, self._dtype):
            self._num_packed += num_weights
            return pack_mxfp4(weight, bias, self._dtype)
        self._num_dequantized += num_weights
        return make_linear(weight.dequantized().to(self._dtype), bias)

    def dense(self, piece: Piece) -> torch.Tensor:
        """Return the weight `[N, K]` of a piece, dequantized.

        Raises:
            ModelError: A tensor contradicts the format.
        """
        part = self._part(piece, has_bias=False)
        if self._device == _META:
            return torch.empty(piece.piece_shape, dtype=self._dtype, device=_META)
        self._num_dequantized += math.prod(piece.piece_shape)
        return self._dequantized(part)

    def log(self) -> None:
        """Log how many weights stay packed, and the memory of dequantized ones."""
        _log.info(
            "quantized checkpoint",
            kind=self._stored.title,
            packed_weights=self._num_packed,
            dequantized_weights=self._num_dequantized,
            dequantized_gib=round(self._num_dequantized * self._dtype.itemsize / _GIB, 3),
        )

    def _part(self, piece: Piece, *, has_bias: bool) -> _Part:
        """Return the weight of a piece, quantized or as float32.

        The weight is float32 if the checkpoint does not pack it, or if `cut_weight` returns None
        for the piece.

        Tensors of AWQ, GPTQ and fp8 are read whole even for one rank's part, because the part may
        begin or end within a group or a block. From GGUF tensors, only the part's rows are read.
        """
        name = piece.name.removesuffix(".weight")
        if not self.has(name):
            weight = torch.empty(piece.piece_shape, device=self._reading_on)
            self._fill(piece, weight)
            return weight
        num_out, num_in = piece.shape
        rows, columns = (*piece.where, slice(None), slice(None))[:2]
        if isinstance(self._stored, Fp8Format):
            tensors = self._read(name, fp8_tensors(self._stored, num_out, num_in))
            if self._device == _META:
                return tensors["weight"]
            return unpack_fp8(self._stored, tensors, rows, columns)
        if isinstance(self._stored, GgufFormat):
            return self._of_blocks(name, piece)
        assert isinstance(self._stored, IntegerFormat), "no map is marked as MXFP4"
        self._refuse_sizes(self._stored, name, num_out, num_in)
        tensors = self._read(name, integer_tensors(self._stored, num_out, num_in))
        self._refuse_order(self._stored, name, num_in)
        if not has_bias:
            self._refuse_bias(name, num_out)
        if self._device == _META:
            return tensors["scales"]
        whole = unpack_integers(self._stored, tensors)
        cut = cut_weight(whole, rows, columns)
        return whole.dequantized()[rows, columns] if cut is None else cut

    def _of_blocks(self, name: str, piece: Piece) -> _Part:
        kind = next(kind for kind in BLOCK_SIZES if f"{name}.{kind}" in self._names)
        num_out, num_in = piece.shape
        row_bytes = num_in // BLOCK_SIZES[kind] * BLOCK_BYTES[kind]
        raw = Piece(f"{name}.{kind}", (num_out, row_bytes), piece.where[:1])
        blocks = torch.empty(raw.piece_shape, dtype=torch.uint8, device=self._reading_on)
        self._fill(raw, blocks)
        if self._device == _META:
            return blocks
        rows = unpack_blocks(kind, blocks)
        if has_nan(rows.scales) or (rows.offsets is not None and has_nan(rows.offsets)):
            raise ModelError(f"{name}.weight has NaN")
        columns = (*piece.where, slice(None), slice(None))[1]
        cut = cut_weight(rows, slice(None), columns)
        return rows.dequantized()[:, columns] if cut is None else cut

    def _read(self, name: str, specs: dict[str, TensorSpec]) -> dict[str, torch.Tensor]:
        tensors = {}
        for end, (shape, dtype) in specs.items():
            tensors[end] = torch.empty(shape, dtype=dtype, device=self._reading_on)
            self._fill(Piece(f"{name}.{end}", shape), tensors[end])
        return tensors

    @property
    def _reading_on(self) -> torch.device:
        return _META if self._device == _META else _CPU

    def _refuse_sizes(self, stored: IntegerFormat, name: str, num_out: int, num_in: int) -> None:
        per_word = 32 // stored.bits
        if num_in % (stored.group_size or 1):
            raise ModelError(
                f"{name} has {num_in} input features; quantization_config.group_size is"
                f" {stored.group_size}, which must divide them"
            )
        for what, size in (("input", num_in), ("output", num_out)):
            if size % per_word:
                raise ModelError(
                    f"{name} has {size} {what} features; at {stored.bits} bits their number must"
                    f" be a multiple of {per_word}"
                )

    def _refuse_order(self, stored: IntegerFormat, name: str, num_in: int) -> None:
        """Refuse a GPTQ `g_idx` unless it divides the input features into groups in order."""
        if f"{name}.g_idx" not in self._names:
            return
        found = self._read(name, {"g_idx": ((num_in,), torch.int32)})["g_idx"]
        expected = torch.arange(num_in, dtype=torch.int32) // (stored.group_size or num_in)
        if not found.is_meta and not torch.equal(found, expected):
            raise ModelError(
                f"{name}.g_idx puts input features out of order, as desc_act does, which is not"
                " supported"
            )

    def _refuse_bias(self, name: str, num_out: int) -> None:
        """Refuse a bias in the checkpoint for a map that has none, unless the bias is zero.

        Some GPTQ writers add biases of zeros.
        """
        if f"{name}.bias" not in self._names:
            return
        bias = torch.empty(num_out, device=self._reading_on)
        self._fill(Piece(f"{name}.bias", (num_out,)), bias)
        if not bias.is_meta and bias.any():
            raise ModelError(f"{name}.bias is not zero; by config.json the map has none")

    def _dequantized(self, part: _Part) -> torch.Tensor:
        weight = part if isinstance(part, torch.Tensor) else part.dequantized()
        return weight.to(self._device, self._dtype)
