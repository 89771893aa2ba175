"""Copies arrays from the host to a device in one transfer, and tensors from a device back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGN_BYTES = 16


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy `arrays` to `device`, as tensors of the same contents, dtypes and shapes.

    On CUDA the arrays travel together through pinned memory, and the caller does not wait: torch
    keeps the pinned memory until the copy is done. On a CPU the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    packed, starts = _pack(arrays, pin=True)
    return _views(packed.to(device, non_blocking=True), arrays, starts)


def upload_into(buffer: torch.Tensor, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """Copy `arrays` to the beginning of `buffer`, uint8[*] on a device; return views of `buffer`.

    An array's address in `buffer` depends only on the sizes of the arrays before it.
    """
    packed, starts = _pack(arrays, pin=buffer.is_cuda)
    on_device = buffer[: len(packed)]
    on_device.copy_(packed, non_blocking=True)
    return _views(on_device, arrays, starts)


def packed_bytes(arrays: Sequence[npt.NDArray[Any]]) -> int:
    """Return how many bytes of a buffer `upload_into` fills."""
    return _starts(arrays)[-1]


def _pack(arrays: Sequence[npt.NDArray[Any]], *, pin: bool) -> tuple[torch.Tensor, Sequence[int]]:
    starts = _starts(arrays)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
    host = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed, starts


def _starts(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Return the byte offsets of the arrays, then the total size."""
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


class Download:
    """Copies tensors to the host without waiting for the device."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        """Enqueue the copies after all work that the device already has to do."""
        self._tensors = [_to_host(tensor) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[npt.NDArray[Any]]:
        """Wait for the tensors' values and return them; any thread may call this."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()  # because the next step may overwrite `tensor`
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
