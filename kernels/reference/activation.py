"""SiLU-gated product in plain torch.

Symbols: `T` tokens, `I` intermediate size.
"""

import torch
from torch.nn.functional import silu


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` [T, I] for `gate_up` [T, 2 * I], with gate in the first half.

    SiLU is rounded to the dtype before the product, as in a model with a module for each.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)
