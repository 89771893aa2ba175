"""Brings a step's host arrays to the device in one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGN_BYTES = 16


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Tensors on `device` with the contents of `arrays`, dtype and shape included.

    On CUDA the arrays travel together through pinned memory and the caller does not wait; torch
    keeps that memory until the copy is done. On CPU the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    return _upload_together(arrays, device, pin=True)


def _upload_together(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device, *, pin: bool
) -> list[torch.Tensor]:
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES)
    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
    host = pinned.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    on_device = pinned.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def _torch_dtype(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
