"""Linear maps with bfloat16 weights in C: near memory speed for few rows, near the CPU's for many.

Symbols: `T` tokens, `K` input features, `N` output features.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.checks import check_tensor
from kernels.cpu.fields import address
from kernels.cpu.library import DTYPES, Call, Field, Library, native
from kernels.cpu.program.kv_ahead import NOTHING_AHEAD, PANEL, KvAhead
from kernels.cpu.weight_memory import WEIGHT_MEMORY


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether `pack` takes this weight [N, K]; it needs the CPU's dot product of bfloat16.

    What else the CPU has does not matter: with matrix registers (AMX), too, oneDNN rounds a row's
    sums by how many rows there are, and a preempted sequence would draw other tokens.
    """
    library = native()
    return (
        library is not None
        and library.has_linear
        and weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and weight.shape[1] % 2 == 0
    )


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> "PackedLinear":
    """Lay out `weight` [N, K] for `x @ weight.T + bias`, `bias` [N]; `can_pack` must hold."""
    library = native()
    assert library is not None, "can_pack was not asked"
    num_out, num_in = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -num_out % PANEL))
    panels = WEIGHT_MEMORY.hold(padded.view(-1, PANEL, num_in // 2, 2).transpose(1, 2))
    return PackedLinear(library, panels, None if bias is None else bias.contiguous(), num_out)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """The map `x @ weight.T + bias`, bfloat16 with fp32 sums.

    A row's result depends on no other row.
    """

    _library: Library
    panels: torch.Tensor
    """The weight as C reads it: bfloat16[ceil(N / 32), K / 2, 32, 2]."""
    _bias: torch.Tensor | None
    num_out: int
    """N."""

    @property
    def num_in(self) -> int:
        """K."""
        return self.panels.shape[1] * 2

    @property
    def can_gate(self) -> bool:
        """Whether `call` can be gated: no panel has both gates and what they gate."""
        return self.num_out % (2 * PANEL) == 0

    def __call__(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Map bfloat16 `[T, K]` to `[T, N]`.

        `dtype` may be float32: the same numbers, without a conversion afterwards.

        Raises:
            ValueError: shape, dtype, device or strides do not fit.
        """
        check_tensor("x", x, (x.shape[0], self.num_in), torch.bfloat16, self.panels)
        out = x.new_empty((x.shape[0], self.num_out), dtype=dtype)
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
    ) -> Call:
        """Return the call that maps the first rows of `x` `[T, K]` to `out` `[T, N]`.

        Both are bfloat16; rows may lie apart. `ahead` is what it fetches for a later call. If
        `is_gated`, the map's output is `[gate, up]`, and `out` `[T, N / 2]` gets `silu(gate) * up`,
        rounded where the map and `silu_mul` round; `can_gate` must hold.
        """
        fields = self._fields(x, out, num_rows, ahead, is_gated=is_gated)
        return Call(self._library.linear, fields)

    def _fields(
        self, x: torch.Tensor, out: torch.Tensor, num_rows: Field, ahead: KvAhead, *, is_gated: bool
    ) -> tuple[Field, ...]:
        return (
            num_rows, self.num_in, self.num_out // (2 if is_gated else 1),
            x.data_ptr(), self.panels.data_ptr(), address(self._bias), out.data_ptr(),
            DTYPES[out.dtype], x.stride(0), out.stride(0), is_gated, *ahead,
        )  # fmt: skip
