"""The table of ops: which code runs each op on a GPU, on a CPU, and elsewhere.

Every op has a twin in `kernels.reference`, in plain torch, which defines the op's result. On a GPU
an op runs its launcher, the function that launches a Triton kernel. For example, the launcher of
`kernels.reference.norm.rms_norm` is `kernels.triton.norm.rms_norm`. On a CPU the op runs in C, if
the table names a function of `kernels.cpu.ops`, the library is compiled, and C supports the dtype
of the first tensor. In all other cases the op runs the twin.

An op is a plain function, not an op of `torch.library`, because calling the latter takes longer
(docs/write-a-kernel.md).
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import torch

from kernels import reference
from kernels.cpu import ops as cpu
from kernels.cpu.library import DTYPES, Library, native
from kernels.sequences import Sequences

P = ParamSpec("P")
R = TypeVar("R")


class AttentionBackend(Protocol):
    """What prepares attention: this module, or an object of a class such as `FlashAttention`."""

    def prepare_decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        **options: Any,
    ) -> Callable[[Sequences], object]:
        """See `prepare_decode` below."""

    def prepare_prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        **options: Any,
    ) -> Callable[[Sequences], object]:
        """See `prepare_prefill` below."""


def _op(
    twin: Callable[P, R], in_c: Callable[Concatenate[Library, P], R] | None = None
) -> Callable[P, R]:
    """Return an op that runs the launcher, `in_c` or `twin`, as the module's docstring says."""

    @functools.wraps(twin)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0] if args else next(iter(kwargs.values()))  # a tensor in every op
        if first.is_cuda:
            return launcher(twin)(*args, **kwargs)
        if in_c is not None and first.is_cpu and first.dtype in DTYPES:
            library = native()
            if library is not None:
                return in_c(library, *args, **kwargs)
        return twin(*args, **kwargs)

    return op


def launcher(twin: Callable[P, R]) -> Callable[P, R]:
    """Return the Triton launcher of a twin; the first call imports Triton."""
    found: Callable[P, R] = getattr(_triton_module(twin.__module__), twin.__name__)
    return found


@functools.cache
def _triton_module(of_twin: str) -> ModuleType:
    # This import waits for the first use, because a machine without a GPU needs no Triton.
    return importlib.import_module(of_twin.replace("kernels.reference", "kernels.triton"))


def prepare_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    **options: Any,
) -> Callable[[Sequences], object]:
    """Return a function that runs `paged_attention_decode` with these tensors for any `Sequences`.

    `options` are the keyword arguments of `paged_attention_decode`, including `out`. On a GPU, the
    arguments are checked and prepared only once, in this call.
    """
    if query.is_cuda:
        module = _triton_module(reference.paged_attention_decode.__module__)
        prepared: Callable[[Sequences], object] = module.prepare_decode(
            query, key_cache, value_cache, scale, **options
        )
        return prepared
    return lambda sequences: paged_attention_decode(
        query,
        key_cache,
        value_cache,
        sequences.block_tables,
        sequences.seq_lens,
        scale,
        **options,
    )


def prepare_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    *,
    is_whole: bool = False,
    **options: Any,
) -> Callable[[Sequences], object]:
    """Return a function that runs `paged_attention_prefill` with these tensors for any `Sequences`.

    If `is_whole`, a GPU never splits a sequence's positions. Then no bit of a token's result
    depends on the other sequences of the step, as is always the case on a CPU.
    """
    if query.is_cuda:
        module = _triton_module(reference.paged_attention_prefill.__module__)
        prepared: Callable[[Sequences], object] = module.prepare_prefill(
            query, key_cache, value_cache, scale, is_whole=is_whole, **options
        )
        return prepared

    def attend(sequences: Sequences) -> None:
        assert sequences.query_start_loc is not None, "chunks have several tokens"
        paged_attention_prefill(
            query,
            key_cache,
            value_cache,
            sequences.block_tables,
            sequences.seq_lens,
            sequences.query_start_loc,
            sequences.max_query_len,
            scale,
            **options,
        )

    return attend


add_rms_norm: Final = _op(reference.add_rms_norm, cpu.add_rms_norm)
clamped_swiglu: Final = _op(reference.clamped_swiglu, cpu.clamped_swiglu)
copy_blocks: Final = _op(reference.copy_blocks)
gather_blocks: Final = _op(reference.gather_blocks)
greedy: Final = _op(reference.greedy)
grouped_linear: Final = _op(reference.grouped_linear)
grouped_quantized_linear: Final = _op(reference.grouped_quantized_linear)
linear: Final = _op(reference.linear)
paged_attention_decode: Final = _op(reference.paged_attention_decode, cpu.paged_attention_decode)
paged_attention_prefill: Final = _op(reference.paged_attention_prefill, cpu.paged_attention_prefill)
quantized_linear: Final = _op(reference.quantized_linear)
rms_norm: Final = _op(reference.rms_norm, cpu.rms_norm)
rotary: Final = _op(reference.rotary, cpu.rotary)
rotary_store_kv: Final = _op(reference.rotary_store_kv, cpu.rotary_store_kv)
sample: Final = _op(reference.sample)
scatter_blocks: Final = _op(reference.scatter_blocks)
silu_mul: Final = _op(reference.silu_mul, cpu.silu_mul)
store_kv: Final = _op(reference.store_kv, cpu.store_kv)
suppress: Final = _op(reference.suppress, cpu.suppress)
tanh_gelu_mul: Final = _op(reference.tanh_gelu_mul, cpu.tanh_gelu_mul)
