"""Computes how much memory a sequence of 8,192 tokens holds while it decodes, by kind of layers.

    python bench/kv/groups.py

The script needs only a model's sizes; it runs the code with which a worker lays out blocks and a
scheduler counts them. KV is in bfloat16, states are in float32. For comparison, it also applies
vLLM's rule: a layer holds the blocks of 16 tokens in its window, or one state; if the model has
recurrent layers, blocks grow until a layer's KV in a block is as large as a state.
"""

from dataclasses import dataclass
from typing import Final

import torch

from contract.worker_limits import Chunk, KvWindow, window_length
from gpu_worker.kv.layout import block_bytes, group_attention, place_states
from gpu_worker.weights.model_config import ModelConfig
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.space.kv_groups import KvGroups

NUM_TOKENS: Final = 8192
_BLOCK_SIZE: Final = 16
_MAX_MODEL_LEN: Final = 2**20
_DTYPE: Final = torch.bfloat16
_MIB: Final = 2**20


def model(
    num_layers: int,
    num_kv_heads: int = 0,
    head_dim: int = 0,
    *,
    window: KvWindow = None,
    full_every: int = 0,
    full_shape: tuple[int, int] | None = None,
    is_first_full: bool = False,
    latent_dim: int | None = None,
    num_states: int = 0,
    state: int = 0,
) -> ModelConfig:
    """Make a model of `num_layers` attention layers and `num_states` states of `state` numbers.

    With `window`, every `full_every`-th layer sees all tokens; 0: none does. `full_shape` is the
    number of KV heads and the head dim of the layers that see all tokens; None: as other layers.
    """
    windows = tuple(
        None
        if (is_first_full and layer == 0) or (full_every and layer % full_every == full_every - 1)
        else window
        for layer in range(num_layers)
    )
    shape = num_kv_heads, head_dim
    return ModelConfig(
        architecture="",
        vocab_size=1,
        max_model_len=_MAX_MODEL_LEN,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        latent_dim=latent_dim,
        eos_token_ids=(),
        windows=windows,
        kv_shapes=tuple(shape if each else full_shape for each in windows) if full_shape else (),
        num_states=num_states,
        state_bytes=state * torch.float32.itemsize,
        dtype="bfloat16",
    )


MODELS: Final = {
    "Llama 3.1 8B": model(32, 8, 128),
    "Mistral 7B v0.1": model(32, 8, 128, window=4096),
    "Gemma 2 9B": model(42, 8, 256, window=4096, full_every=2),
    "Gemma 3 1B": model(26, 1, 256, window=512, full_every=6),
    "Gemma 3 27B": model(62, 16, 128, window=1024, full_every=6),
    "Gemma 3n E2B, E4B": model(20, 2, 256, window=512, full_every=5),
    "Gemma 4 E2B": model(15, 1, 256, window=512, full_every=5, full_shape=(1, 512)),
    "Gemma 4 E4B": model(24, 2, 256, window=512, full_every=6, full_shape=(2, 512)),
    "Gemma 4 26B-A4B": model(30, 8, 256, window=1024, full_every=6, full_shape=(2, 512)),
    "Gemma 4 31B": model(60, 16, 256, window=1024, full_every=6, full_shape=(4, 512)),
    "gpt-oss 20B": model(24, 8, 64, window=128, full_every=2),
    "Command R7B (Cohere 2)": model(32, 8, 128, window=4096, full_every=4),
    "OLMo 3 7B": model(32, 32, 128, window=4096, full_every=4),
    "Ministral 8B": model(36, 8, 128, window=32768, full_every=4),
    "Llama 4 Scout, Maverick": model(48, 8, 128, window=Chunk(8192), full_every=4),
    # Its values, of 128 dimensions, take the room of keys; its first layer sees all tokens, too.
    "MiMo-V2-Flash": model(
        48, 8, 192, window=128, full_every=6, full_shape=(4, 192), is_first_full=True
    ),
    "DeepSeek V2-Lite": model(27, 1, 576, latent_dim=512),
    "DeepSeek V3, Kimi K2": model(61, 1, 576, latent_dim=512),
    "GLM-4.7-Flash": model(47, 1, 576, latent_dim=512),
    "MiniCPM3-4B": model(62, 1, 288, latent_dim=256),
    "Qwen3-Next 80B": model(12, 2, 256, num_states=36, state=32 * 128 * 128 + 4 * 8192),
    "Granite 4.0 H Tiny": model(4, 4, 128, num_states=36, state=48 * 64 * 128 + 4 * 3328),
    "Nemotron-H 8B": model(4, 8, 128, num_states=24, state=128 * 64 * 128 + 4 * 10240),
    "LFM2-1.2B": model(6, 8, 64, num_states=10, state=3 * 2048),
    "Jamba v0.1": model(4, 8, 128, num_states=28, state=8192 * (16 + 4)),
    "Mamba 2.8B": model(0, num_states=64, state=5120 * (16 + 4)),
    "Falcon Mamba 7B": model(0, num_states=64, state=8192 * (16 + 4)),
    "Mamba 2 2.7B": model(0, num_states=64, state=80 * 64 * 128 + 4 * 5376),
}


@dataclass(frozen=True, slots=True)
class Held:
    """The memory that a sequence holds."""

    block_size: int
    bytes_per_block: int
    windows: tuple[object, ...]
    """The windows of the KV groups."""
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def held(config: ModelConfig) -> Held:
    """Return the blocks that a sequence of `NUM_TOKENS` tokens holds while it decodes."""
    groups, block_size = group_attention(config, _DTYPE, _MAX_MODEL_LEN), _BLOCK_SIZE
    if config.num_states:
        groups, block_size = place_states(config, block_size, _DTYPE, groups)
    scheduler_config = SchedulerConfig(
        num_blocks=2**20,
        block_size=block_size,
        max_num_seqs=1,
        max_num_batched_tokens=2048,
        max_model_len=_MAX_MODEL_LEN,
        kv_windows=groups.windows,
    )
    num_blocks = len(KvGroups(scheduler_config).kept(NUM_TOKENS))
    of_block = block_bytes(config, block_size, _DTYPE, groups)
    return Held(block_size, of_block, groups.windows, num_blocks)


def vllm_bytes(config: ModelConfig) -> int:
    """Return the bytes that such a sequence holds by vLLM's rule."""
    of_token = _bytes_of_token(config, 0) if config.num_layers else 0
    size, page = _BLOCK_SIZE, config.state_bytes
    if config.num_states and of_token:
        size *= -(-config.state_bytes // (_BLOCK_SIZE * of_token))
        page = size * of_token
    num_bytes = config.num_states * page
    for layer, window in enumerate(config.windows):
        length = window_length(window)
        behind = 0 if length is None else max(0, NUM_TOKENS - length + 1) // size
        if isinstance(window, Chunk):
            behind = NUM_TOKENS // window.num_tokens * window.num_tokens // size
        num_bytes += (-(-NUM_TOKENS // size) - behind) * size * _bytes_of_token(config, layer)
    return num_bytes


def _bytes_of_token(config: ModelConfig, layer: int) -> int:
    """Return the bytes of a token's KV in one layer."""
    num_sides = 1 if config.latent_dim else 2
    num_kv_heads, head_dim = config.kv_shape(layer)
    return num_sides * num_kv_heads * head_dim * _DTYPE.itemsize


def main() -> None:
    print("| model | layers | tokens of a block | held | vLLM's rule | all tokens in all layers |")
    print("|---|---|---|---|---|---|")
    for name, config in MODELS.items():
        it = held(config)
        windows = [window_length(window) for window in config.windows if window is not None]
        kind = "chunks" if any(isinstance(each, Chunk) for each in config.windows) else "a window"
        layers = [
            f"{len(windows)} with {kind} of {max(windows):,}" if windows else "",
            f"{config.num_layers - len(windows)} that see all" if None in config.windows else "",
            f"{config.num_states} recurrent" if config.num_states else "",
        ]
        if config.latent_dim:
            layers = [f"{config.num_layers} with a latent of {config.head_dim}"]
        without = "" if config.num_states else f"{_mib(_everything(config))} MiB"
        print(
            f"| {name} | {', '.join(filter(None, layers))} | {it.block_size:,}"
            f" | {_mib(it.num_bytes)} MiB | {_mib(vllm_bytes(config))} MiB | {without} |"
        )


def _everything(config: ModelConfig) -> int:
    return NUM_TOKENS * sum(_bytes_of_token(config, layer) for layer in range(config.num_layers))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f}" if num_bytes >= 10 * _MIB else f"{num_bytes / _MIB:.1f}"


if __name__ == "__main__":
    main()
