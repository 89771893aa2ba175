"""Linear maps, with their weights in the form that the device multiplies fastest.

Symbols: `T` tokens, `K` input features, `N` output features.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.nn import functional

from kernels.cpu import linear as native

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps `[T, K]` to `[T, N]` of the same dtype and device, row by row."""

_MAX_UNSPLIT_FEATURES = 1024
"""With more input features, oneDNN splits the sums of a lone row, but not of several rows.

Then they round otherwise. So that a sequence's tokens do not depend on the batch, a lone row is
then computed as two equal rows. Measured with torch 2.13 on an AMD EPYC (family 26, model 2) on
2026-11-22: in float32 a lone row differed for every K of 1,032 to 8,192 and for none up to 1,024,
and 2 to 32 rows never did. On other CPUs it is a guess.
"""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Return the map `x @ weight.T + bias`, with the weight laid out once for the device.

    On a CPU that is the layout of our own kernel if the CPU has a dot product of bfloat16, else
    oneDNN's. Few rows then take the time of reading the weight, and a row's result does not depend
    on how many rows come with it.

    Args:
        weight: `[N, K]`; the caller need not keep it.
        bias: `[N]` of the weight's dtype.
    """
    if native.can_pack(weight):
        return native.pack(weight, bias)
    if not _can_pack(weight):
        return lambda x: functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001  no public name
    apply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

    def many_rows(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = apply(x, packed, bias, "none", [], "")
        return out

    def any_rows(x: torch.Tensor) -> torch.Tensor:
        return many_rows(x.expand(2, -1))[:1] if x.shape[0] == 1 else many_rows(x)

    return any_rows if weight.shape[1] > _MAX_UNSPLIT_FEATURES else many_rows


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:  # noqa: SLF001
        return False
    match weight.dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
        case _:
            return False
