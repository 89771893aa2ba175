"""The activations of feed-forward parts, by their names in config.json."""

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

import torch
from torch.nn import functional

Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps each element of a tensor; keeps its shape and dtype."""

_TANH_GELU: Final = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": functional.gelu,
    "gelu_fast": _TANH_GELU,
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "relu": functional.relu,
    "silu": functional.silu,
}
"""Each family's config reader accepts only some of these."""
