"""Checks that a model can be served as the settings ask, before its weights are loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch

from contract.pooling import Abilities
from contract.worker_limits import Chunk, Limits
from gpu_worker.kv.layer_groups import LayerGroups, one_group
from gpu_worker.kv.layout import KvDtypes, block_bytes, group_attention, kv_dtypes, place_states
from gpu_worker.loading import kv_memory
from gpu_worker.loading.device import (
    log_kernels,
    pick_attention,
    pick_device,
    pick_dtype,
    set_amx,
)
from gpu_worker.loading.threads import pin_threads, set_num_threads
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.adapter_files import load_adapter
from gpu_worker.models.abilities import read_abilities
from gpu_worker.models.layer_norm.config import LayerNormConfig
from gpu_worker.models.llama.config import LlamaConfig
from gpu_worker.models.registry import ModelSource, open_model
from gpu_worker.parallel.member import Member
from gpu_worker.ranks.shards import Place
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.model_config import ModelConfig
from gpu_worker.weights.quantized_linear import Quantization
from kernels.batch_invariant import BatchInvariantAttention
from kernels.ops import AttentionBackend
from model_files.locate import find_model

_LARGE_GPU_BYTES = 75 * 2**30
"""Slightly less than the memory that a GPU of 80 GB reports."""
_LARGEST_GPU_BYTES = 120 * 2**30
_CPU_SATURATING_TOKENS = 512
"""From this many tokens per step on, a CPU is bound by arithmetic."""
_GPU_SATURATING_TOKENS = 2048
"""From this many tokens per step on, a GPU is bound by arithmetic. Not measured."""
_GPU_MIN_PROMPT_TOKENS = 256
"""A GPU's `Limits.min_prompt_tokens`. Up to about this many tokens, a GPU multiplies by a 16-bit
weight in no more time than it takes to read the weight. Derived, not measured."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class CheckedModel:
    """A model that has passed `check_model`, and how this rank will serve it."""

    settings: WorkerSettings
    """Adjusted for the model: with chunked attention, steps run without CUDA graphs."""
    directory: Path
    source: ModelSource
    abilities: Abilities
    device: torch.device
    dtype: torch.dtype
    num_threads: int
    amx_uses: tuple[str, ...]
    """The operations that use Intel's AMX on a CPU."""
    attention: AttentionBackend
    is_dummy: bool
    """Whether the weights are random."""
    limits: Limits
    """Complete except for the numbers of blocks, which are not known yet."""
    has_kv: bool
    kv_dtypes: KvDtypes
    groups: LayerGroups
    block_bytes: int
    """Bytes of a block's part in this rank."""
    adapters: Mapping[int, Adapter]
    """The adapters that the settings name, by number. Rows refer to an adapter by its number."""
    load_adapter: Callable[[str, Path], Adapter]
    """Loads an adapter from its name and directory; raises ModelError."""


def check_model(member: Member, report: Callable[[str, float | None], None]) -> CheckedModel:
    """Read everything about the model but its weights, and compare it with the settings.

    Also sets up the threads and the use of AMX, and loads the adapters that the settings name.

    Raises:
        ModelError: The model cannot be served as the settings ask.
    """
    settings, place = member.settings, member.place
    device = pick_device(settings.device, member.number)
    attention = pick_attention(settings.attention_backend, device)
    num_threads = set_num_threads(settings.num_threads, settings.num_local_ranks)
    pin_threads(settings.pin_threads, device, num_threads, member.number)
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
    load_one = partial(load_adapter, model=config, dtype=dtype, device=device, place=place)
    adapters = dict(enumerate((load_one(*each) for each in settings.adapter_directories), start=1))
    return CheckedModel(
        settings=settings,
        directory=directory,
        source=source,
        abilities=abilities,
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        amx_uses=amx_uses,
        attention=attention,
        is_dummy=is_dummy,
        limits=replace(
            limits, adapters={adapter.id: number for number, adapter in adapters.items()}
        ),
        has_kv=has_kv,
        kv_dtypes=dtypes,
        groups=groups,
        block_bytes=bytes_per_block,
        adapters=adapters,
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
    """Check what shared-prefix attention needs: a GPU, and layers that all see every token."""
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
    """Check that the setting `batch_invariant` works with the device and the model."""
    if device.type != "cuda":
        raise ModelError(
            f"batch_invariant is true; it must be false on {device.type}, where Quire's compiled"
            " kernels always compute each row independently"
        )
    is_llama = isinstance(config, LlamaConfig) and config.experts is None
    if not is_llama and not isinstance(config, LayerNormConfig):
        raise ModelError(
            f"batch_invariant is true; it must be false for {config.architecture}: only Quire's own"
            " decoders without experts or latent attention are supported"
        )


def has_graphs(settings: WorkerSettings, device: torch.device) -> bool:
    return device.type == "cuda" and not settings.enforce_eager


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

    In two cases there is only one group, which has no window: with a draft model, because both
    models use the same block numbers, and if this rank holds only some of the layers.
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
    """Return the settings, with `enforce_eager` set if the model has chunked attention.

    Raises:
        ModelError: A block would hold tokens of two chunks of attention.
    """
    chunks = {window.num_tokens for window in groups.windows if isinstance(window, Chunk)}
    for chunk in chunks:
        if chunk % limits.block_size:
            raise ModelError(
                f"block-size is {limits.block_size}; it must divide the chunks of"
                f" {config.architecture}'s attention, which have {chunk} tokens"
            )
    if chunks and has_graphs(settings, device):
        _log.warning("steps run without CUDA graphs: the model's attention has chunks")
        return settings.model_copy(update={"enforce_eager": True})
    return settings


def _default_sizes(device_bytes: int | None) -> tuple[int, int]:
    """Return the default numbers of sequences and tokens in a step.

    `device_bytes` is the memory of a GPU; None stands for a CPU. The defaults for GPUs are not
    measured; they assume that devices with more memory compute faster.
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
    """Return the limits; `num_blocks` is 0 and is set later, when the memory for KV is known.

    By default a worker on a CPU has 64 rows: with up to about 64 rows, a decode step of a 125M
    model takes as long as reading the weights, and with more rows it takes longer. By default a
    step may have 2048 tokens or more, so that short prompts that arrive together begin to decode
    together. If steps of so many tokens take too long, the scheduler sends fewer tokens.
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
        # A prompt is computed in one step, and its embedding counts as one more token of its row.
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
