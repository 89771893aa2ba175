"""The activations of feed-forward parts, by their names in config.json.

Each number's result depends on this number alone, not on other numbers or on its position in
the tensor. On CPUs, torch breaks this rule in the last bits of SiLU, of tanh GELU, and of GELU in
float16. So this module computes these three from other operations of torch.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch.nn import functional

from kernels.reference.activation import tanh_gelu

Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps each element of a tensor; the result has the tensor's shape and dtype."""


def _gelu(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        return functional.gelu(x)
    return functional.gelu(x.float()).to(x.dtype)


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        return functional.gelu(x, approximate="tanh")
    return tanh_gelu(x).to(x.dtype)


def _silu(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        return functional.silu(x)
    wide = x.float()
    return (wide / (1 + (-wide).exp())).to(x.dtype)


ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": _gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": _silu,
}
"""Each family's config reader accepts only some of these."""
