"""Loads a worker's model and starts its step loop. Importing this module imports torch."""

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from contract.errors import FailedPreconditionError, InvalidArgumentError, UnimplementedError
from contract.info import WorkerInfo, new_instance_id
from contract.worker_limits import Limits
from gpu_worker import metrics
from gpu_worker.kv.far_store import FarStore, open_far_store
from gpu_worker.kv.nixl_engine import NixlEngine, load_agent
from gpu_worker.loading.device import device_name
from gpu_worker.loading.rank_model import RankModel, load_rank_model
from gpu_worker.lora.adapter import Adapter
from gpu_worker.memory.available import device_available_bytes
from gpu_worker.memory.watch import MemoryMonitor, watch_device
from gpu_worker.parallel.adapter_loading import FollowersLoader, load_on_all_ranks
from gpu_worker.parallel.leader import Leader
from gpu_worker.parallel.leading_executor import LeadingExecutor
from gpu_worker.parallel.member import Member
from gpu_worker.ranks.collectives import Ranks, find_store, open_store
from gpu_worker.ranks.shards import Place
from gpu_worker.service.adapters import AdapterLoader
from gpu_worker.settings import WorkerSettings
from gpu_worker.step.executor import Executor
from gpu_worker.step_loop import StepLoop
from gpu_worker.weights.json_fields import ModelError

_GIB = 1024**3

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that is ready to serve. It holds device memory until `steps` is stopped."""

    info: WorkerInfo
    steps: StepLoop
    memory: MemoryMonitor
    load_adapter: AdapterLoader
    transfer: NixlEngine | None
    far: FarStore | None


def load(
    settings: WorkerSettings,
    report: Callable[[str, float | None], None],
    event_loop: asyncio.AbstractEventLoop,
    leader: Leader | None = None,
) -> LoadedModel:
    """Load the model of `settings`, and call `report` with status and progress.

    An error raised by `report` ends the load. `leader` connects to the other ranks if the model is
    on several devices.

    Raises:
        ModelError: The model cannot be served as the settings ask, or not even one KV block fits.
    """

    def meet(place: Place, device: torch.device) -> Ranks | None:
        if leader is None:
            return None
        store, port = open_store(settings.master_addr)
        leader.gather(report, {"store_port": port})
        return Ranks(place, store, device)

    member = Member(settings) if leader is None else leader.member
    loaded = load_rank_model(member, report, meet)
    executor = loaded.executor
    with ExitStack() as undo:
        undo.callback(executor.close)
        info = _describe(settings, loaded)
        _publish(settings, loaded, info)
        shares = settings.memory_warning_share, settings.memory_critical_share
        memory_monitor = watch_device(loaded.device, *shares)
        load_one = loaded.load_adapter
        if leader is not None:
            load_one = load_on_all_ranks(leader, load_one)
        load_adapter = _load_adapter(settings, load_one)
        far = None
        if settings.far_kv_url:
            far = _open_far(settings, loaded, info)
            undo.callback(far.close)
        transfer = _open_transfer(settings, loaded, info)
        undo.pop_all()
    # The loop starts last, because its thread keeps the model alive.
    steps = StepLoop(executor if leader is None else LeadingExecutor(executor, leader), event_loop)
    return LoadedModel(info, steps, memory_monitor, load_adapter, transfer, far)


def _open_far(settings: WorkerSettings, loaded: RankModel, info: WorkerInfo) -> FarStore:
    host_pool = loaded.tiers.host_pool
    if loaded.identity is None or host_pool is None or not info.has_far_kv:
        lacks = "KV of real weights, in one group without a window"
        if host_pool is None:
            lacks = "host memory for KV (host_kv_memory_gb)"
        raise ModelError(
            f"far_kv_url is {settings.far_kv_url}; it must be empty: the worker has no {lacks}"
        )
    block_bytes = repr(host_pool.blocks.shape[1]).encode()
    identity = hashlib.sha256(loaded.identity + block_bytes).digest()
    try:
        return open_far_store(settings.far_kv_url, identity, int(settings.far_kv_gb * _GIB))
    except (ImportError, ValueError) as error:
        raise ModelError(
            f"far_kv_url is {settings.far_kv_url}: {error}; it needs pip install 'quire[far]', and"
            " s3fs for s3:// or gcsfs for gs://"
        ) from error


def _open_transfer(
    settings: WorkerSettings, loaded: RankModel, info: WorkerInfo
) -> NixlEngine | None:
    host_pool = loaded.tiers.host_pool
    if settings.kv_transfer == "grpc":
        return None
    if host_pool is None or not info.takes_kv:
        raise ModelError(
            f"kv_transfer is {settings.kv_transfer}; it must be grpc without host memory for KV"
            " (host_kv_memory_gb), or on several devices"
        )
    try:
        agent = load_agent(f"{info.worker_id}-{info.instance_id:x}")
        return NixlEngine(agent, host_pool.blocks)
    except Exception as error:
        raise ModelError(
            f"kv_transfer is nixl, which does not run here: {error!r}; it needs pip install"
            " 'quire[nixl]'"
        ) from error


def _load_adapter(
    settings: WorkerSettings, load_one: Callable[[str, Path], Adapter]
) -> AdapterLoader:
    """Return a loader of LoRA adapters.

    If an adapter cannot be loaded, the loader raises an error that `AdapterService` sends to its
    caller.
    """
    if (obstacle := settings.adapter_obstacle) is not None:
        return refuse_adapters(obstacle)

    def load(name: str, directory: Path) -> Adapter:
        try:
            return load_one(name, directory)
        except ModelError as error:
            raise InvalidArgumentError("directory", f"is {directory}: {error}") from error
        except torch.OutOfMemoryError as error:
            raise FailedPreconditionError(
                f"LoRA adapter {name!r}: the device has no memory for it"
            ) from error

    return load


def _describe(settings: WorkerSettings, loaded: RankModel) -> WorkerInfo:
    limits, measured = loaded.limits, loaded.rates
    host_pool, num_ranks = loaded.tiers.host_pool, settings.num_ranks
    name = device_name(loaded.device) + (" with AMX" if loaded.amx_uses else "")
    return WorkerInfo(
        worker_id=settings.worker_id,
        device=name if num_ranks == 1 else f"{num_ranks} x {name}",
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
        is_batch_invariant=settings.batch_invariant,
        num_draft_tokens=0 if settings.speculative is None else settings.num_draft_tokens,
        takes_kv=num_ranks == 1,
        has_far_kv=bool(settings.far_kv_url and loaded.identity and host_pool is not None)
        and limits.kv_windows == (None,),
        max_num_blocks=loaded.max_num_blocks,
        min_num_blocks=limits.min_num_blocks,
        host_is_device_memory=loaded.device.type == "cpu",
        can_unload=num_ranks == 1,
        role=settings.role,
        abilities=loaded.abilities,
        takes_whole_prompts=not loaded.abilities.generates,
        instance_id=new_instance_id(),
    )


def _publish(settings: WorkerSettings, loaded: RankModel, info: WorkerInfo) -> None:
    """Report the model's sizes in metrics and in the log."""
    limits, device = info.limits, loaded.device
    metrics.KV_BYTES.set(limits.num_blocks * info.block_bytes)
    metrics.MEMORY_AVAILABLE.set_function(lambda: device_available_bytes(device))
    _log.info(
        "loaded",
        model=info.model_id,
        device=info.device,
        dtype=info.dtype,
        quantization=settings.quantization,
        kv_dtype=info.kv_dtype,
        adapters=[adapter.name for adapter in limits.adapters],
        num_threads=loaded.num_threads,
        max_model_len=limits.max_model_len,
        num_blocks=limits.num_blocks,
        kv_windows=limits.kv_windows if limits.has_windows else None,
        kv_tokens=limits.num_blocks // len(limits.kv_windows) * limits.block_size,
        max_num_blocks=info.max_num_blocks,
        kv_gib=round(limits.num_blocks * info.block_bytes / _GIB, 3),
        num_host_blocks=limits.num_host_blocks,
        num_disk_blocks=limits.num_disk_blocks,
        swap_gb_per_s=round(info.swap_bytes_per_s / 1e9, 3),
        disk_gb_per_s=round(info.disk_bytes_per_s / 1e9, 3),
        prefill_tokens_per_s=round(info.prefill_tokens_per_s),
    )
    if not limits.has_windows and limits.num_blocks < limits.max_blocks_per_row:
        _log.warning(
            "a sequence of max_model_len does not fit in the KV memory",
            max_model_len=limits.max_model_len,
            kv_tokens=limits.num_blocks * limits.block_size,
        )


def load_rank(member: Member, welcome: dict[str, int]) -> tuple[Executor, Limits, FollowersLoader]:
    """Load the part of a rank other than 0, after rank 0 has sent `welcome`.

    Raises:
        ModelError: See `load`.
    """
    address = member.settings.master_addr

    def meet(place: Place, device: torch.device) -> Ranks:
        return Ranks(place, find_store(address, welcome["store_port"]), device)

    loaded = load_rank_model(member, lambda *_: None, meet)
    return loaded.executor, loaded.limits, FollowersLoader(loaded.load_adapter)


def refuse_adapters(obstacle: str) -> AdapterLoader:
    """Return a loader that refuses every adapter, because of the setting `obstacle`."""

    def load(name: str, directory: Path) -> "Adapter":  # noqa: ARG001
        raise UnimplementedError(f"LoRA adapter {name!r}: the worker was started with {obstacle}")

    return load
