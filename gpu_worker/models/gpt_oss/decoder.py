"""Builds the decoder of gpt-oss: a Llama-shaped one, with sinks and experts of its own.

Symbols: `X` experts, `E` hidden size, `I` intermediate size of this rank's experts, `N` output
features, `G` MXFP4 groups of input features.
"""

import torch

from gpu_worker.models.decoder_layer import DecoderLayer
from gpu_worker.models.experts.mixture import make_experts
from gpu_worker.models.experts.routing import Router, read_router
from gpu_worker.models.feed_forward import FeedForward, Gate, GatedMlp
from gpu_worker.models.gpt_oss.config import GptOssConfig
from gpu_worker.models.llama.decoder import (
    LlamaDecoder,
    attention_input,
    attention_output,
    build_decoder,
)
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.linear import make_linear
from gpu_worker.weights.reader import Weights
from gpu_worker.weights.stored.format import MXFP4_GROUP_SIZE
from gpu_worker.weights.stored.mxfp4 import LARGEST_SCALE, NAN_SCALE, Mxfp4Weight
from gpu_worker.weights.tensor_file import Piece
from kernels import ops


def build_gpt_oss(config: GptOssConfig, weights: Weights) -> LlamaDecoder:
    """Build this rank's part of the decoder; `weights.place` says which part."""
    return build_decoder(config, weights, lambda index: _layer(config, index, weights))


def _layer(config: GptOssConfig, index: int, weights: Weights) -> DecoderLayer:
    hidden, layer = config.hidden_size, f"model.layers.{index}"
    attention = f"{layer}.self_attn"
    heads = weights.place.groups(config.num_heads)
    sinks = Piece(f"{attention}.sinks", (config.num_heads,), (slice(heads.start, heads.stop),))
    return DecoderLayer(
        input_norm=weights.tensor(f"{layer}.input_layernorm.weight", hidden),
        qkv=attention_input(config, attention, weights),
        qk_norm=None,
        window=config.windows[index],
        attention_output=attention_output(config, attention, weights),
        mlp_norm=weights.tensor(f"{layer}.post_attention_layernorm.weight", hidden),
        feed_forward=weights.summed(_experts(config, f"{layer}.mlp", weights)),
        sinks=weights.part(sinks, torch.float32),
    )


def _experts(config: GptOssConfig, module: str, weights: Weights) -> FeedForward:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None, "all layers have experts"
    router = read_router(f"{module}.router", experts.num_experts, hidden, weights)
    bias = weights.tensor(f"{module}.router.bias", experts.num_experts, dtype=torch.float32)

    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        return ops.clamped_swiglu(gate_up, config.swiglu_alpha, config.swiglu_limit)

    return make_experts(
        Router(experts, make_linear(router, bias)),
        tuple(
            _expert(config, f"{module}.experts", number, gate, weights)
            for number in range(experts.num_experts)
        ),
        router[:1].to(weights.dtype),
    )


def _expert(
    config: GptOssConfig, module: str, number: int, gate: Gate, weights: Weights
) -> GatedMlp:
    """Read this rank's part of one expert: some of the intermediate features.

    The checkpoint's `gate_up_proj` alternates outputs of gate and up.
    """
    assert config.experts is not None, "all layers have experts"
    num_experts, size = config.experts.num_experts, config.experts.intermediate_size
    hidden = config.hidden_size
    own, features = slice(number, number + 1), weights.place.groups(size)
    of_both = slice(2 * features.start, 2 * features.stop)
    of_gate_up = Piece(f"{module}.gate_up_proj_bias", (num_experts, 2 * size), (own, of_both))
    gate_up_bias = _gate_first(weights.part(of_gate_up)[0])
    down_bias = None
    if weights.place.tensor_rank == 0:  # one rank adds it
        of_down = Piece(f"{module}.down_proj_bias", (num_experts, hidden), (own,))
        down_bias = weights.part(of_down)[0]
    if not config.is_mxfp4:
        wide, narrow = (num_experts, hidden, 2 * size), (num_experts, size, hidden)  # transposed
        inputs = slice(features.start, features.stop)
        down = weights.part(Piece(f"{module}.down_proj", narrow, (own, inputs)))[0].t()
        gate_up = weights.part(Piece(f"{module}.gate_up_proj", wide, (own, slice(None), of_both)))
        return GatedMlp(
            weights.of_weight(module, _gate_first(gate_up[0].t()), gate_up_bias),
            weights.of_weight(module, down.contiguous(), down_bias),
            gate,
        )
    assert weights.packed is not None, "config.json says that experts are packed"
    groups = slice(features.start // MXFP4_GROUP_SIZE, features.stop // MXFP4_GROUP_SIZE)
    wide = num_experts, 2 * size, hidden // MXFP4_GROUP_SIZE
    packed = _read_mxfp4(weights, f"{module}.gate_up_proj", wide, (own, of_both))
    gate_up_weight = Mxfp4Weight(_gate_first(packed.blocks), _gate_first(packed.scales))
    narrow = num_experts, hidden, size // MXFP4_GROUP_SIZE
    down_weight = _read_mxfp4(weights, f"{module}.down_proj", narrow, (own, slice(None), groups))
    return GatedMlp(
        weights.packed.mxfp4(gate_up_weight, gate_up_bias),
        weights.packed.mxfp4(down_weight, down_bias),
        gate,
    )


def _read_mxfp4(
    weights: Weights, name: str, shape: tuple[int, int, int], where: tuple[slice, ...]
) -> Mxfp4Weight:
    """Read a part of one expert from the stacked weights of all experts.

    `shape`, `[X, N, G]`, is the shape of the stack; `where` says which part to read.
    """
    blocks = weights.part(
        Piece(f"{name}_blocks", (*shape, MXFP4_GROUP_SIZE // 2), where), torch.uint8
    )
    scales = weights.part(Piece(f"{name}_scales", shape, where), torch.uint8)
    if not scales.is_meta and (largest := int(scales.max())) > LARGEST_SCALE:
        if largest == NAN_SCALE:
            raise ModelError(f"{name}_scales has NaN")
        raise ModelError(f"{name}_scales has {largest}; at most {LARGEST_SCALE} is supported")
    return Mxfp4Weight(blocks[0], scales[0])


def _gate_first(rows: torch.Tensor) -> torch.Tensor:
    """Reorder rows `[2 * I, ...]` that alternate gate and up: first all of gate, then all of up."""
    return rows.view(-1, 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
