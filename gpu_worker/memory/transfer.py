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


def upload_into(buffer: torch.Tensor, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """As `upload`, into the beginning of `buffer`, uint8[*] on a device: views of it.

    Where an array goes follows from the shapes and dtypes of it and those before it.
    """
    packed, starts = _pack(arrays, pin=buffer.is_cuda)
    on_device = buffer[: len(packed)]
    on_device.copy_(packed, non_blocking=True)
    return _views(on_device, arrays, starts)


def packed_bytes(arrays: Sequence[npt.NDArray[Any]]) -> int:
    """How much of a buffer `upload_into` takes."""
    return _starts(arrays)[-1]


def _upload_together(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device, *, pin: bool
) -> list[torch.Tensor]:
    packed, starts = _pack(arrays, pin=pin)
    return _views(packed.to(device, non_blocking=True), arrays, starts)


def _pack(arrays: Sequence[npt.NDArray[Any]], *, pin: bool) -> tuple[torch.Tensor, Sequence[int]]:
    starts = _starts(arrays)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
    host = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed, starts


def _starts(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Where each begins, and the end of all."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES)
    return starts


def _views(
    on_device: torch.Tensor, arrays: Sequence[npt.NDArray[Any]], starts: Sequence[int]
) -> list[torch.Tensor]:
    return [
        on_device[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def _torch_dtype(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to memory whose content is there when the stream has come so far."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
