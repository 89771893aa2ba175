"""Loads LoRA adapters that PEFT has written.

Symbols: `K` input features of a map, `N` its output features, `r` the rank of an adapter, `R` the
sum of the ranks of maps that are fused into one.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from contract.lora import LoraAdapter
from gpu_worker.lora.adapted_maps import (
    ADAPTABLE_ARCHITECTURES,
    AdaptableConfig,
    AdaptedMap,
    adapted_maps,
)
from gpu_worker.lora.adapter import Adapter, LowRankMap, native_adapter
from gpu_worker.ranks.shards import ALONE, Place
from gpu_worker.weights.json_fields import JsonFields, ModelError, read_json
from gpu_worker.weights.linear import make_linear
from gpu_worker.weights.model_config import ModelConfig

CONFIG_FILE: Final = "adapter_config.json"

_HONOURED: Final = frozenset(
    {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules"}
    | {"init_lora_weights"}
)
_OF_TRAINING: Final = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "revision", "peft_version"}
    | {"lora_dropout", "eva_config", "megatron_config", "megatron_core", "runtime_config"}
    | {"qalora_group_size"}
)
"""Fields that are ignored, because they do not change what a trained adapter computes.

Some of these fields would have an effect if another field was set, too, but that other field is
refused. A field that is neither in `_HONOURED` nor in `_OF_TRAINING` must have one of the values in
`_NEUTRAL`. With another value, the adapter may be of a newer variant of LoRA, which would be
computed wrongly.
"""
_NEUTRAL: Final[tuple[object, ...]] = (None, False, "none", "", [], {})
_HARMLESS_STARTS: Final = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the model's own weights unchanged."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The parsed adapter_config.json."""

    path: Path
    rank: int
    """Rows of each A, columns of each B."""
    scale: float
    """Multiplies B A."""
    target_modules: tuple[str, ...] | None
    """Names, or ends of names, of maps that must have matrices in the weights file; None: the file
    alone says which maps are adapted."""


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read an adapter's config.

    Raises:
        ModelError: The config is missing or malformed, or has an unsupported value.
    """
    fields = read_json(directory / CONFIG_FILE)
    if (kind := fields.get("peft_type")) != "LORA":
        raise fields.error("peft_type", f"is {kind!r}; only LORA is supported")
    if (task := fields.get("task_type")) not in {None, "CAUSAL_LM"}:
        raise fields.error("task_type", f"is {task!r}; only CAUSAL_LM is supported")
    for name, value in fields.values.items():
        if name not in _HONOURED | _OF_TRAINING and value not in _NEUTRAL:
            raise fields.error(name, f"is {value!r}, which is not supported")
    if (start := fields.get("init_lora_weights")) not in _HARMLESS_STARTS:
        raise fields.error(
            "init_lora_weights",
            f"is {start!r}; adapters that also change the model's own weights are not supported",
        )
    rank = fields.positive_int("r")
    divisor = math.sqrt(rank) if fields.boolean("use_rslora", default=False) else rank
    return AdapterConfig(
        path=fields.path,
        rank=rank,
        scale=fields.number("lora_alpha") / divisor,
        target_modules=_target_modules(fields),
    )


def _target_modules(fields: JsonFields) -> tuple[str, ...] | None:
    value = fields.get("target_modules")
    if isinstance(value, str) and value:
        return None  # a regular expression, or "all-linear"
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise fields.error(
            "target_modules", f"is {value!r}; it must be names of modules, or an expression"
        )
    return tuple(value)


_WEIGHTS_FILE: Final = "adapter_model.safetensors"
_PICKLED: Final = "adapter_model.bin"
_PREFIX: Final = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_MAX_NAMES_SHOWN: Final = 5


def load_adapter(
    name: str,
    directory: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    place: Place = ALONE,
) -> Adapter:
    """Load this device's part of an adapter for a model. Steps may run at the same time.

    Args:
        name: The name that requests use.
        directory: Where the adapter is.
        model: The config of the whole model that the adapter changes.
        dtype: The dtype of weights and activations.
        device: Where to put the adapter.
        place: Which part of the model this device holds.

    Raises:
        ModelError: The model's implementation supports no adapters; a file is missing or damaged;
            the adapter asks for something unsupported, or its tensors do not fit the model; or the
            files changed while they were read.
    """
    if not isinstance(model, AdaptableConfig):
        raise ModelError(
            f"{model.architecture} does not support LoRA adapters; they are supported for"
            f" {', '.join(ADAPTABLE_ARCHITECTURES)} in our own implementation"
        )
    digest = _digest(directory)
    config = read_adapter_config(directory)
    path = directory / _WEIGHTS_FILE
    layers = [tuple(adapted_maps(model, index, place)) for index in range(model.num_layers)]
    # The names of the whole model are checked, so that all ranks refuse the same adapters.
    modules = [module.name for maps in layers for of in maps for module in of.modules]
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            adapted = _adapted_modules(path, frozenset(file.keys()), config, modules)
            loaded = tuple(
                {
                    of.name: _low_rank_map(path, file, of, adapted, config, dtype, device)
                    for of in layers[index]
                    if adapted & {module.name for module in of.modules}
                }
                for index in place.layers(model.num_layers)
            )
    except (OSError, SafetensorError) as error:
        if (directory / _PICKLED).exists() and not path.exists():
            raise ModelError(
                f"{directory / _PICKLED} is a pickle, which can run code when it is loaded; convert"
                " it to safetensors"
            ) from error
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
    if digest is None or _digest(directory) != digest:
        raise ModelError(f"{directory} has changed while it was read: load it again")
    of = LoraAdapter(name, digest, str(directory.absolute()))
    max_ranks = max(_num_ranks(each, adapted, config) for maps in layers for each in maps)
    return Adapter(of, loaded, native_adapter(loaded), max_ranks)


def _adapted_modules(
    path: Path, names: frozenset[str], config: AdapterConfig, modules: Sequence[str]
) -> frozenset[str]:
    """Return the names of the modules that have matrices in the file.

    Raises:
        ModelError: The file has no matrices, a matrix of an unknown module, or only one of a
            module's two matrices; or it lacks the matrices of a module that the config names.
    """
    known = {_PREFIX + module + part: module for module in modules for part in (_A, _B)}
    if unknown := sorted(names - known.keys()):
        raise ModelError(
            f"{path} has {_some(unknown)}; only matrices for {_last_names(modules)} of the model's"
            " layers are supported"
        )
    wanted = {known[name] for name in names}
    for target in config.target_modules or ():
        matched = {m for m in modules if m == target or m.endswith(f".{target}")}
        if not matched:
            raise ModelError(
                f"{config.path}: target_modules has {target!r}; supported: {_last_names(modules)}"
            )
        wanted |= matched
    if missing := sorted({_PREFIX + m + part for m in wanted for part in (_A, _B)} - names):
        raise ModelError(f"{path} lacks {_some(missing)}")
    if not wanted:
        raise ModelError(f"{path} has no tensors")
    return frozenset(wanted)


def _low_rank_map(
    path: Path,
    file: Any,
    of: AdaptedMap,
    adapted: frozenset[str],
    config: AdapterConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> LowRankMap:
    """Make one A and one B from those of a map's modules: A stacked, B block-diagonal.

    A is `[R, K]`, and B is `[N, R]`; K and N are this device's inputs and outputs. If R is odd, a
    rank of zeros is added, because our own kernel computes ranks in pairs.
    """
    rank, num_ranks = config.rank, _num_ranks(of, adapted, config)
    # Checked before anything is allocated, because the config may have a huge rank.
    tensors = {
        module.name: (
            _tensor(path, file, module.name + _A, (rank, of.num_in)),
            _tensor(path, file, module.name + _B, (module.num_out, rank)),
        )
        for module in of.modules
        if module.name in adapted
    }
    down = torch.zeros(num_ranks, len(of.inputs))
    up = torch.zeros(of.num_local_out, num_ranks)
    first_rank = first_out = 0
    for module in of.modules:
        num_out = sum(map(len, module.outputs))
        if module.name in tensors:
            ranks = slice(first_rank, first_rank + rank)
            a, b = tensors[module.name]
            down[ranks] = a[:, of.inputs.start : of.inputs.stop]
            b = torch.cat([b[part.start : part.stop] for part in module.outputs])
            up[first_out : first_out + num_out, ranks] = b.float() * config.scale
            first_rank += rank
        first_out += num_out
    up = up.to(device, dtype)
    if device.type == "cuda":  # GPU kernels expect B to be stored input by input
        up = up.t().contiguous().t()
    return LowRankMap(
        make_linear(down.to(device, dtype), None, is_low_rank=True),
        make_linear(up, None, is_low_rank=True),
        num_ranks,
    )


def _num_ranks(of: AdaptedMap, adapted: frozenset[str], config: AdapterConfig) -> int:
    """Return R, which is even."""
    num_ranks = config.rank * sum(module.name in adapted for module in of.modules)
    return num_ranks + num_ranks % 2


def _tensor(path: Path, file: Any, name: str, shape: tuple[int, int]) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(_PREFIX + name)
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"{path}: {_PREFIX}{name} has shape {list(tensor.shape)}; by {CONFIG_FILE} and the"
            f" model, it must be {list(shape)}"
        )
    if not tensor.is_floating_point() or tensor.element_size() < torch.bfloat16.itemsize:
        raise ModelError(
            f"{path}: {_PREFIX}{name} has dtype {tensor.dtype}; it must be floating point with at"
            " least 16 bits"
        )
    return tensor


def _digest(directory: Path) -> bytes | None:
    """Return the SHA-256 of config and weights; None if one is unreadable (loading then fails)."""
    digest = hashlib.sha256()
    try:
        for name in (CONFIG_FILE, _WEIGHTS_FILE):
            with (directory / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return None
    return digest.digest()


def _last_names(modules: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
