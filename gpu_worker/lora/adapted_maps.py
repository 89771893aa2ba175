"""The linear maps of a Llama-shaped decoder that adapters may add to, by the checkpoint's names."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from gpu_worker.models.llama_config import LlamaConfig
from kernels.cpu.program.low_rank import MAPS

MapName: TypeAlias = str
"""Of a map as the decoder has it, one of these."""

QKV, ATTENTION_OUTPUT, GATE_UP, DOWN = MAPS


@dataclass(frozen=True, slots=True)
class AdaptedMap:
    """One map of a layer: several of the checkpoint's, whose outputs are joined."""

    name: MapName
    num_in: int
    modules: tuple[tuple[str, int], ...]
    """Of each of them the name in the checkpoint and how many outputs it has."""


def adapted_maps(config: LlamaConfig, layer: int) -> Iterator[AdaptedMap]:
    """What adapters may add to in a layer; of a mixture of experts, attention alone."""
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    yield AdaptedMap(
        QKV,
        hidden,
        (
            (f"{attention}.q_proj", query_size),
            (f"{attention}.k_proj", kv_size),
            (f"{attention}.v_proj", kv_size),
        ),
    )
    yield AdaptedMap(ATTENTION_OUTPUT, query_size, ((f"{attention}.o_proj", hidden),))
    if config.experts is None:
        yield AdaptedMap(
            GATE_UP,
            hidden,
            ((f"{mlp}.gate_proj", intermediate), (f"{mlp}.up_proj", intermediate)),
        )
        yield AdaptedMap(DOWN, intermediate, ((f"{mlp}.down_proj", hidden),))
