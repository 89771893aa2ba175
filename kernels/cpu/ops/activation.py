"""SiLU-gated product in C.

Symbols: `T` tokens, `I` intermediate size.
"""

import torch

from kernels import reference
from kernels.checks import check_tensor
from kernels.cpu.library import DTYPES, native


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` for `gate_up` [T, 2 * I], gate in the first half; [T, I].

    Raises:
        ValueError: not of even width, or not of dense rows.
    """
    library, dtype = native(), DTYPES.get(gate_up.dtype)
    if library is None or dtype is None or gate_up.dim() != 2:  # noqa: PLR2004  [T, 2 * I]
        return reference.silu_mul(gate_up)
    num_tokens, width = gate_up.shape
    if width % 2 != 0:
        raise ValueError(f"gate_up has width {width}, required is a multiple of 2")
    check_tensor("gate_up", gate_up, (num_tokens, width), gate_up.dtype, gate_up)
    out = gate_up.new_empty((num_tokens, width // 2))
    library.silu_mul(
        dtype, num_tokens, width // 2, gate_up.data_ptr(), out.data_ptr(), gate_up.stride(0)
    )
    return out
