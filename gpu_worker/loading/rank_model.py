"""Loads one rank's part of a model: its weights, its KV memory, and its executor."""

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch

from contract.pooling import Abilities
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layout import KvDtypes
from gpu_worker.loading import kv_memory
from gpu_worker.loading.checked_model import CheckedModel, check_model, has_graphs
from gpu_worker.loading.device import name_arithmetic
from gpu_worker.loading.kv_memory import open_pool_memory
from gpu_worker.loading.kv_tiers import LowerTiers, kv_identity, open_lower_tiers
from gpu_worker.loading.measure_rates import Rates, measure_rates, rates_of_all
from gpu_worker.lora.adapted_maps import AdaptableConfig
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.models.attention import Decoder
from gpu_worker.parallel.member import Member
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.ranks.shards import Place
from gpu_worker.sampling.grammar_masks import RowGrammars
from gpu_worker.settings import WorkerSettings
from gpu_worker.speculative.draft_model import DraftModel, ModelDrafter, load_draft_model
from gpu_worker.speculative.drafter import Drafter
from gpu_worker.speculative.ngram import NgramDrafter
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs.cuda_graphs import CudaGraphs, GraphBackend, GraphsOfAll, LostRankError
from gpu_worker.step.warm_up import warm_up
from gpu_worker.weights.model_config import ModelConfig
from model_files.errors import ModelError
from model_files.locate import find_model

_GIB = 1024**3

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class RankModel:
    """One rank's part of a model, and the facts about the whole model."""

    executor: Executor
    device: torch.device
    num_threads: int
    amx_uses: tuple[str, ...]
    """The operations that use Intel's AMX on a CPU."""
    tiers: LowerTiers
    has_structured_output: bool
    limits: Limits
    """The same in every rank."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    block_bytes: int
    """Bytes of a block, summed over all ranks."""
    max_num_blocks: int | None
    """The largest size of the pool, in blocks; None: its size is fixed."""
    rates: Rates
    """The speeds of swaps, prefill and the disk. If there are several ranks, the slowest rank
    determines each speed."""
    abilities: Abilities
    identity: bytes | None
    """A hash of everything that determines the KV; None: random weights, or no KV."""
    load_adapter: Callable[[str, Path], Adapter]
    """Loads an adapter from its name and directory; raises ModelError."""


def load_rank_model(
    member: Member,
    report: Callable[[str, float | None], None],
    meet: Callable[[Place, torch.device], Ranks | None],
) -> RankModel:
    """Load this rank's part of the model. All ranks do this at the same time.

    Args:
        member: Which rank this is, and its settings.
        report: Called with status and progress; an error that it raises ends the load.
        meet: Connects the ranks, and returns the connection; None if there are no other ranks.
            Called after this rank has checked that it can serve the model as the settings ask.

    Raises:
        ModelError: The model cannot be served as the settings ask, or not even one KV block fits.
    """
    with ExitStack() as undo:
        part = _load_rank_model(member, report, meet, undo)
        undo.pop_all()
    return part


def _load_rank_model(
    member: Member,
    report: Callable[[str, float | None], None],
    meet: Callable[[Place, torch.device], Ranks | None],
    undo: ExitStack,
) -> RankModel:
    """Do as `load_rank_model` does; `undo` collects the resources to release after a failure.

    Each rank first checks everything that needs no weights. Then the ranks connect, before any of
    them loads weights. Weights are loaded before KV memory is allocated, because on a GPU the KV
    pool gets the memory that the weights and the largest step leave free. The executor is built
    after the pool, because CUDA graphs contain the pool's addresses. At the end, if there is a
    host tier, the speed of swaps and of prefill is measured.
    """
    checked = check_model(member, report)
    settings, device = checked.settings, checked.device
    ranks = meet(member.place, device)
    if ranks is not None:
        check_same_adapters(checked.adapters, ranks)
    report("loading weights", 0.0)
    model = checked.source.load(
        checked.dtype, device, lambda done: report("loading weights", done), ranks
    )
    report("making room for KV", None)
    draft_model = None
    if settings.draft_model is not None:
        draft_directory = find_model(settings.draft_model, settings.cache_dir, report)
        draft_model = load_draft_model(
            draft_directory, checked.directory, checked.limits, checked.dtype, device
        )
    memory = _open_memory(checked, model, draft_model, ranks, undo)
    limits, tiers = memory.limits, memory.tiers
    config = checked.source.config
    eos_token_ids = tuple(token for token in config.eos_token_ids if token < config.vocab_size)
    structured = None
    if member.place.rank == 0 and checked.has_kv:  # only rank 0 samples
        structured = _structured_output(checked.directory, limits.vocab_size, eos_token_ids, device)
    drafter = _drafter(settings, limits, draft_model)
    slots = _adapter_slots(config, checked.adapters, device, checked.dtype, member.place)
    executor = Executor(
        model,
        memory.pool,
        limits,
        eos_token_ids,
        device,
        host_pool=tiers.host_pool,
        disk_pool=tiers.disk_pool,
        structured=structured,
        ranks=ranks,
        drafter=drafter,
        adapters=checked.adapters,
        slots=slots,
        # Steps of an encoder are not split, because without KV the parts of a prompt would not see
        # each other. Steps with recurrent layers are not split either, because a step that fails
        # has already advanced some states.
        takes_parts=checked.abilities.generates and not config.num_states,
    )
    if checked.has_kv and has_graphs(settings, device):
        backend: GraphBackend = CudaGraphs(device)
        if ranks is not None:
            backend = GraphsOfAll(backend, ranks)
        _capture_graphs(
            executor,
            backend,
            report,
            drafter,
            shares_prefixes=settings.shared_prefix_attention,
            has_adapters=slots is not None,
        )
    if checked.has_kv and device.type == "cuda":
        report("compiling kernels", None)
        warm_up(
            executor,
            limits,
            has_structured_output=structured is not None,
            num_draft_tokens=0 if settings.speculative is None else settings.num_draft_tokens,
            ranks=ranks,
        )
    rates, num_block_bytes = Rates(), checked.block_bytes
    if limits.num_host_blocks:
        report("measuring", None)
        rates = measure_rates(settings, executor, limits, tiers, memory.pool)
    if tiers.disk_pool is not None:
        blocks, labels = tiers.disk_pool.take_found()
        executor.labels.restore_disk(blocks, labels)
        _log.info("found KV of an earlier process", num_disk_blocks=len(blocks))
    if ranks is not None:
        rates, num_block_bytes = rates_of_all(rates, num_block_bytes, ranks)
    return RankModel(
        executor=executor,
        limits=limits,
        eos_token_ids=eos_token_ids,
        device=device,
        dtype=checked.dtype,
        num_threads=checked.num_threads,
        amx_uses=checked.amx_uses,
        block_bytes=num_block_bytes,
        max_num_blocks=memory.max_num_blocks,
        tiers=tiers,
        rates=rates,
        has_structured_output=structured is not None,
        abilities=checked.abilities,
        identity=memory.identity,
        load_adapter=checked.load_adapter,
    )


def check_same_adapters(adapters: Mapping[int, Adapter], ranks: Ranks) -> None:
    """Check that all ranks have read the same contents of the adapters that the settings name.

    Raises ModelError, on every rank, if the contents differ.
    """
    digest = hashlib.sha256(b"".join(adapter.id.digest for adapter in adapters.values())).digest()
    value = float(int.from_bytes(digest[:6]))  # exact
    least, negated_most = ranks.least(value, -value)
    if least != -negated_most:
        raise ModelError("lora names adapters whose files differ between the ranks' machines")


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """The KV memory of all tiers, and the worker's limits, with the size of each tier in blocks."""

    pool: KvPool
    tiers: LowerTiers
    limits: Limits
    max_num_blocks: int | None
    identity: bytes | None


def _open_memory(
    checked: CheckedModel,
    model: Decoder,
    draft_model: DraftModel | None,
    ranks: Ranks | None,
    undo: ExitStack,
) -> _Memory:
    """Allocate the KV pool and the tiers below it.

    All ranks use the same number of blocks of a tier. The rank with the least room determines it.
    """
    settings, device, limits = checked.settings, checked.device, checked.limits
    config = checked.source.local_config
    num_blocks = _num_blocks(
        settings,
        model,
        config,
        limits,
        checked.kv_dtypes,
        device,
        ranks,
        draft_model,
        checked.block_bytes,
    )
    if ranks is not None:
        num_blocks = int(ranks.least(num_blocks)[0])
    elastic = None
    if checked.has_kv:
        elastic = open_pool_memory(settings, num_blocks, checked.block_bytes, device)
    pool = KvPool(
        config,
        num_blocks,
        limits.block_size,
        checked.kv_dtypes,
        device,
        elastic,
        checked.groups,
        checked.attention,
    )
    undo.callback(pool.close)
    tiers, identity = LowerTiers(), None
    if checked.has_kv:
        if not checked.is_dummy:
            identity = kv_identity(
                settings,
                checked.directory,
                checked.source.config,
                checked.dtype,
                checked.groups,
                name_arithmetic(device, checked.amx_uses),
            )
        tiers = open_lower_tiers(settings, pool, config, identity)
    if tiers.disk_pool is not None:
        undo.callback(tiers.disk_pool.close)
    num_host_blocks = tiers.num_host_blocks
    if ranks is not None:
        num_host_blocks = int(ranks.least(num_host_blocks)[0])
    limits = replace(
        limits,
        num_blocks=num_blocks,
        kv_windows=checked.groups.windows,
        num_host_blocks=num_host_blocks,
        num_disk_blocks=tiers.num_disk_blocks,
    )
    max_num_blocks = None if elastic is None else len(pool.blocks_as_bytes)
    return _Memory(pool, tiers, limits, max_num_blocks, identity)


def _num_blocks(
    settings: WorkerSettings,
    model: Decoder,
    config: ModelConfig,
    limits: Limits,
    dtypes: KvDtypes,
    device: torch.device,
    ranks: Ranks | None,
    draft_model: DraftModel | None,
    bytes_per_block: int,
) -> int:
    if settings.num_blocks is not None:
        return settings.num_blocks
    if config.is_encoder:  # its blocks have no bytes
        return limits.max_num_seqs * limits.max_blocks_per_row
    if settings.kv_cache_memory_gb is not None:
        num_bytes = int(settings.kv_cache_memory_gb * _GIB)
    elif device.type == "cuda":
        num_bytes = kv_memory.free_gpu_kv_bytes(
            model,
            config,
            limits,
            dtypes,
            device,
            settings.gpu_memory_utilization,
            ranks,
            num_graph_sets=_num_graph_sets(settings, device),
        )
        if draft_model is not None and has_graphs(settings, device):
            draft = draft_model.model, draft_model.config, limits, draft_model.kv_dtypes
            num_bytes -= kv_memory.graph_bytes(*draft, device)
    else:
        num_bytes = kv_memory.free_cpu_kv_bytes()
    if draft_model is not None:
        bytes_per_block += draft_model.block_bytes(settings.block_size)
    return kv_memory.blocks_in(num_bytes, bytes_per_block)


def _drafter(
    settings: WorkerSettings, limits: Limits, draft_model: DraftModel | None
) -> Drafter | None:
    """Make the drafter, which guesses tokens; None if the settings ask for no drafts."""
    if draft_model is not None:
        return draft_model.drafter(settings.num_draft_tokens, limits)
    if settings.speculative == "ngram":
        return NgramDrafter(settings.num_draft_tokens, settings.ngram_min, settings.ngram_max)
    return None


def _structured_output(
    directory: Path, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
) -> RowGrammars | None:
    """Make the `RowGrammars`; None, with a warning, if the model cannot be used with grammars."""
    if not eos_token_ids:
        _log.warning("no structured output: the model has no end-of-sequence token")
        return None
    try:
        return RowGrammars(
            directory / "tokenizer.json",
            vocab_size,
            eos_token_ids,
            device,
            is_beside=device.type != "cpu",
        )
    except (OSError, ValueError) as error:
        _log.warning("no structured output: tokenizer.json cannot be used", error=str(error))
        return None


def _adapter_slots(
    config: ModelConfig,
    adapters: Mapping[int, Adapter],
    device: torch.device,
    dtype: torch.dtype,
    place: Place,
) -> AdapterSlots | None:
    """Make a GPU's slots for adapters; None on a CPU, or if the worker starts without adapters.

    With slots, graphs are captured for steps with adapters, too, which doubles the number of
    graphs. Without slots, steps with adapters run without graphs.
    """
    if not adapters or device.type != "cuda":
        return None
    assert isinstance(config, AdaptableConfig), "other models have no adapters"
    slots = AdapterSlots(config, device, place)
    slots.compile(dtype)
    return slots


def _num_graph_sets(settings: WorkerSettings, device: torch.device) -> int:
    """Return how many sets of graphs the KV pool must leave memory for.

    One set is for steps without adapters. The set for steps with adapters counts as two, because
    its graphs launch about twice as many kernels and take twice the memory.
    """
    if not has_graphs(settings, device):
        return 0
    return 3 if settings.lora else 1


def _capture_graphs(
    executor: Executor,
    backend: GraphBackend,
    report: Callable[[str, float | None], None],
    drafter: Drafter | None = None,
    *,
    shares_prefixes: bool = False,
    has_adapters: bool = False,
) -> None:
    """Capture graphs for each kind of step; if a capture fails, log a warning and continue.

    With a drafter, a step's tokens come from the host, so all steps use the graphs of
    `capture_pieces`.
    """
    kinds: list[tuple[str, Callable[..., None]]] = [("steps with prompts", executor.capture_pieces)]
    if drafter is None:
        decodes = partial(executor.capture_decodes, shares_prefixes=shares_prefixes)
        kinds.insert(0, ("decode steps", decodes))
    if has_adapters:
        kinds += [
            (f"{steps} of rows with adapters", partial(capture, has_adapters=True))
            for steps, capture in kinds
        ]
    if isinstance(drafter, ModelDrafter):
        kinds.append(("the draft model's guesses", drafter.capture_decodes))
        kinds.append(("the draft model's first guesses", drafter.capture_pieces))
    for steps, capture in kinds:
        start_s = time.monotonic()
        try:
            capture(backend, lambda done: report("capturing CUDA graphs", done))
        except LostRankError:
            raise
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            report("continuing without CUDA graphs", None)  # raises if reporting has failed
            _log.warning(f"{steps} run without CUDA graphs", exc_info=error)
        else:
            seconds = round(time.monotonic() - start_s, 1)
            _log.info("captured CUDA graphs", steps=steps, seconds=seconds)
    torch.cuda.empty_cache()  # releases memory that the runs before the captures have cached
