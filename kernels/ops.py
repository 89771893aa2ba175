"""Runs the Triton launcher on a GPU, native code on a CPU, and the plain-torch twin elsewhere."""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Final, ParamSpec, TypeVar

from kernels import reference
from kernels.cpu import native_ops as native

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _launchers() -> ModuleType:
    # Imported on first use: Triton is not installed, and not needed, on a machine without a GPU.
    return importlib.import_module("kernels.triton.ops")


def _by_device(twin: Callable[P, R]) -> Callable[P, R]:
    """Return `twin`, except for a first argument on a GPU or a CPU: what has its name there."""
    on_cpu: Callable[P, R] = getattr(native, twin.__name__)

    @functools.wraps(twin)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else next(iter(kwargs.values()))
        if first.is_cpu:  # type: ignore[attr-defined]  # every op takes a tensor first
            return on_cpu(*args, **kwargs)
        if not first.is_cuda:  # type: ignore[attr-defined]
            return twin(*args, **kwargs)
        launcher: Callable[P, R] = getattr(_launchers(), twin.__name__)
        return launcher(*args, **kwargs)

    return op


add_rms_norm: Final = _by_device(reference.add_rms_norm)
copy_blocks: Final = _by_device(reference.copy_blocks)
gather_blocks: Final = _by_device(reference.gather_blocks)
paged_attention_decode: Final = _by_device(reference.paged_attention_decode)
paged_attention_prefill: Final = _by_device(reference.paged_attention_prefill)
rms_norm: Final = _by_device(reference.rms_norm)
rotary: Final = _by_device(reference.rotary)
rotary_store_kv: Final = _by_device(reference.rotary_store_kv)
sample: Final = _by_device(reference.sample)
scatter_blocks: Final = _by_device(reference.scatter_blocks)
silu_mul: Final = _by_device(reference.silu_mul)
store_kv: Final = _by_device(reference.store_kv)
suppress: Final = _by_device(reference.suppress)
