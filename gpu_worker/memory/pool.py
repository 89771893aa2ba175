"""Decides whether a KV pool can be resized, and up to where; makes the memory for it."""

import structlog
import torch

from gpu_worker.memory import sizing as memory
from gpu_worker.memory.cpu_chunks import CpuChunks
from gpu_worker.memory.cuda_chunks import CudaChunks, VirtualMemoryError, load_driver
from gpu_worker.memory.elastic import Chunks, ElasticMemory, OutOfMemoryError
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError

_GIB = 1024**3
_MAX_BLOCKS = 2**24
"""More no scheduler takes."""

_log = structlog.get_logger()


def open_pool_memory(
    settings: WorkerSettings, num_blocks: int, block_bytes: int, device: torch.device
) -> ElasticMemory | None:
    """Map `num_blocks` blocks of memory that can be resized; None: its size is to be fixed.

    On a GPU it is, unless the operator asks for more: the driver's calls have not been proved on
    hardware. On a CPU it is where the system counts addresses as memory, and a warning says so.

    Raises:
        ModelError: The operator has, and it cannot be; or it is less than what there is at first.
    """
    max_gb = settings.max_kv_memory_gb
    if max_gb == 0 or settings.num_ranks > 1 or settings.draft_model is not None:
        return None
    if max_gb is None and device.type == "cuda":
        return None
    num_bytes = num_blocks * block_bytes
    if max_gb is None:
        max_bytes = max(num_bytes, memory.device_total_bytes(device))
    elif (max_bytes := int(max_gb * _GIB)) < num_bytes:
        raise ModelError(
            f"max-kv-memory-gb is {max_gb}; the KV memory has {num_bytes / _GIB:.3f} GiB at first"
        )
    max_bytes = min(max_bytes, max(num_blocks, _MAX_BLOCKS) * block_bytes)
    try:
        chunks = _reserve(device, max_bytes)
    except (OutOfMemoryError, VirtualMemoryError) as error:
        if max_gb is not None:
            raise ModelError(f"max-kv-memory-gb is {max_gb}: {error}") from error
        _log.warning("the KV pool cannot be resized", reason=str(error))
        return None
    try:
        return ElasticMemory(chunks, num_bytes)
    except OutOfMemoryError as error:
        raise memory.NoRoomError(f"KV memory is {num_bytes / _GIB:.3f} GiB: {error}") from error
    except VirtualMemoryError as error:
        raise ModelError(f"max-kv-memory-gb is {max_gb}: {error}") from error


def _reserve(device: torch.device, max_bytes: int) -> Chunks:
    if device.type == "cuda":
        return CudaChunks(load_driver(), device, max_bytes)
    return CpuChunks(max_bytes, memory.available_bytes)
