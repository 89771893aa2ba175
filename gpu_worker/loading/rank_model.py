"""Loads one rank's part of a model: its weights, its KV memory, and its executor."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch

from contract.pooling import Abilities
from contract.worker_limits import Chunk, Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layer_groups import LayerGroups, one_group
from gpu_worker.kv.layout import KvDtypes, block_bytes, group_attention, kv_dtypes, place_states
from gpu_worker.loading import kv_memory
from gpu_worker.loading.device import (
    log_kernels,
    name_arithmetic,
    pick_attention,
    pick_device,
    pick_dtype,
    set_amx,
    set_num_threads,
)
from gpu_worker.loading.kv_memory import open_pool_memory
from gpu_worker.loading.kv_tiers import LowerTiers, kv_identity, open_lower_tiers
from gpu_worker.loading.measure import Rates, measure_rates, rates_of_all
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.adapter_files import load_adapter
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.models.abilities import read_abilities
from gpu_worker.models.attention import Decoder
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.llama.config import LlamaConfig
from gpu_worker.models.neox.config import NeoxConfig
from gpu_worker.models.registry import open_model
from gpu_worker.parallel.collectives import Ranks
from gpu_worker.parallel.member import Member
from gpu_worker.parallel.shards import Place
from gpu_worker.sampling.grammar_masks import StructuredOutput
from gpu_worker.settings import WorkerSettings
from gpu_worker.speculative.draft_model import DraftModel, ModelDrafter, load_draft_model
from gpu_worker.speculative.drafter import Drafter
from gpu_worker.speculative.ngram import NgramDrafter
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs.cuda_graphs import CudaGraphs, GraphBackend, GraphsOfAll, LostRankError
from gpu_worker.step.warm_up import warm_up
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.quantized_linear import Quantization
from kernels.batch_invariant import BatchInvariantAttention
from model_files.locate import find_model

_GIB = 1024**3
_LARGE_GPU_BYTES = 75 * 2**30
"""Slightly less than the memory that a GPU of 80 GB reports."""
_LARGEST_GPU_BYTES = 120 * 2**30
_CPU_SATURATING_TOKENS = 512
"""From this many tokens per step on, a CPU is bound by arithmetic."""
_GPU_SATURATING_TOKENS = 2048
"""The same for a GPU. Not measured. Larger steps are for prompts while no sequence decodes."""
_GPU_MIN_PROMPT_TOKENS = 256
"""About the number of tokens by which a GPU multiplies a 16-bit weight in the time that it needs to
read the weight. Derived, not measured."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class RankModel:
    """One rank's part of a model, and the facts about the whole model."""

    executor: Executor
    device: torch.device
    num_threads: int
    amx_uses: tuple[str, ...]
    """What uses Intel's AMX on a CPU."""
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
    """The rates of all ranks together."""
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
        meet: Connects the ranks, and returns None if there are no other ranks. Called when this
            rank knows that it can serve the settings.

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

    First it checks everything that needs no weights: device, config, dtypes, adapters. Then the
    ranks connect, before any of them loads gigabytes. Weights are loaded before KV memory is
    allocated, because on a GPU the KV pool gets the memory that the largest step leaves. All ranks
    use the smallest number of blocks. Then the host and disk tiers are built, and last the
    executor: graphs are captured at the pool's final addresses, and rates are measured with all
    parts in place.
    """
    settings, place = member.settings, member.place
    device = pick_device(settings.device, member.number)
    attention = pick_attention(settings.attention_backend, device)
    num_threads = set_num_threads(settings.num_threads, settings.num_local_ranks)
    log_kernels(device)
    amx_uses = set_amx(settings.amx, device)
    quantization = Quantization(settings.quantization) if settings.quantization else None
    is_dummy = settings.load_format == "dummy"
    if is_dummy:
        _log.warning("load-format is dummy: weights are random and the output is nonsense")
    directory = find_model(settings.model, settings.cache_dir, report)
    source = open_model(
        *(directory, settings.model_class, quantization, place, settings.max_model_len),
        is_dummy=is_dummy,
        is_batch_invariant=settings.batch_invariant,
    )
    config, local_config = source.config, source.local_config
    abilities = read_abilities(directory, config, place.num_ranks)
    dtype = pick_dtype(settings.dtype, config, device)
    if dtype is not torch.bfloat16:
        amx_uses = ()  # other dtypes never use AMX
    limits = _limits(settings, config, device)
    has_kv = not config.is_encoder
    dtypes = _kv_dtypes(settings, config, dtype, place) if has_kv else ()
    groups = _layer_groups(settings, config, limits, place, dtypes) if has_kv else one_group(0)
    if config.num_states:
        groups, limits = _with_states(settings, config, dtypes, groups, limits)
    settings = _for_chunks(settings, config, groups, limits, device)
    if settings.shared_prefix_attention:
        _check_can_share(config, groups, device)
    if settings.batch_invariant:
        _check_batch_invariant(config, device)
        attention = BatchInvariantAttention(limits.max_num_seqs, device)
    bytes_per_block = block_bytes(local_config, limits.block_size, dtypes, groups)
    if has_kv:
        kv_memory.check_size(settings, bytes_per_block, device)
    else:
        _check_without_kv(settings, config)
    load_one = partial(load_adapter, model=config, dtype=dtype, device=device)
    adapters = dict(enumerate((load_one(*each) for each in settings.adapter_directories), start=1))
    limits = replace(
        limits,
        adapters={adapter.id: number for number, adapter in adapters.items()},
    )
    ranks = meet(place, device)
    report("loading weights", 0.0)
    model = source.load(dtype, device, lambda done: report("loading weights", done), ranks)
    report("making room for KV", None)
    draft_model = None
    if settings.draft_model is not None:
        draft_directory = find_model(settings.draft_model, settings.cache_dir, report)
        draft_model = load_draft_model(draft_directory, directory, limits, dtype, device)
    num_blocks = _num_blocks(
        settings,
        model,
        local_config,
        limits,
        dtypes,
        device,
        ranks,
        draft_model,
        bytes_per_block,
    )
    if ranks is not None:
        num_blocks = int(ranks.least(num_blocks)[0])
    pool_memory = None
    if has_kv:
        pool_memory = open_pool_memory(settings, num_blocks, bytes_per_block, device)
    pool = KvPool(
        local_config,
        num_blocks,
        limits.block_size,
        dtypes,
        device,
        pool_memory,
        groups,
        attention,
    )
    undo.callback(pool.close)
    eos_token_ids = tuple(token for token in config.eos_token_ids if token < config.vocab_size)
    tiers, identity = LowerTiers(), None
    if has_kv:
        if not is_dummy:
            arithmetic = name_arithmetic(device, amx_uses)
            identity = kv_identity(settings, directory, config, dtype, groups, arithmetic)
        tiers = open_lower_tiers(settings, pool, local_config, identity)
    num_host_blocks = tiers.num_host_blocks
    if ranks is not None:
        num_host_blocks = int(ranks.least(num_host_blocks)[0])
    limits = replace(
        limits,
        num_blocks=num_blocks,
        kv_windows=groups.windows,
        num_host_blocks=num_host_blocks,
        num_disk_blocks=tiers.num_disk_blocks,
    )
    if tiers.disk_pool is not None:
        undo.callback(tiers.disk_pool.close)
    structured = None
    if place.rank == 0 and has_kv:  # only rank 0 samples
        structured = _structured_output(directory, limits.vocab_size, eos_token_ids, device)
    drafter = _drafter(settings, limits, draft_model)
    slots = _adapter_slots(config, adapters, device, dtype)
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
        drafter=drafter,
        adapters=adapters,
        slots=slots,
        # Steps of an encoder are not split, because without KV the parts of a prompt would not see
        # each other. Nor are steps of recurrent layers, because a failed step has already advanced
        # some states.
        takes_parts=abilities.generates and not config.num_states,
    )
    if has_kv and _has_graphs(settings, device):
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
    if has_kv and device.type == "cuda":
        report("compiling kernels", None)
        warm_up(
            executor,
            limits,
            has_structured_output=structured is not None,
            num_draft_tokens=0 if settings.speculative is None else settings.num_draft_tokens,
            ranks=ranks,
        )
    measured = Rates()
    if num_host_blocks:
        report("measuring", None)
        measured = measure_rates(settings, executor, limits, tiers, pool)
    if tiers.disk_pool is not None:
        blocks, labels = tiers.disk_pool.take_found()
        executor.labels.restore_disk(blocks, labels)
        _log.info("found KV of an earlier process", num_disk_blocks=len(blocks))
    if ranks is not None:
        measured, bytes_per_block = rates_of_all(measured, bytes_per_block, ranks)
    return RankModel(
        executor=executor,
        limits=limits,
        eos_token_ids=eos_token_ids,
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        amx_uses=amx_uses,
        block_bytes=bytes_per_block,
        max_num_blocks=None if pool_memory is None else len(pool.blocks_as_bytes),
        tiers=tiers,
        rates=measured,
        has_structured_output=structured is not None,
        abilities=abilities,
        identity=identity,
        load_adapter=load_one,
    )


def _check_without_kv(settings: WorkerSettings, config: ModelConfig) -> None:
    """Check that no setting concerns KV or drafts, which an encoder does not have."""
    for name in ("host_kv_memory_gb", "disk_kv_memory_gb", "kv_cache_memory_gb", "speculative"):
        if value := getattr(settings, name):
            raise ModelError(
                f"{name.replace('_', '-')} is {value}; it must be unset for {config.architecture},"
                " which keeps no KV and generates nothing"
            )


def _check_can_share(config: ModelConfig, groups: LayerGroups, device: torch.device) -> None:
    """Check that decodes can share prefixes: they run in graphs, and each layer sees all blocks."""
    if device.type != "cuda":
        raise ModelError(
            f"shared_prefix_attention is true; it must be false on {device.type}, which has no"
            " CUDA graphs"
        )
    if groups.windows != (None,):
        raise ModelError(
            f"shared_prefix_attention is true; it must be false for {config.architecture}, whose"
            f" layers do not all see every token: windows are {groups.windows}"
        )


def _check_batch_invariant(config: ModelConfig, device: torch.device) -> None:
    """Check that all of the model's operations can be independent of the batch."""
    if device.type != "cuda":
        raise ModelError(
            f"batch_invariant is true; it must be false on {device.type}, where Quire's compiled"
            " kernels always compute each row independently"
        )
    is_llama = isinstance(config, LlamaConfig) and config.experts is None
    if not is_llama and not isinstance(config, NeoxConfig):
        raise ModelError(
            f"batch_invariant is true; it must be false for {config.architecture}: only Quire's own"
            " decoders without experts or latent attention are supported"
        )


def _drafter(
    settings: WorkerSettings, limits: Limits, draft_model: DraftModel | None
) -> Drafter | None:
    """Make the drafter that guesses tokens, if any."""
    if draft_model is not None:
        return draft_model.drafter(settings.num_draft_tokens, limits)
    if settings.speculative == "ngram":
        return NgramDrafter(settings.num_draft_tokens, settings.ngram_min, settings.ngram_max)
    return None


def _structured_output(
    directory: Path, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
) -> StructuredOutput | None:
    """Make the grammar compiler for the model; None, with a warning, if it supports no grammars."""
    if not eos_token_ids:
        _log.warning("no structured output: the model has no end-of-sequence token")
        return None
    try:
        return StructuredOutput(
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
    config: ModelConfig, adapters: Mapping[int, Adapter], device: torch.device, dtype: torch.dtype
) -> AdapterSlots | None:
    """Make the slots of a GPU's adapters; None if the worker starts without adapters.

    Slots double the number of graphs; without slots, steps with adapters run eagerly.
    """
    if not adapters or device.type != "cuda":
        return None
    assert isinstance(config, LlamaConfig), "other models have no adapters"
    slots = AdapterSlots(config, device)
    slots.compile(dtype)
    return slots


def _has_graphs(settings: WorkerSettings, device: torch.device) -> bool:
    return device.type == "cuda" and not settings.enforce_eager


def _num_graph_sets(settings: WorkerSettings, device: torch.device) -> int:
    """Return how many sets of graphs to leave room for.

    A set with adapters counts twice: its graphs launch about twice as many kernels, and take twice
    the memory.
    """
    if not _has_graphs(settings, device):
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

    With a drafter, all steps use the graphs of `capture_pieces`, because their tokens come from the
    host.
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


def _kv_dtypes(
    settings: WorkerSettings, config: ModelConfig, dtype: torch.dtype, place: Place
) -> tuple[torch.dtype, ...]:
    """Return the storage dtype of KV in each of this rank's layers."""
    skip_layers = settings.kv_skip_layers
    if skip_layers and max(skip_layers) >= config.num_layers:
        raise ModelError(
            f"kv-cache-dtype-skip-layers is {settings.kv_cache_dtype_skip_layers}; the layers of "
            f"{settings.model_id} are 0 to {config.num_layers - 1}"
        )
    if config.has_exact_keys and settings.kv_cache_dtype != "auto":
        raise ModelError(
            f"kv-cache-dtype is {settings.kv_cache_dtype}; {config.architecture} has ALiBi, whose"
            " keys hold positions that 8 bits would round: it must be auto"
        )
    layers = place.layers(config.num_layers)
    local = {layer - layers.start for layer in skip_layers if layer in layers}
    return kv_dtypes(settings.kv_cache_dtype, local, dtype, len(layers))


def _layer_groups(
    settings: WorkerSettings,
    config: ModelConfig,
    limits: Limits,
    place: Place,
    dtypes: tuple[torch.dtype, ...],
) -> LayerGroups:
    """Return the KV groups of the model's layers.

    All layers are in one group without a window if a draft model uses the same block numbers, or if
    layers are on several devices.
    """
    num_layers = len(place.layers(config.num_layers))
    is_whole = num_layers == config.num_layers
    if settings.draft_model is not None or not is_whole:
        if any(isinstance(window, Chunk) for window in config.windows):
            raise ModelError(
                f"draft-model is {settings.draft_model}; it must be unset for"
                f" {config.architecture}, whose attention has chunks"
            )
        return one_group(num_layers)
    groups = group_attention(config, dtypes, limits.max_model_len)
    if groups.windows not in {(), (None,)}:
        _log.info("KV groups", windows=groups.windows, layers_per_block=groups.layers_per_block)
    return groups


def _for_chunks(
    settings: WorkerSettings,
    config: ModelConfig,
    groups: LayerGroups,
    limits: Limits,
    device: torch.device,
) -> WorkerSettings:
    """Return the settings adjusted for chunked attention, if the model has it.

    Raises:
        ModelError: A block would belong to two chunks.
    """
    chunks = {window.num_tokens for window in groups.windows if isinstance(window, Chunk)}
    for chunk in chunks:
        if chunk % limits.block_size:
            raise ModelError(
                f"block-size is {limits.block_size}; it must divide the chunks of"
                f" {config.architecture}'s attention, which have {chunk} tokens"
            )
    if chunks and _has_graphs(settings, device):
        _log.warning("steps run without CUDA graphs: the model's attention has chunks")
        return settings.model_copy(update={"enforce_eager": True})
    return settings


def _default_sizes(device_bytes: int | None) -> tuple[int, int]:
    """Return the default number of sequences and tokens of a step, by a GPU's memory; None: a CPU.

    The defaults for GPUs are not measured; they assume that devices with more memory compute
    faster.
    """
    if device_bytes is None:
        return 64, 2048
    if device_bytes < _LARGE_GPU_BYTES:
        return 256, 2048
    return (512 if device_bytes < _LARGEST_GPU_BYTES else 1024), 8192


def _device_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def _with_states(
    settings: WorkerSettings,
    config: ModelConfig,
    dtypes: KvDtypes,
    groups: LayerGroups,
    limits: Limits,
) -> tuple[LayerGroups, Limits]:
    """Add the groups of recurrent layers, and make blocks large enough for their states.

    Raises:
        ModelError: A setting does not work with recurrent layers.
    """
    if settings.speculative is not None:
        raise ModelError(
            f"speculative is {settings.speculative}; {config.architecture} has recurrent layers,"
            " whose states cannot be rewound after a wrong guess"
        )
    for name in ("host_codec", "disk_codec"):
        if (codec := getattr(settings, name)).is_quantized:
            raise ModelError(
                f"{name.replace('_codec', '-kv-codec')} is {codec}; {config.architecture} has"
                " recurrent layers, whose states must not be rounded"
            )
    groups, size = place_states(config, settings.block_size, dtypes, groups)
    _log.info(
        "recurrent layers",
        layers=config.num_states,
        block_size=size,
        state_groups=groups.num_state_groups,
    )
    return groups, replace(limits, block_size=size)


def _limits(settings: WorkerSettings, config: ModelConfig, device: torch.device) -> Limits:
    """Return the limits, except `num_blocks`, which is computed from them.

    On a CPU, a decode step of a 125M model is bound by reading the weights up to about 64 rows;
    more rows would only slow each other down. A step takes 2048 prompt tokens or more, so that
    short prompts that arrive together begin to decode together. If such a step takes too long, the
    scheduler sends fewer tokens. From 512 tokens on, a CPU is bound by arithmetic.
    """
    is_gpu = device.type == "cuda"
    max_model_len = settings.max_model_len or config.max_model_len
    if max_model_len > config.max_model_len:
        raise ModelError(
            f"max-model-len is {max_model_len}; {settings.model_id} takes at most "
            f"{config.max_model_len}"
        )
    # If only one of the two is set, it limits the other's default.
    default_seqs, default_tokens = _default_sizes(_device_bytes(device) if is_gpu else None)
    max_num_seqs = settings.max_num_seqs or min(
        default_seqs, settings.max_num_batched_tokens or default_tokens
    )
    most_tokens = max(default_tokens, max_num_seqs)
    if config.is_encoder:
        # A prompt is computed in one step, and its vector counts as a token of its row.
        if (settings.max_num_batched_tokens or max_model_len) < max_model_len:
            raise ModelError(
                f"max-num-batched-tokens is {settings.max_num_batched_tokens};"
                f" {config.architecture} computes a prompt in one step, and max-model-len is"
                f" {max_model_len}"
            )
        most_tokens = max(most_tokens, max_model_len)
        max_model_len += 1
    max_num_batched_tokens = settings.max_num_batched_tokens or most_tokens
    return Limits(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        num_saturating_tokens=min(
            _GPU_SATURATING_TOKENS if is_gpu else _CPU_SATURATING_TOKENS, max_num_batched_tokens
        ),
        min_prompt_tokens=min(_GPU_MIN_PROMPT_TOKENS, max_num_batched_tokens) if is_gpu else 0,
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
        if draft_model is not None and _has_graphs(settings, device):
            draft = draft_model.model, draft_model.config, limits, draft_model.kv_dtypes
            num_bytes -= kv_memory.graph_bytes(*draft, device)
    else:
        num_bytes = kv_memory.free_cpu_kv_bytes()
    if draft_model is not None:
        bytes_per_block += draft_model.block_bytes(settings.block_size)
    return kv_memory.blocks_in(num_bytes, bytes_per_block)
