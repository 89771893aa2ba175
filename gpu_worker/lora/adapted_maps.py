"""Lists the linear maps that LoRA adapters may change in a decoder's layers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from gpu_worker.models.gpt_oss.config import GPT_OSS_ARCHITECTURE
from gpu_worker.models.layer_norm.config import LAYER_NORM_ARCHITECTURES, LayerNormConfig
from gpu_worker.models.llama.config import LLAMA_ARCHITECTURES, LlamaConfig
from gpu_worker.ranks.shards import ALONE, Place
from kernels.cpu.program.low_rank import MAPS

AdaptableConfig: TypeAlias = LlamaConfig | LayerNormConfig
"""The config of a decoder that may have adapters."""
ADAPTABLE_ARCHITECTURES: Final = (
    *LLAMA_ARCHITECTURES,
    GPT_OSS_ARCHITECTURE,
    *LAYER_NORM_ARCHITECTURES,
)

MapName: TypeAlias = str
"""The name of a linear map: one of the four names below."""

QKV, ATTENTION_OUTPUT, GATE_UP, DOWN = MAPS
"""Without a gate, GATE_UP is up alone."""

_Groups: TypeAlias = tuple[int, int]
"""Number of groups of inputs or outputs, such as heads, and the size of a group. The ranks split
the groups."""
_NamedParts: TypeAlias = tuple[str, Sequence[_Groups]]
"""A linear map of the checkpoint: its name, and the parts of its outputs, one after another."""


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One linear map of the checkpoint."""

    name: str
    num_out: int
    """Number of outputs in the checkpoint."""
    outputs: tuple[range, ...]
    """The outputs that this rank computes, in the order in which it computes them."""


@dataclass(frozen=True, slots=True)
class AdaptedMap:
    """A linear map of a layer, fused from one or several maps of the checkpoint."""

    name: MapName
    num_in: int
    """Number of inputs in the checkpoint."""
    inputs: range
    """The inputs that this rank has."""
    modules: tuple[AdaptedModule, ...]

    @property
    def num_local_out(self) -> int:
        """Number of outputs that this rank computes."""
        return sum(len(part) for module in self.modules for part in module.outputs)


def adapted_maps(config: AdaptableConfig, layer: int, place: Place = ALONE) -> Iterator[AdaptedMap]:
    """Yield those maps of a layer that adapters may change. Maps of experts are not among them.

    Args:
        config: The config of the whole model.
        layer: Index of the layer in the whole model.
        place: Which of the ranks this is. This rank must hold the layer.
    """
    if isinstance(config, LayerNormConfig):
        return _layer_norm_maps(config, layer, place)
    return _llama_maps(config, layer, place)


def _llama_maps(config: LlamaConfig, layer: int, place: Place) -> Iterator[AdaptedMap]:
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    query, key_value = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
    intermediate = config.intermediate_size, 1
    qkv: list[_NamedParts]
    gate_up: list[_NamedParts]
    if config.has_fused_qkv:
        qkv = [(f"{attention}.qkv_proj", (query, key_value, key_value))]
    else:
        qkv = [
            (f"{attention}.q_proj", (query,)),
            (f"{attention}.k_proj", (key_value,)),
            (f"{attention}.v_proj", (key_value,)),
        ]
    if config.has_fused_gate_up:
        gate_up = [(f"{mlp}.gate_up_proj", (intermediate, intermediate))]
    else:
        gate_up = [(f"{mlp}.{name}", (intermediate,)) for name in ("gate_proj", "up_proj")]
    hidden = config.hidden_size
    yield _split_outputs(QKV, hidden, qkv, place)
    yield _split_inputs(ATTENTION_OUTPUT, query, f"{attention}.o_proj", hidden, place)
    if config.experts is None or not config.experts.layers[layer]:
        yield _split_outputs(GATE_UP, hidden, gate_up, place)
        yield _split_inputs(DOWN, intermediate, f"{mlp}.down_proj", hidden, place)


def _layer_norm_maps(config: LayerNormConfig, layer: int, place: Place) -> Iterator[AdaptedMap]:
    names, hidden = config.names, config.hidden_size
    prefix = f"{names.layers}.{layer}"
    attention, mlp = f"{prefix}.{names.attention}", f"{prefix}.mlp"
    query, key_value = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
    intermediate = config.intermediate_size, 1
    if len(names.qkv) == 1:  # the checkpoint has query, key and value of each head together
        parts = [(config.num_heads, 3 * config.head_dim)]
    else:
        parts = [query, key_value, key_value]
    qkv = [(f"{attention}.{name}", (part,)) for name, part in zip(names.qkv, parts, strict=True)]
    up = ("gate_proj", names.up) if config.is_gated else (names.up,)
    yield _split_outputs(QKV, hidden, qkv, place)
    yield _split_inputs(ATTENTION_OUTPUT, query, f"{attention}.{names.output}", hidden, place)
    yield _split_outputs(GATE_UP, hidden, [(f"{mlp}.{n}", (intermediate,)) for n in up], place)
    yield _split_inputs(DOWN, intermediate, f"{mlp}.{names.down}", hidden, place)


def _split_outputs(
    name: MapName, num_in: int, modules: Iterable[_NamedParts], place: Place
) -> AdaptedMap:
    """Describe a map whose outputs are split between the ranks by `Weights.split_outputs`."""
    return AdaptedMap(
        name,
        num_in,
        range(num_in),
        tuple(_describe(module, parts, place) for module, parts in modules),
    )


def _split_inputs(
    name: MapName, inputs: _Groups, module: str, num_out: int, place: Place
) -> AdaptedMap:
    """Describe a map whose inputs are split between the ranks by `Weights.split_inputs`."""
    every = AdaptedModule(module, num_out, (range(num_out),))
    num_groups, size = inputs
    return AdaptedMap(name, num_groups * size, place.features(num_groups, size), (every,))


def _describe(name: str, parts: Sequence[_Groups], place: Place) -> AdaptedModule:
    outputs, start = [], 0
    for num_groups, size in parts:
        outputs.append(place.features(num_groups, size, start))
        start += num_groups * size
    return AdaptedModule(name, start, tuple(outputs))
