"""Begins captures of CUDA graphs, and restores torch's state if a capture fails.

`torch.cuda.graph` does not restore torch's state: if a capture cannot be ended, its stream stays
current, and up to torch 2.13 the allocator behaves as if the capture were still running.
"""

import contextlib
from typing import Any

import torch


def begin_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Begin to capture the current stream. During the capture, other threads may call CUDA."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")


def abandon_capture(graph: torch.cuda.CUDAGraph, pool: Any, device_index: int) -> None:
    """Restore torch's state after a failed capture, wherever the capture failed."""
    with contextlib.suppress(RuntimeError):  # there is no capture to end, or it has failed
        graph.capture_end()
    with contextlib.suppress(RuntimeError):  # the allocator has already ended its part
        torch._C._cuda_endAllocateToPool(device_index, pool)  # noqa: SLF001
