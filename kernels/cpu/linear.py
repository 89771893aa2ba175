"""Linear maps in C: memory bandwidth limits their speed for few rows, and arithmetic for many.

A packed weight consists of *panels*; each has the numbers of 32 output features (`PANEL`).

Symbols: `T` tokens, `H` heads, `K` input features, `N` output features, `G` groups of input
features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch.nn import functional

from kernels.checks import check_tensor
from kernels.cpu.fields import address
from kernels.cpu.library import DTYPES, Field, KernelCall, Library, native
from kernels.cpu.program.kv_ahead import NOTHING_AHEAD, PANEL, KvAhead
from kernels.cpu.weight_memory import WEIGHT_MEMORY

_KEPT_AS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.int16: 3}
"""C's number for the format of a weight, by the dtype of its panels (`PackedLinear.panels`). An
int16 holds four 4-bit weights."""
_KEPT_AS_MXFP4: Final = 4
"""C's number for MXFP4, which has int16 panels and uint8 scales."""
_UNROLL: Final = 8
"""How many input features the C code unpacks at once, if the weight is in integers."""
_GROUP_MULTIPLE: Final = 32


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether `pack` takes this weight [N, K]."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in DTYPES
        # This comes last, because it compiles the library, which a GPU worker does not need.
        and native() is not None
    )


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, *, is_low_rank: bool = False
) -> "PackedLinear":
    """Lay out `weight` [N, K] for `x @ weight.T + bias`; `bias` is [N]. `can_pack` must be true.

    If `is_low_rank`, the map's results equal those of the kernels for adapters
    (`kernels.cpu.program.low_rank`) to the last bit.
    """
    if weight.dtype is torch.float32:
        panels = _padded(weight).view(-1, PANEL, weight.shape[1]).transpose(1, 2)
    else:  # C multiplies pairs of input features; an odd last one is paired with a zero
        padded = functional.pad(_padded(weight), (0, weight.shape[1] % 2))
        panels = padded.view(-1, PANEL, padded.shape[1] // 2, 2).transpose(1, 2)
    # The factors of an adapter may be packed while the model computes on the pinned threads.
    packed = _packed(weight.shape, panels, None, None, bias, weight.dtype, touches=not is_low_rank)
    return replace(packed, _is_low_rank=is_low_rank)


def pack_heads(weight: torch.Tensor) -> "PackedHeads":
    """Lay out `weight` [H, N, K], one map for each head, for `x[:, h] @ weight[h].T`.

    `can_pack` must be true for the weight of each head.
    """
    num_heads, num_out, _ = weight.shape
    joined = pack(functional.pad(weight, (0, 0, 0, -num_out % PANEL)).flatten(0, 1), None)
    library = native()
    assert library is not None, "can_pack was not asked"
    return PackedHeads(library, replace(joined, num_out=num_out), num_heads)


def can_pack_integers(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether `pack_integers` takes values [N, K], for activations of this dtype."""
    return (
        values.device.type == "cpu"
        and dtype in DTYPES
        and values.shape[1] % _UNROLL == 0
        and native() is not None
    )


def pack_integers(
    bits: int,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> "PackedLinear":
    """Lay out a quantized weight for `x @ weight.T + bias`; `can_pack_integers` must be true.

    Scales and offsets are rounded to float16. At 4 bits, the layout has `value + 8`, from 0 to 15.
    To make up for the 8, the offset becomes `offset - 8 * scale` before it is rounded.

    Args:
        bits: 8 or 4.
        values: int8[N, K], signed integers of `bits` bits. The weight is `values * scale + offset`.
        scales: [N, G], each for K / G values; K / G is a multiple of 8.
        offsets: [N, G]; if given, K / G must be a multiple of 32. At 8 bits, None stands for zeros.
            At 4 bits, offsets are required.
        bias: [N] of `dtype`, or None.
        dtype: The dtype of the activations, float32 or bfloat16.
    """
    num_in = values.shape[1]
    group_size = num_in // scales.shape[1]
    assert group_size % _UNROLL == 0, "whole groups are unpacked"
    if offsets is not None:
        assert group_size % _GROUP_MULTIPLE == 0, "sums of groups are taken a vector at a time"
    padded = _padded(values)
    if bits == 8:  # noqa: PLR2004
        panels = padded.view(-1, PANEL, num_in // 2, 2).transpose(1, 2)
    else:
        assert offsets is not None, "integers of 4 bits begin at 0"
        offsets = offsets.float() - 8 * scales.float()
        nibbles = (padded + 8).view(-1, PANEL, num_in // 8, 4, 2).to(torch.int32)
        shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int32).view(4, 1)
        words = (nibbles << shifts).sum(3, dtype=torch.int32)  # [N / 32, 32, K / 8, 2]
        panels = words.transpose(1, 2).to(torch.int16)
    return _packed(values.shape, panels, scales, offsets, bias, dtype)


def can_pack_mxfp4(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `pack_mxfp4` takes weights on `device`, for activations of this dtype."""
    return device.type == "cpu" and dtype in DTYPES and native() is not None


def pack_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> "PackedLinear":
    """Lay out a weight in MXFP4 for `x @ weight.T + bias`; `can_pack_mxfp4` must be true.

    The map multiplies with exactly the given numbers, without rounding them. The packed weight has
    as many bytes as `blocks` and `scales`, apart from rows that fill up the last panel.

    Args:
        blocks: uint8[N, G, 16]. Each byte has two numbers, the first in its low bits.
        scales: uint8[N, G]. A value e stands for the scale `2 ** (e - 127)` of 32 numbers.
        bias: [N] of `dtype`, or None.
        dtype: The dtype of the activations, float32 or bfloat16.
    """
    num_out, num_groups = scales.shape
    by_eight = _padded(blocks.flatten(1)).view(torch.int32)  # [N', K / 8], each eight nibbles
    words = _low_nibbles(by_eight) | _low_nibbles(by_eight >> 4) << 16
    panels = words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous().unsqueeze(3)
    panels = panels.view(torch.int16)
    shape = num_out, _GROUP_MULTIPLE * num_groups
    return _packed(shape, panels, scales, None, bias, dtype)


def _low_nibbles(words: torch.Tensor) -> torch.Tensor:
    """In each int32 word, move the low nibbles of the four bytes to the word's low half."""
    words = words & 0x0F0F0F0F
    words = (words | words >> 4) & 0x00FF00FF
    return (words | words >> 8) & 0xFFFF


def _packed(
    shape: Sequence[int],
    panels: torch.Tensor,
    scales: torch.Tensor | None,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    touches: bool = True,
) -> "PackedLinear":
    """Make the map of a weight `[N, K]` that was laid out in panels.

    If `touches`, `Library.first_touch` puts each panel's memory near the thread that will read it.
    """
    library = native()
    assert library is not None, "can_pack was not asked"
    num_out, num_in = shape

    def touch(unused: torch.Tensor) -> None:
        num_panels = len(unused)
        library.first_touch(unused.data_ptr(), num_panels, unused.nbytes // max(1, num_panels))

    return PackedLinear(
        _library=library,
        dtype=dtype,
        num_out=num_out,
        num_in=num_in,
        panels=WEIGHT_MEMORY.hold(panels, touch if touches else None),
        _scales=None if scales is None else _by_panel(scales, _scale_dtype(scales)),
        _offsets=None if offsets is None else _by_panel(offsets, torch.float16),
        _bias=None if bias is None else bias.contiguous(),
    )


def _padded(weight: torch.Tensor) -> torch.Tensor:
    """Add rows of zeros up to a multiple of PANEL."""
    return functional.pad(weight, (0, 0, 0, -weight.shape[0] % PANEL))


def _scale_dtype(scales: torch.Tensor) -> torch.dtype:
    return torch.uint8 if scales.dtype is torch.uint8 else torch.float16


def _by_panel(of_groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rearrange scales or offsets [N, G] to [ceil(N / 32), G, 32] of `dtype`."""
    panels = _padded(of_groups).view(-1, PANEL, of_groups.shape[1]).transpose(1, 2)
    return panels.to(dtype).contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """The linear map `x @ weight.T + bias`, with fp32 sums.

    The result of a row does not depend on other rows.
    """

    _library: Library
    dtype: torch.dtype
    """The dtype of the activations, float32 or bfloat16."""
    num_out: int
    """The number of output features, N."""
    num_in: int
    """The number of input features, K."""
    panels: torch.Tensor
    """The weight as C reads it:

    - in float32: float32[ceil(N / 32), K, 32]
    - in bfloat16: bfloat16[ceil(N / 32), ceil(K / 2), 32, 2]
    - in integers of 8 bits: int8[ceil(N / 32), K / 2, 32, 2]
    - in integers of 4 bits or MXFP4: int16[ceil(N / 32), K / 8, 32, 2].
    """
    _scales: torch.Tensor | None
    """float16[ceil(N / 32), G, 32], or for MXFP4 uint8; None if the weight is not quantized."""
    _offsets: torch.Tensor | None
    _bias: torch.Tensor | None
    _is_low_rank: bool = False

    @property
    def can_gate(self) -> bool:
        """Whether `call` accepts `is_gated`: no panel may have features of both gate and up."""
        return self.num_out % (2 * PANEL) == 0

    @property
    def _kept_as(self) -> int:
        is_mxfp4 = self._scales is not None and self._scales.dtype is torch.uint8
        return _KEPT_AS_MXFP4 if is_mxfp4 else _KEPT_AS[self.panels.dtype]

    @property
    def can_fetch_ahead(self) -> bool:
        """Whether `call` can prefetch memory for a later call."""
        return self.panels.dtype is torch.bfloat16

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Map `[T, K]` to `[T, N]`.

        `dtype` is the result's dtype; None: the dtype of `x`. If `x` is bfloat16, `dtype` may be
        float32: the results are still rounded to bfloat16, but a caller that computes in float32
        need not convert them.

        Raises:
            ValueError: shape, dtype, device or strides do not fit.
        """
        check_tensor("x", x, (x.shape[0], self.num_in), self.dtype, self.panels)
        out = x.new_empty((x.shape[0], self.num_out), dtype=dtype or self.dtype)
        self._library.linear(*self._fields(x, out, x.shape[0], NOTHING_AHEAD, is_gated=False))
        return out

    def call(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        num_rows: Field,
        ahead: KvAhead = NOTHING_AHEAD,
        *,
        is_gated: bool = False,
    ) -> KernelCall:
        """Return the call that maps the first `num_rows` rows of `x` `[T, K]` to `out` `[T, N]`.

        Both tensors have the map's dtype. Each row is contiguous, but there may be gaps between
        rows. `ahead` is the memory to prefetch for a later call.

        If `is_gated`, the map computes `[gate, up]`, and writes `silu(gate) * up` to `out`, which
        is then `[T, N / 2]`. The call rounds wherever separate calls of the map and of `silu_mul`
        would round. `can_gate` must be true.
        """
        fields = self._fields(x, out, num_rows, ahead, is_gated=is_gated)
        return KernelCall(self._library.linear, fields)

    def _fields(
        self, x: torch.Tensor, out: torch.Tensor, num_rows: Field, ahead: KvAhead, *, is_gated: bool
    ) -> tuple[Field, ...]:
        num_groups = 1 if self._scales is None else self._scales.shape[1]
        is_padded = self.panels.dtype is torch.bfloat16 and self.num_in % 2 == 1
        num_in = self.num_in + is_padded
        return (
            num_rows, num_in, self.num_out // (2 if is_gated else 1),
            DTYPES[self.dtype], self._kept_as, DTYPES[out.dtype],
            x.data_ptr(), self.panels.data_ptr(), address(self._scales), address(self._offsets),
            address(self._bias), out.data_ptr(), num_in // num_groups,
            x.stride(0), out.stride(0), self.num_in, is_gated, self._is_low_rank, *ahead,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class PackedHeads:
    """A linear map for each head, with fp32 sums. A row's result does not depend on other rows."""

    _library: Library
    _first: PackedLinear
    """The first head's map; the panels of the other heads follow its panels."""
    _num_heads: int
    """The number of heads, H."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Map `x` [T, H, K] to `out` [T, H, N]; strides over tokens and heads may be any.

        Raises:
            ValueError: shape, dtype, device or strides do not fit.
        """
        first, shape = self._first, (x.shape[0], self._num_heads)
        check_tensor("x", x, (*shape, first.num_in), first.dtype, first.panels)
        check_tensor("out", out, (*shape, first.num_out), first.dtype, x)
        self._library.linear_heads(
            self._num_heads, x.stride(1), out.stride(1), first.panels.nbytes // self._num_heads,
            *first.call(x, out, x.shape[0]).fields,
        )  # fmt: skip
