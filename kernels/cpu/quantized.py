"""Linear maps with weights of 8 or 4 bits in C, for activations in bfloat16.

Symbols: `T` tokens, `K` input features, `N` output features, `G` groups of input features.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from kernels.checks import check_tensor
from kernels.cpu.fields import address
from kernels.cpu.library import Call, Field, Library, native
from kernels.cpu.program.kv_ahead import PANEL
from kernels.cpu.weight_memory import WEIGHT_MEMORY

_UNROLL: Final = 8
"""Input features that C unpacks together; at 4 bits, nibbles of two 16-bit words."""
_MAX_INT4_GROUP: Final = 128


def can_pack(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether `pack` takes values [N, K], for activations of this dtype.

    It needs the CPU's dot product of bfloat16.
    """
    library = native()
    return (
        library is not None
        and library.has_linear
        and values.device.type == "cpu"
        and dtype is torch.bfloat16
        and values.shape[1] % _UNROLL == 0
    )


def pack(
    bits: int,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> "QuantizedLinear":
    """Lay out a quantized weight for `x @ weight.T + bias`; `can_pack` must hold.

    Args:
        bits: 8 or 4.
        values: int8[N, K], integers of so many bits. The weight is `values * scale + offset`.
        scales: bfloat16[N, G], one for K / G values; at 4 bits that is 32, 64, 96 or 128 values.
        offsets: bfloat16[N, G], or None for zeros.
        bias: bfloat16[N], or None.
    """
    library = native()
    assert library is not None, "can_pack was not asked"
    num_out, num_in = values.shape
    group_size = num_in // scales.shape[1]
    if bits == 4:  # noqa: PLR2004
        assert group_size % 32 == 0, "sums of groups are taken 32 at a time"
        assert group_size <= _MAX_INT4_GROUP, "a group is unpacked at once"
    padded = functional.pad(values, (0, 0, 0, -num_out % PANEL))
    if bits == 8:  # noqa: PLR2004
        panels = padded.view(-1, PANEL, num_in // 2, 2).transpose(1, 2)
    else:
        nibbles = (padded + 8).view(-1, 2, PANEL // 2, num_in // 8, 4, 2).to(torch.int32)
        shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int32).view(4, 1)
        words = (nibbles << shifts).sum(4, dtype=torch.int32)  # [N / 32, 2, 16, K / 8, 2]
        panels = words.permute(0, 3, 1, 2, 4).to(torch.int16)
    return QuantizedLinear(
        _library=library,
        _bits=bits,
        _num_out=num_out,
        _num_in=num_in,
        _panels=WEIGHT_MEMORY.hold(panels),
        _scales=_by_panel(scales),
        _offsets=None if offsets is None else _by_panel(offsets),
        _bias=None if bias is None else bias.contiguous(),
    )


def _by_panel(of_groups: torch.Tensor) -> torch.Tensor:
    """Rearrange `[N, G]` to `[ceil(N / 32), G, 32]`."""
    num_out, num_groups = of_groups.shape
    padded = functional.pad(of_groups, (0, 0, 0, -num_out % PANEL))
    return padded.view(-1, PANEL, num_groups).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear:
    """The map `x @ weight.T + bias`, bfloat16 with fp32 sums.

    A row's result depends on no other row.
    """

    _library: Library
    _bits: int
    _num_out: int
    _num_in: int
    _panels: torch.Tensor
    """8 bits: int8[ceil(N / 32), K / 2, 32, 2]; 4: int16[ceil(N / 32), K / 8, 2, 16, 2]."""
    _scales: torch.Tensor
    """bfloat16[ceil(N / 32), G, 32]."""
    _offsets: torch.Tensor | None
    _bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map bfloat16 `[T, K]` to `[T, N]`.

        Raises:
            ValueError: shape, dtype, device or strides do not fit.
        """
        check_tensor("x", x, (x.shape[0], self._num_in), torch.bfloat16, self._panels)
        out = x.new_empty((x.shape[0], self._num_out))
        self._library.quantized(*self._fields(x, out, x.shape[0]))
        return out

    def call(self, x: torch.Tensor, out: torch.Tensor, num_rows: Field) -> Call:
        """Return the call that maps the first rows of `x` `[T, K]` to `out` `[T, N]`.

        Both are bfloat16 and contiguous.
        """
        return Call(self._library.quantized, self._fields(x, out, num_rows))

    def _fields(self, x: torch.Tensor, out: torch.Tensor, num_rows: Field) -> tuple[Field, ...]:
        return (
            self._bits, num_rows, self._num_in, self._num_out,
            self._num_in // self._scales.shape[1],
            x.data_ptr(), self._panels.data_ptr(), self._scales.data_ptr(),
            address(self._offsets), address(self._bias), out.data_ptr(), x.stride(0),
        )  # fmt: skip
