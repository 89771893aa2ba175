"""Linear maps, with weights in the layout that the device multiplies fastest.

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
"""Beyond this K, oneDNN splits the sums of a single row, and only then, which rounds differently.

A single row is then computed as two, so that a sequence's tokens do not depend on its batch.
Measured with torch 2.13 on an AMD EPYC (family 26, model 2) on 2026-11-22: in float32 a single row
differed for every K from 1,032 to 8,192 and for none up to 1,024; 2 to 32 rows never differed. On
other CPUs it is a guess.
"""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The map `x @ weight.T + bias` in the device's fastest form.

    On a CPU the weight is packed once, here, instead of in every call: for our own kernel if the
    CPU supports it, else for oneDNN. Few rows then cost only reading the weight, and a row's result
    does not depend on the number of rows.

    Args:
        weight: `[N, K]`; the caller need not keep it.
        bias: `[N]`, of the weight's dtype.
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
