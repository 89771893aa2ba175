"""Runs the Triton launcher for CUDA tensors and the plain-torch twin for all others."""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Final, ParamSpec, TypeVar

from kernels import reference

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _launchers() -> ModuleType:
    # Imported on first use: Triton is not installed, and not needed, on a machine without a GPU.
    return importlib.import_module("kernels.triton_ops")


def _by_device(twin: Callable[P, R]) -> Callable[P, R]:
    """Return `twin`, except that a first argument on a GPU goes to the launcher of its name."""

    @functools.wraps(twin)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else next(iter(kwargs.values()))
        if not first.is_cuda:  # type: ignore[attr-defined]  # every op takes a tensor first
            return twin(*args, **kwargs)
        launcher: Callable[P, R] = getattr(_launchers(), twin.__name__)
        return launcher(*args, **kwargs)

    return op


add_rms_norm: Final = _by_device(reference.add_rms_norm)
copy_blocks: Final = _by_device(reference.copy_blocks)
paged_attention_decode: Final = _by_device(reference.paged_attention_decode)
paged_attention_prefill: Final = _by_device(reference.paged_attention_prefill)
rms_norm: Final = _by_device(reference.rms_norm)
rotary: Final = _by_device(reference.rotary)
silu_mul: Final = _by_device(reference.silu_mul)
store_kv: Final = _by_device(reference.store_kv)
