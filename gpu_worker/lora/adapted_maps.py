"""Lists the linear maps of a decoder's layers that LoRA adapters may change."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from gpu_worker.models.gpt_oss.config import GPT_OSS_ARCHITECTURE
from gpu_worker.models.layer_norm.config import LAYER_NORM_ARCHITECTURES, LayerNormConfig
from gpu_worker.models.llama.config import LLAMA_ARCHITECTURES, LlamaConfig
from kernels.cpu.program.low_rank import MAPS

AdaptableConfig: TypeAlias = LlamaConfig | LayerNormConfig
"""The config of a decoder that may have adapters."""
ADAPTABLE_ARCHITECTURES: Final = (
    *LLAMA_ARCHITECTURES,
    GPT_OSS_ARCHITECTURE,
    *LAYER_NORM_ARCHITECTURES,
)

MapName: TypeAlias = str
"""A linear map of the decoder: one of the four below."""

QKV, ATTENTION_OUTPUT, GATE_UP, DOWN = MAPS
"""Without a gate, GATE_UP is up alone."""


@dataclass(frozen=True, slots=True)
class AdaptedMap:
    """One linear map of a layer: one or several maps of the checkpoint, with joined outputs."""

    name: MapName
    num_in: int
    modules: tuple[tuple[str, int], ...]
    """Name in the checkpoint and number of outputs of each map."""


def adapted_maps(config: AdaptableConfig, layer: int) -> Iterator[AdaptedMap]:
    """Yield the maps of a layer that adapters may change. Maps of experts are not among them."""
    if isinstance(config, LayerNormConfig):
        return _layer_norm_maps(config, layer)
    return _llama_maps(config, layer)


def _llama_maps(config: LlamaConfig, layer: int) -> Iterator[AdaptedMap]:
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    qkv: tuple[tuple[str, int], ...] = (
        (f"{attention}.q_proj", query_size),
        (f"{attention}.k_proj", kv_size),
        (f"{attention}.v_proj", kv_size),
    )
    gate_up: tuple[tuple[str, int], ...] = (
        (f"{mlp}.gate_proj", intermediate),
        (f"{mlp}.up_proj", intermediate),
    )
    if config.has_fused_qkv:
        qkv = ((f"{attention}.qkv_proj", query_size + 2 * kv_size),)
    if config.has_fused_gate_up:
        gate_up = ((f"{mlp}.gate_up_proj", 2 * intermediate),)
    yield AdaptedMap(QKV, hidden, qkv)
    yield AdaptedMap(ATTENTION_OUTPUT, query_size, ((f"{attention}.o_proj", hidden),))
    if config.experts is None or not config.experts.layers[layer]:
        yield AdaptedMap(GATE_UP, hidden, gate_up)
        yield AdaptedMap(DOWN, intermediate, ((f"{mlp}.down_proj", hidden),))


def _layer_norm_maps(config: LayerNormConfig, layer: int) -> Iterator[AdaptedMap]:
    names = config.names
    prefix = f"{names.layers}.{layer}"
    attention, mlp = f"{prefix}.{names.attention}", f"{prefix}.mlp"
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    sizes: tuple[int, ...] = (query_size, kv_size, kv_size)
    if len(names.qkv) == 1:  # B's rows have the order of the base map's outputs: head by head
        sizes = (sum(sizes),)
    qkv = ((f"{attention}.{name}", size) for name, size in zip(names.qkv, sizes, strict=True))
    up = ("gate_proj", names.up) if config.is_gated else (names.up,)
    yield AdaptedMap(QKV, hidden, tuple(qkv))
    yield AdaptedMap(ATTENTION_OUTPUT, query_size, ((f"{attention}.{names.output}", hidden),))
    yield AdaptedMap(GATE_UP, hidden, tuple((f"{mlp}.{name}", intermediate) for name in up))
    yield AdaptedMap(DOWN, intermediate, ((f"{mlp}.{names.down}", hidden),))
