"""Loads the model and builds what executes its steps: the worker's parts that need torch."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog
import torch

from gpu_worker import memory, metrics, rates
from gpu_worker.device import device_name, pick_device, pick_dtype, set_num_threads
from gpu_worker.executor import Decoder, Executor
from gpu_worker.json_fields import ModelError
from gpu_worker.kv_layout import KvDtypes, block_bytes, kv_dtypes
from gpu_worker.kv_pool import KvPool
from gpu_worker.lower_tiers import open_lower_tiers
from gpu_worker.model_config import ModelConfig
from gpu_worker.model_source import open_model
from gpu_worker.models.quantized_linear import Quantization
from gpu_worker.settings import WorkerSettings
from gpu_worker.step import Limits
from gpu_worker.step_loop import StepLoop
from gpu_worker.structured_output import StructuredOutput
from gpu_worker.worker_info import WorkerInfo

_GIB = 1024**3

_log = structlog.get_logger()


def load(
    settings: WorkerSettings,
    report: Callable[[str, float | None], None],
    event_loop: asyncio.AbstractEventLoop,
) -> tuple[WorkerInfo, StepLoop]:
    """Load what `settings` name; takes seconds, and calls `report` with what it does and how far.

    What `report` raises ends it.

    Raises:
        ModelError: the model cannot be served as the settings ask, or not one KV block fits.
    """
    device = pick_device(settings.device)
    num_threads = set_num_threads(settings.num_threads)
    quantization = Quantization(settings.quantization) if settings.quantization else None
    source = open_model(settings.model, settings.model_class, quantization)
    config = source.config
    dtype = pick_dtype(settings.dtype, config, device)
    report("loading weights", 0.0)
    model = source.load(dtype, device, lambda done: report("loading weights", done))
    report("making room for KV", None)
    dtypes = _kv_dtypes(settings, config, dtype)
    bytes_per_block = block_bytes(config, settings.block_size, dtypes)
    limits = _limits(settings, config, device)
    num_blocks = _num_blocks(settings, model, config, limits, dtypes, device)
    pool = KvPool(config, num_blocks, settings.block_size, dtypes, device)
    metrics.KV_BYTES.set(num_blocks * bytes_per_block)
    eos_token_ids = tuple(token for token in config.eos_token_ids if token < config.vocab_size)
    tiers = open_lower_tiers(settings, pool, config)
    limits = replace(
        limits,
        num_blocks=num_blocks,
        num_host_blocks=tiers.num_host_blocks,
        num_disk_blocks=tiers.num_disk_blocks,
    )
    structured = _structured_output(settings.model, limits.vocab_size, eos_token_ids, device)
    executor = Executor(
        model,
        pool,
        limits,
        eos_token_ids,
        device,
        host_pool=tiers.host_pool,
        disk_pool=tiers.disk_pool,
        structured=structured,
    )
    swap_bytes_per_s = prefill_tokens_per_s = disk_bytes_per_s = 0.0
    if tiers.host_pool is not None:
        report("measuring", None)
        swap_bytes_per_s = rates.swap_bytes_per_s(tiers.host_pool, pool)
        prefill_tokens_per_s = rates.prefill_tokens_per_s(executor, limits)
        if tiers.disk_pool is not None:
            try:
                disk_bytes_per_s = rates.disk_bytes_per_s(tiers.disk_pool, tiers.host_pool, pool)
            except OSError as error:
                raise ModelError(f"disk-kv-dir is {settings.disk_kv_dir}: {error}") from error
    info = WorkerInfo(
        worker_id=settings.worker_id,
        device=device_name(device),
        model_id=settings.model_id,
        limits=limits,
        eos_token_ids=eos_token_ids,
        block_bytes=bytes_per_block,
        swap_bytes_per_s=swap_bytes_per_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
        structured_output=structured is not None,
        disk_bytes_per_s=disk_bytes_per_s,
        dtype=str(dtype).removeprefix("torch."),
        host_block_bytes=tiers.host_pool.blocks.shape[1] if tiers.host_pool is not None else 0,
        kv_dtype=settings.kv_dtype,
        host_codec=str(settings.host_codec),
    )
    _log.info(
        "loaded",
        model=info.model_id,
        device=info.device,
        dtype=info.dtype,
        quantization=settings.quantization,
        kv_dtype=info.kv_dtype,
        num_threads=num_threads,
        max_model_len=limits.max_model_len,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * limits.block_size,
        kv_gib=round(num_blocks * bytes_per_block / _GIB, 3),
        num_host_blocks=tiers.num_host_blocks,
        num_disk_blocks=tiers.num_disk_blocks,
        swap_gb_per_s=round(swap_bytes_per_s / 1e9, 3),
        disk_gb_per_s=round(disk_bytes_per_s / 1e9, 3),
        prefill_tokens_per_s=round(prefill_tokens_per_s),
    )
    if num_blocks < limits.max_blocks_per_row:
        _log.warning(
            "a sequence of max_model_len does not fit the KV memory",
            max_model_len=limits.max_model_len,
            kv_tokens=num_blocks * limits.block_size,
        )
    return info, StepLoop(executor, event_loop)


def _structured_output(
    directory: Path, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
) -> StructuredOutput | None:
    """None, and a warning that says why, if the model cannot be made to keep to a grammar."""
    if not eos_token_ids:
        _log.warning("no structured output: the model has no end-of-sequence token")
        return None
    try:
        return StructuredOutput(directory / "tokenizer.json", vocab_size, eos_token_ids, device)
    except (OSError, ValueError) as error:
        _log.warning("no structured output: tokenizer.json cannot be used", error=str(error))
        return None


def _kv_dtypes(settings: WorkerSettings, config: ModelConfig, dtype: torch.dtype) -> KvDtypes:
    skip_layers = settings.kv_skip_layers
    if skip_layers and max(skip_layers) >= config.num_layers:
        raise ModelError(
            f"kv-cache-dtype-skip-layers is {settings.kv_cache_dtype_skip_layers}; the layers of "
            f"{settings.model_id} are 0 to {config.num_layers - 1}"
        )
    return kv_dtypes(settings.kv_cache_dtype, skip_layers, dtype, config.num_layers)


def _limits(settings: WorkerSettings, config: ModelConfig, device: torch.device) -> Limits:
    """The limits but for `num_blocks`, which is what they leave room for.

    A CPU is busy with the weights of a 125M model up to some 64 rows; more would only slow each
    other down. Its 512 tokens, and a GPU's 2048, keep the decodes beside a chunk waiting for tenths
    of a second at most, and are enough to be bound by arithmetic.
    """
    is_gpu = device.type == "cuda"
    max_model_len = settings.max_model_len or config.max_model_len
    if max_model_len > config.max_model_len:
        raise ModelError(
            f"max-model-len is {max_model_len}; {settings.model_id} takes at most "
            f"{config.max_model_len}"
        )
    default_tokens = 2048 if is_gpu else 512
    # The one that is set bounds the default of the other.
    max_num_seqs = settings.max_num_seqs or min(
        256 if is_gpu else 64, settings.max_num_batched_tokens or default_tokens
    )
    return Limits(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=(
            settings.max_num_batched_tokens or max(default_tokens, max_num_seqs)
        ),
        num_blocks=0,
        block_size=settings.block_size,
        vocab_size=config.vocab_size,
    )


def _num_blocks(
    settings: WorkerSettings,
    model: Decoder,
    config: ModelConfig,
    limits: Limits,
    dtypes: KvDtypes,
    device: torch.device,
) -> int:
    if settings.num_blocks is not None:
        return settings.num_blocks
    if settings.kv_cache_memory_gb is not None:
        num_bytes = int(settings.kv_cache_memory_gb * _GIB)
    elif device.type == "cuda":
        num_bytes = memory.free_gpu_kv_bytes(
            model, config, limits, dtypes, device, settings.gpu_memory_utilization
        )
    else:
        num_bytes = memory.free_cpu_kv_bytes()
    return memory.blocks_in(num_bytes, block_bytes(config, settings.block_size, dtypes))
