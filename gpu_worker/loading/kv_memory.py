"""Sizes the KV memory: how many blocks fit, and whether their number can change."""

import contextlib
from dataclasses import replace

import numpy as np
import structlog
import torch

from contract.info import Role
from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan, StepId
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.host_pool import STAGING_BYTES
from gpu_worker.kv.layout import KvDtypes
from gpu_worker.memory.available import available_bytes, device_total_bytes
from gpu_worker.memory.elastic import (
    Chunks,
    CpuChunks,
    CudaChunks,
    ElasticMemory,
    OutOfMemoryError,
    VirtualMemoryError,
    load_driver,
)
from gpu_worker.models.attention import Decoder
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.settings import WorkerSettings
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs.cuda_graphs import (
    CudaGraphs,
    GraphBackend,
    GraphsOfAll,
    LostRankError,
    PiecesError,
)
from gpu_worker.step.graphs.decode_graphs import DecodeGraphs
from gpu_worker.step.graphs.piecewise_graphs import PiecewiseGraphs
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.model_config import ModelConfig

_GIB = 1024**3
_DEFAULT_CPU_BYTES = _GIB
_CPU_SHARE = 0.5
_DEFAULT_HOST_BYTES = 4 * _GIB
_HOST_SHARE = 0.25
_MAX_BLOCKS = 2**24
"""The largest number of blocks that schedulers accept."""

_log = structlog.get_logger()


class NoRoomError(ModelError):
    """The device, or the machine, does not have enough memory."""


def blocks_in(num_bytes: float, bytes_per_block: int) -> int:
    """Return how many blocks fit in `num_bytes`.

    Raises:
        NoRoomError: Not even one block fits.
    """
    if num_bytes < bytes_per_block:
        raise NoRoomError(
            f"KV memory is {max(num_bytes, 0) / _GIB:.3f} GiB; one block takes "
            f"{bytes_per_block / _GIB:.3f} GiB"
        )
    return int(num_bytes // bytes_per_block)


def check_size(settings: WorkerSettings, bytes_per_block: int, device: torch.device) -> None:
    """Raise NoRoomError if the settings ask for more KV memory than the device has in all."""
    total = device_total_bytes(device)
    if settings.num_blocks is not None:
        asked, flag = settings.num_blocks * bytes_per_block, f"num-blocks is {settings.num_blocks}"
    elif settings.kv_cache_memory_gb is not None:
        asked = int(settings.kv_cache_memory_gb * _GIB)
        flag = f"kv-cache-memory-gb is {settings.kv_cache_memory_gb:g}"
    else:
        return
    if asked > total:
        raise NoRoomError(
            f"{flag}, {asked / _GIB:.1f} GiB of KV memory; {device} has {total / _GIB:.1f} GiB"
            " in all"
        )


def free_cpu_kv_bytes() -> int:
    """Return the default KV memory on a CPU: 1 GiB, or half of the free memory if that is less."""
    return min(_DEFAULT_CPU_BYTES, int(available_bytes() * _CPU_SHARE))


def free_host_kv_bytes(device: torch.device, role: Role = Role.BOTH) -> int:
    """Return the default host memory for KV, in bytes.

    With a GPU it is only 4 GiB, or a quarter of the free memory if that is less, because the memory
    is pinned, so no other process can use it. On a CPU it is 0, because the device pool is in the
    same memory. But a worker that only prefills or only decodes gets as much on a CPU as with a
    GPU, because sequences move from worker to worker through host memory.
    """
    if device.type != "cuda" and role is Role.BOTH:
        return 0
    return min(_DEFAULT_HOST_BYTES, int(available_bytes() * _HOST_SHARE))


def free_gpu_kv_bytes(
    model: Decoder,
    config: ModelConfig,
    limits: Limits,
    dtypes: KvDtypes,
    device: torch.device,
    utilization: float,
    ranks: Ranks | None = None,
    *,
    num_graph_sets: int,
) -> int:
    """Return the bytes for KV on a GPU: a share of its memory, less what the largest step needs.

    The share is `utilization`. The function runs the largest step, with all `ranks` if the model is
    on several devices. It ignores `limits.num_blocks`. The result also leaves room for
    `num_graph_sets` sets of CUDA graphs, which hold memory that steps without graphs cannot use:
    see `graph_bytes`.
    """
    profiled = _run_largest_step(model, config, limits, dtypes, device, ranks)
    if num_graph_sets:
        profiled += graph_bytes(
            model, config, limits, dtypes, device, ranks, num_sets=num_graph_sets
        )
    free, total = torch.cuda.mem_get_info(device)
    # Memory that is neither free nor torch's belongs to the driver, libraries and other processes.
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - others - profiled - STAGING_BYTES


def _run_largest_step(
    model: Decoder,
    config: ModelConfig,
    limits: Limits,
    dtypes: KvDtypes,
    device: torch.device,
    ranks: Ranks | None,
) -> int:
    """Run the largest step; return the most bytes that torch reserved, including the weights."""
    step = largest_step(limits)
    num_blocks = sum(len(new.block_ids) for new in step.new_sequences)
    limits = replace(limits, num_blocks=num_blocks)
    torch.cuda.empty_cache()  # memory that loading the weights has freed
    torch.cuda.reset_peak_memory_stats(device)
    pool = KvPool(config, num_blocks, limits.block_size, dtypes, device)
    Executor(model, pool, limits, (), device, ranks=ranks).step(step)
    peak = torch.cuda.max_memory_reserved(device)
    del pool
    torch.cuda.empty_cache()
    return peak


def graph_bytes(
    model: Decoder,
    config: ModelConfig,
    limits: Limits,
    dtypes: KvDtypes,
    device: torch.device,
    ranks: Ranks | None = None,
    *,
    num_sets: int = 1,
) -> int:
    """Return the bytes that `num_sets` sets of CUDA graphs hold; a set has a graph of each size.

    All `ranks` call this together.

    All graphs share one pool of torch's memory, so together they need only as much as the largest
    of them. The driver keeps memory for each graph in proportion to its number of kernels. This
    number is about the same for all sizes, so the driver's memory is measured with one size.
    """
    pool = KvPool(config, 1, limits.block_size, dtypes, device)
    last_token_ids = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    decodes = DecodeGraphs(model, pool, limits, last_token_ids)
    pieces = PiecewiseGraphs(model.forward, pool, limits, last_token_ids)
    # A model that cannot be captured in pieces may raise anything, here as in a capture. But if a
    # rank continued after an error that only it has, the others would wait for it forever.
    tolerated = Exception if ranks is None else PiecesError
    with torch.inference_mode():
        decodes.rehearse()
        with contextlib.suppress(tolerated):
            pieces.rehearse()
        peak = torch.cuda.max_memory_allocated(device)
        of_driver = _driver_bytes(pieces, device, ranks)
    num_graphs = num_sets * (len(decodes.sizes) + len(pieces.sizes))
    del pool, pieces
    torch.cuda.empty_cache()
    return peak - before + of_driver * num_graphs


def _driver_bytes(pieces: PiecewiseGraphs, device: torch.device, ranks: Ranks | None) -> int:
    """Return the bytes that the driver keeps for graphs of one size; 0 if capturing them fails."""
    backend: GraphBackend = CudaGraphs(device)
    if ranks is not None:
        backend = GraphsOfAll(backend, ranks)
    used = []
    for size in pieces.sizes[:2]:  # the first capture includes one-time costs
        try:
            pieces.capture_size(size, backend)
        except LostRankError:
            raise
        except Exception:  # noqa: BLE001 - as above; the real captures report it
            return 0
        free, total = torch.cuda.mem_get_info(device)
        used.append(total - free - torch.cuda.memory_reserved(device))
    return max(0, used[-1] - used[0])


def largest_step(limits: Limits) -> Plan:
    """Return the largest step: as many tokens and rows as possible, and each row samples.

    The rows use the sampling parameters that take most memory. Blocks are numbered from 0.
    """
    num_rows = limits.max_num_seqs
    # Leaves room for the sampled token.
    length = min(limits.max_num_batched_tokens // num_rows, limits.max_model_len - 1)
    blocks = np.arange(num_rows * -(-length // limits.block_size), dtype=np.int32)
    sampling = SamplingParams(seed=0, top_p=0.5, repetition_penalty=1.1, logprobs=1)
    return Plan(
        step_id=StepId(1),
        num_decodes=0,
        new_sequences=tuple(
            NewSequence(
                seq_id=row,
                row=row,
                token_ids=np.zeros(length, np.int32),
                num_prompt_tokens=length,
                num_computed_tokens=0,
                block_ids=block_ids,
                sampling=sampling,
                max_total_tokens=length + 1,
            )
            for row, block_ids in enumerate(blocks.reshape(num_rows, -1))
        ),
        chunk_rows=np.arange(num_rows, dtype=np.int32),
        chunk_lens=np.full(num_rows, length, np.int32),
    )


def open_pool_memory(
    settings: WorkerSettings, num_blocks: int, block_bytes: int, device: torch.device
) -> ElasticMemory | None:
    """Map resizable memory of `num_blocks` blocks; None if the pool's size is fixed.

    The size is fixed if max-kv-memory-gb is 0, if the model is on several devices, or if there is a
    draft model. If max-kv-memory-gb is unset, the size is fixed in two more cases:

    - on a GPU, because the calls of CUDA's driver have not run on a GPU yet;
    - on a CPU, with a warning, if the system refuses to reserve the addresses.

    Raises:
        ModelError: max-kv-memory-gb is less than the initial size, or the system refuses to
            reserve as much as max-kv-memory-gb says.
    """
    max_gb = settings.max_kv_memory_gb
    if max_gb == 0 or settings.num_ranks > 1 or settings.draft_model is not None:
        return None
    if max_gb is None and device.type == "cuda":
        return None
    num_bytes = num_blocks * block_bytes
    if max_gb is None:
        max_bytes = max(num_bytes, device_total_bytes(device))
    elif (max_bytes := int(max_gb * _GIB)) < num_bytes:
        raise ModelError(
            f"max-kv-memory-gb is {max_gb}; the KV memory starts with {num_bytes / _GIB:.3f} GiB"
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
        raise NoRoomError(f"KV memory is {num_bytes / _GIB:.3f} GiB: {error}") from error
    except VirtualMemoryError as error:
        raise ModelError(f"max-kv-memory-gb is {max_gb}: {error}") from error


def _reserve(device: torch.device, max_bytes: int) -> Chunks:
    if device.type == "cuda":
        return CudaChunks(load_driver(), device, max_bytes)
    return CpuChunks(max_bytes, available_bytes)
