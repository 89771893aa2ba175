"""The paged caches of a layer, and what C is told of one.

Symbols: `HKV` kv heads, `D` head dim, `B` blocks, `P` block size.
"""

from dataclasses import dataclass

import torch

from kernels.cpu.library import KV_FORMATS


@dataclass(frozen=True, slots=True, eq=False)
class LayerCaches:
    """The keys and values of one layer; scales as `kernels.kv_formats` says."""

    keys: torch.Tensor
    """[B, P, HKV, D]: int8 or float8_e4m3fn if there are scales, else of the model's dtype."""
    values: torch.Tensor
    """As `keys`."""
    key_scales: torch.Tensor | None = None
    """bfloat16[B, P, HKV]; None: not quantized."""
    value_scales: torch.Tensor | None = None
    """As `key_scales`."""


def kv_format(cache: torch.Tensor, scales: torch.Tensor | None) -> int:
    """What C calls the format of a cache."""
    return 0 if scales is None else KV_FORMATS[cache.dtype]


def address(tensor: torch.Tensor | None) -> int:
    """Of a tensor's memory; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def scale_strides(scales: torch.Tensor | None) -> tuple[int, ...]:
    """Over B, P and HKV; zeros if there are none."""
    return (0, 0, 0) if scales is None else scales.stride()
