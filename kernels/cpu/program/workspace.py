"""Memory for the intermediate results of the layers of `NativeDecoder`.

A layer is a sequence of calls of kernels. In a workspace each of these calls has a separate tensor
for its result, and the layers use a few workspaces in turn. So a result is overwritten only several
calls later, when no thread that has fallen behind still needs it (`kernels.cpu.library.Program`).

Symbols: `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim, `E` hidden size,
`I` intermediate size, `N` outputs of a linear map, `R` ranks of adapters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from kernels.cpu.program.low_rank import MAPS

_LINE: Final = 32
"""bfloat16 elements per cache line."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeShape:
    """The sizes that all layers of a decoder share."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    has_qk_norm: bool
    """Whether each head of queries and keys is normalised."""
    is_gated: bool
    """Whether the kernel of the map `gate_up` also computes `silu(gate) * up`. If the map has
    adapters, the kernel of the adapters computes this product instead."""
    num_ranks: int = 0
    """The largest rank R of adapters; 0: there are no adapters."""


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedWork:
    """The intermediate results of a map with adapters, in bfloat16."""

    alone: torch.Tensor
    """[T, N], the results of the model's map without adapters."""
    ranks: torch.Tensor
    """[T, R], the results of the adapters' maps A; the rows are sorted by adapter."""


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Memory for the results of one layer: a bfloat16 tensor for each kernel call, in order."""

    residual: torch.Tensor  # [T, E]: the sum of all layers before; unused in the first layer
    normed: torch.Tensor  # [T, E]
    qkv: torch.Tensor  # [T, H + 2 * HKV, D]
    normed_query: torch.Tensor  # [T, H, D], or empty without norms
    normed_key: torch.Tensor  # [T, HKV, D], or empty without norms
    query: torch.Tensor  # [T, H, D], rotated
    key: torch.Tensor  # [T, HKV, D], rotated
    attended: torch.Tensor  # [T, H * D]
    attention_output: torch.Tensor  # [T, E]
    mlp_residual: torch.Tensor  # [T, E]: `residual` plus `attention_output`
    mlp_normed: torch.Tensor  # [T, E]
    gate_up: torch.Tensor  # [T, 2 * I], or empty if the map gives the product itself
    gated: torch.Tensor  # [T, I]
    output: torch.Tensor  # [T, E]: of the feed-forward part
    adapted: Mapping[str, AdaptedWork]
    """The results of maps with adapters, by the names in `MAPS`; empty if there are no adapters."""

    @staticmethod
    def num_elements(shape: NativeShape, num_tokens: int) -> int:
        """Return how many bfloat16 elements a workspace for `num_tokens` tokens needs."""
        sizes = (_rounded_up(num_tokens * math.prod(size)) for size in _sizes(shape).values())
        return sum(sizes)

    @classmethod
    def of(cls, shape: NativeShape, num_tokens: int, memory: torch.Tensor) -> "Workspace":
        """Lay out a workspace in `memory`, bfloat16[`num_elements(shape, num_tokens)`] or more."""
        parts, at = {}, 0
        for name, size in _sizes(shape).items():
            length = num_tokens * math.prod(size)
            parts[name] = memory[at : at + length].view(num_tokens, *size)
            at += _rounded_up(length)
        parts["gated"] = parts["gated"][:, : shape.intermediate_size]
        adapted = {
            name: AdaptedWork(parts.pop(f"{name}.alone"), parts.pop(f"{name}.ranks"))
            for name in (MAPS if shape.num_ranks else ())
        }
        return cls(**parts, adapted=adapted)


def _sizes(shape: NativeShape) -> dict[str, tuple[int, ...]]:
    """Return the shape that each part of a workspace has for one token."""
    hidden, size, dim = (shape.hidden_size,), shape.head_dim, shape.intermediate_size
    query, key = (shape.num_heads, size), (shape.num_kv_heads, size)
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    adapted: dict[str, tuple[int, ...]] = {}
    if shape.num_ranks:
        nums_out = num_heads * size, shape.hidden_size, 2 * dim, shape.hidden_size
        adapted = {f"{name}.alone": (n,) for name, n in zip(MAPS, nums_out, strict=True)}
        adapted |= {f"{name}.ranks": (shape.num_ranks,) for name in MAPS}
    return adapted | {
        "residual": hidden,
        "normed": hidden,
        "qkv": (num_heads, size),
        "normed_query": query if shape.has_qk_norm else (0, 1),
        "normed_key": key if shape.has_qk_norm else (0, 1),
        "query": query,
        "key": key,
        "attended": (shape.num_heads * size,),
        "attention_output": hidden,
        "mlp_residual": hidden,
        "mlp_normed": hidden,
        "gate_up": (0 if shape.is_gated else 2 * dim,),
        # Each row has an odd number of cache lines, so that rows fall into different sets of the
        # cache.
        "gated": (dim + _LINE * (dim // _LINE % 2 == 0) if shape.is_gated else dim,),
        "output": hidden,
    }


def _rounded_up(num_elements: int) -> int:
    return -(-num_elements // _LINE) * _LINE
