"""Builds a decoder from the weights in a Hugging Face directory.

Symbols: `E` hidden size, `N` output features of a linear map, `K` its input features.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gpu_worker.checkpoint import Checkpoint
from gpu_worker.json_fields import ModelError
from gpu_worker.model_config import ModelConfig
from gpu_worker.models.decoder import Decoder, DecoderLayer, QkNorm
from gpu_worker.models.linear import Linear, make_linear
from gpu_worker.models.rope import rotary_table

_MAX_NAMES_SHOWN = 5


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> Decoder:
    """Read, convert to `dtype`, fuse, and put on `device` all weights of a model.

    Besides the weights themselves it needs room for those of one linear map.

    Args:
        directory: holds `model.safetensors`, or shards and `model.safetensors.index.json`.
        config: of the same directory.
        dtype: of weights and activations.
        device: where they go.
        progress: called with the fraction of weights read, growing up to 1.

    Raises:
        ModelError: a file is missing or damaged, or tensors are missing, unexpected or misshapen.
    """
    shapes = _tensor_shapes(config)
    checkpoint = Checkpoint(directory)
    _check_names(directory, checkpoint, shapes, config)
    loader = _Loader(checkpoint, shapes, dtype, device, progress)
    embedding = loader.tensor("model.embed_tokens.weight")
    if config.tie_word_embeddings:
        lm_head = make_linear(embedding, None)
    else:
        lm_head = loader.linear("lm_head")
    return Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(_layer(loader, config, index) for index in range(config.num_layers)),
        final_norm=loader.tensor("model.norm.weight"),
        lm_head=lm_head,
        cos_sin=rotary_table(config.rope, config.head_dim, config.max_model_len).to(device),
    )


class _Loader:
    """Reads tensors of known shapes and reports progress."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._num_elems = sum(map(math.prod, shapes.values()))
        self._num_elems_read = 0

    def tensor(self, *names: str) -> torch.Tensor:
        """Tensors joined along their first dimension, in one allocation."""
        rows = [self._shapes[name][0] for name in names]
        rest = self._shapes[names[0]][1:]
        out = torch.empty(sum(rows), *rest, dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(out, rows), strict=True):
            self._checkpoint.read_into(name, part)
            self._num_elems_read += part.numel()
            self._progress(self._num_elems_read / self._num_elems)
        return out

    def linear(self, *modules: str) -> Linear:
        """Linear maps of one input, fused into one: their outputs joined."""
        biases = [f"{module}.bias" for module in modules]
        bias = self.tensor(*biases) if biases[0] in self._shapes else None
        return make_linear(self.tensor(*(f"{module}.weight" for module in modules)), bias)


def _layer(loader: _Loader, config: ModelConfig, index: int) -> DecoderLayer:
    layer = f"model.layers.{index}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    return DecoderLayer(
        input_norm=loader.tensor(f"{layer}.input_layernorm.weight"),
        qkv=loader.linear(*(f"{attention}.{name}_proj" for name in "qkv")),
        qk_norm=QkNorm(
            loader.tensor(f"{attention}.q_norm.weight"),
            loader.tensor(f"{attention}.k_norm.weight"),
        )
        if config.qk_norm
        else None,
        attention_output=loader.linear(f"{attention}.o_proj"),
        mlp_norm=loader.tensor(f"{layer}.post_attention_layernorm.weight"),
        gate_up=loader.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=loader.linear(f"{mlp}.down_proj"),
    )


def _tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of this model has."""
    hidden = config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = (  # name, N, K, has a bias
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.output_bias),
        ("mlp.gate_proj", config.intermediate_size, hidden, config.mlp_bias),
        ("mlp.up_proj", config.intermediate_size, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, config.intermediate_size, config.mlp_bias),
    )
    norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
    if config.qk_norm:
        norms += [("self_attn.q_norm", config.head_dim), ("self_attn.k_norm", config.head_dim)]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        for name, size in norms:
            shapes[f"{layer}.{name}.weight"] = (size,)
        for name, num_out, num_in, has_bias in linears:
            shapes[f"{layer}.{name}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (num_out,)
    return shapes


def _check_names(
    directory: Path,
    checkpoint: Checkpoint,
    shapes: dict[str, tuple[int, ...]],
    config: ModelConfig,
) -> None:
    missing = sorted(shapes.keys() - checkpoint.names)
    if missing:
        raise ModelError(f"{directory} lacks {_some(missing)} of {config.architecture}")
    unexpected = sorted(
        name
        for name in checkpoint.names - shapes.keys()
        # Old checkpoints carry the rotary frequencies, and some carry a tied head a second time.
        if not name.endswith(".rotary_emb.inv_freq")
        and not (name == "lm_head.weight" and config.tie_word_embeddings)
    )
    if unexpected:
        raise ModelError(f"{directory} has {_some(unexpected)}, unknown to {config.architecture}")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
