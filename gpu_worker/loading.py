"""Loads the model and builds what executes its steps: the worker's parts that need torch."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from gpu_worker import memory, metrics, rates
from gpu_worker.device import device_name, pick_device, pick_dtype, set_num_threads
from gpu_worker.executor import Decoder, Executor
from gpu_worker.json_fields import ModelError
from gpu_worker.kv_layout import KvDtypes, block_bytes, kv_dtypes
from gpu_worker.kv_pool import KvPool
from gpu_worker.lower_tiers import LowerTiers, open_lower_tiers
from gpu_worker.model_config import ModelConfig
from gpu_worker.model_source import open_model
from gpu_worker.models.quantized_linear import Quantization
from gpu_worker.parallel.group import Member
from gpu_worker.parallel.leader import Leader
from gpu_worker.parallel.leading_executor import LeadingExecutor
from gpu_worker.parallel.place import Place
from gpu_worker.parallel.ranks import Ranks, find_store, open_store
from gpu_worker.settings import WorkerSettings
from gpu_worker.step import Limits
from gpu_worker.step_loop import StepLoop
from gpu_worker.structured_output import StructuredOutput
from gpu_worker.worker_info import WorkerInfo

_GIB = 1024**3

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Rates:
    """As `WorkerInfo` has them; 0: not measured."""

    swap_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """A process's part of the model, and all that executes its steps; numbers are of all parts."""

    executor: Executor
    limits: Limits
    eos_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    num_threads: int
    block_bytes: int
    tiers: LowerTiers
    rates: _Rates
    has_structured_output: bool


def load(
    settings: WorkerSettings,
    report: Callable[[str, float | None], None],
    event_loop: asyncio.AbstractEventLoop,
    leader: Leader | None = None,
) -> tuple[WorkerInfo, StepLoop]:
    """Load what `settings` name; takes seconds, and calls `report` with what it does and how far.

    What `report` raises ends it. `leader` has the other ranks, if the model is on several devices.

    Raises:
        ModelError: the model cannot be served as the settings ask, or not one KV block fits.
    """

    def meet(place: Place, device: torch.device) -> Ranks | None:
        if leader is None:
            return None
        store, port = open_store(settings.master_addr)
        leader.gather(report, {"store_port": port})
        return Ranks(place, store, device)

    member = Member(settings) if leader is None else leader.member
    loaded = _load_part(member, report, meet)
    limits, measured = loaded.limits, loaded.rates
    host_pool, num_ranks = loaded.tiers.host_pool, settings.num_ranks
    name = device_name(loaded.device)
    info = WorkerInfo(
        worker_id=settings.worker_id,
        device=name if leader is None else f"{num_ranks} x {name}",
        model_id=settings.model_id,
        limits=limits,
        eos_token_ids=loaded.eos_token_ids,
        block_bytes=loaded.block_bytes,
        swap_bytes_per_s=measured.swap_bytes_per_s,
        prefill_tokens_per_s=measured.prefill_tokens_per_s,
        structured_output=loaded.has_structured_output,
        disk_bytes_per_s=measured.disk_bytes_per_s,
        dtype=str(loaded.dtype).removeprefix("torch."),
        host_block_bytes=host_pool.blocks.shape[1] if host_pool is not None else 0,
        kv_dtype=settings.kv_dtype,
        host_codec=str(settings.host_codec),
        takes_kv=leader is None,
    )
    metrics.KV_BYTES.set(limits.num_blocks * info.block_bytes)
    _log.info(
        "loaded",
        model=info.model_id,
        device=info.device,
        dtype=info.dtype,
        quantization=settings.quantization,
        kv_dtype=info.kv_dtype,
        num_threads=loaded.num_threads,
        max_model_len=limits.max_model_len,
        num_blocks=limits.num_blocks,
        kv_tokens=limits.num_blocks * limits.block_size,
        kv_gib=round(limits.num_blocks * info.block_bytes / _GIB, 3),
        num_host_blocks=limits.num_host_blocks,
        num_disk_blocks=limits.num_disk_blocks,
        swap_gb_per_s=round(info.swap_bytes_per_s / 1e9, 3),
        disk_gb_per_s=round(info.disk_bytes_per_s / 1e9, 3),
        prefill_tokens_per_s=round(info.prefill_tokens_per_s),
    )
    if limits.num_blocks < limits.max_blocks_per_row:
        _log.warning(
            "a sequence of max_model_len does not fit the KV memory",
            max_model_len=limits.max_model_len,
            kv_tokens=limits.num_blocks * limits.block_size,
        )
    executor = loaded.executor
    return info, StepLoop(
        executor if leader is None else LeadingExecutor(executor, leader), event_loop
    )


def load_rank(member: Member, welcome: dict[str, int]) -> tuple[Executor, Limits]:
    """Load the part of a rank other than 0, whose rank 0 has sent `welcome`.

    Raises:
        ModelError: as `load`.
    """
    address = member.settings.master_addr

    def meet(place: Place, device: torch.device) -> Ranks:
        return Ranks(place, find_store(address, welcome["store_port"]), device)

    loaded = _load_part(member, lambda *_: None, meet)
    return loaded.executor, loaded.limits


def _load_part(
    member: Member,
    report: Callable[[str, float | None], None],
    meet: Callable[[Place, torch.device], Ranks | None],
) -> _Loaded:
    """Load a process's part of the model. If there are others, all do this at the same time.

    `meet` connects them, as soon as this process knows that it can do what is asked of it.
    """
    settings, place = member.settings, member.place
    device = pick_device(settings.device, member.number)
    num_threads = set_num_threads(settings.num_threads, settings.num_local_ranks)
    quantization = Quantization(settings.quantization) if settings.quantization else None
    source = open_model(settings.model, settings.model_class, quantization, place)
    config, local_config = source.config, source.local_config
    dtype = pick_dtype(settings.dtype, config, device)
    dtypes = _kv_dtypes(settings, config, dtype, place)
    limits = _limits(settings, config, device)
    ranks = meet(place, device)
    report("loading weights", 0.0)
    model = source.load(dtype, device, lambda done: report("loading weights", done), ranks)
    report("making room for KV", None)
    bytes_per_block = block_bytes(local_config, settings.block_size, dtypes)
    num_blocks = _num_blocks(settings, model, local_config, limits, dtypes, device, ranks)
    if ranks is not None:
        num_blocks = int(ranks.least(num_blocks)[0])
    pool = KvPool(local_config, num_blocks, settings.block_size, dtypes, device)
    eos_token_ids = tuple(token for token in config.eos_token_ids if token < config.vocab_size)
    tiers = open_lower_tiers(settings, pool, local_config)
    num_host_blocks = tiers.num_host_blocks
    if ranks is not None:
        num_host_blocks = int(ranks.least(num_host_blocks)[0])
    limits = replace(
        limits,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        num_disk_blocks=tiers.num_disk_blocks,
    )
    structured = None
    if place.rank == 0:  # which samples
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
        ranks=ranks,
    )
    rates = _Rates()
    if num_host_blocks:
        report("measuring", None)
        rates = _measure(settings, executor, limits, tiers, pool)
    if ranks is not None:
        rates, bytes_per_block = _rates_of_all(rates, bytes_per_block, ranks)
    return _Loaded(
        executor=executor,
        limits=limits,
        eos_token_ids=eos_token_ids,
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        block_bytes=bytes_per_block,
        tiers=tiers,
        rates=rates,
        has_structured_output=structured is not None,
    )


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


def _measure(
    settings: WorkerSettings, executor: Executor, limits: Limits, tiers: LowerTiers, pool: KvPool
) -> _Rates:
    """Measure what can be of this process; there are host blocks."""
    assert tiers.host_pool is not None
    swap_bytes_per_s = rates.swap_bytes_per_s(tiers.host_pool, pool)
    prefill_tokens_per_s = rates.prefill_tokens_per_s(executor, limits)
    disk_bytes_per_s = 0.0
    if tiers.disk_pool is not None:
        try:
            disk_bytes_per_s = rates.disk_bytes_per_s(tiers.disk_pool, tiers.host_pool, pool)
        except OSError as error:
            raise ModelError(f"disk-kv-dir is {settings.disk_kv_dir}: {error}") from error
    return _Rates(swap_bytes_per_s, prefill_tokens_per_s, disk_bytes_per_s)


def _rates_of_all(own: _Rates, block_bytes: int, ranks: Ranks) -> tuple[_Rates, int]:
    """The rates of all ranks together, and the bytes of a block in all; the slowest one counts.

    There is no disk tier.
    """
    total_bytes = ranks.total(block_bytes)[0]
    blocks_per_s, prefill_tokens_per_s = ranks.least(
        own.swap_bytes_per_s / block_bytes, own.prefill_tokens_per_s
    )
    return _Rates(blocks_per_s * total_bytes, prefill_tokens_per_s), int(total_bytes)


def _kv_dtypes(
    settings: WorkerSettings, config: ModelConfig, dtype: torch.dtype, place: Place
) -> KvDtypes:
    """What the layers that are here store."""
    skip_layers = settings.kv_skip_layers
    if skip_layers and max(skip_layers) >= config.num_layers:
        raise ModelError(
            f"kv-cache-dtype-skip-layers is {settings.kv_cache_dtype_skip_layers}; the layers of "
            f"{settings.model_id} are 0 to {config.num_layers - 1}"
        )
    layers = place.layers(config.num_layers)
    local = {layer - layers.start for layer in skip_layers if layer in layers}
    return kv_dtypes(settings.kv_cache_dtype, local, dtype, len(layers))


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
    ranks: Ranks | None,
) -> int:
    if settings.num_blocks is not None:
        return settings.num_blocks
    if settings.kv_cache_memory_gb is not None:
        num_bytes = int(settings.kv_cache_memory_gb * _GIB)
    elif device.type == "cuda":
        num_bytes = memory.free_gpu_kv_bytes(
            model, config, limits, dtypes, device, settings.gpu_memory_utilization, ranks
        )
    else:
        num_bytes = memory.free_cpu_kv_bytes()
    return memory.blocks_in(num_bytes, block_bytes(config, settings.block_size, dtypes))
