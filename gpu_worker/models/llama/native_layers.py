"""Runs a decoder's layers in native code, if that code supports all of them."""

import torch

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.decoder_layer import DecoderLayer
from gpu_worker.models.feed_forward import GatedMlp, silu_gate
from gpu_worker.models.llama.config import LlamaConfig
from kernels.cpu.fields import LayerCaches
from kernels.cpu.linear import PackedLinear
from kernels.cpu.program.decoder import NativeDecoder
from kernels.cpu.program.layer_calls import NativeLayer
from kernels.cpu.program.workspace import NativeShape
from kernels.kv_formats import LARGEST


class NativeLayers:
    """Makes a `NativeDecoder` of a decoder's layers, if native code supports all of them."""

    def __init__(
        self,
        config: LlamaConfig,
        layers: tuple[DecoderLayer, ...],
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> None:
        self._final_norm = final_norm
        self._cos_sin = cos_sin
        native = [_native_layer(layer) for layer in layers]
        self._layers = [layer for layer in native if layer is not None]
        is_bfloat16 = final_norm.dtype is torch.bfloat16
        self._is_whole = config.has_c_layers and is_bfloat16 and len(self._layers) == len(layers)
        self._shape = NativeShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
            has_qk_norm=any(layer.qk_norm is not None for layer in self._layers),
            is_gated=all(layer.gate_up.can_gate for layer in self._layers),
        )
        self._key_cache: torch.Tensor | None = None
        self._decoder: NativeDecoder | None = None

    def over(self, pool: KvPool) -> NativeDecoder | None:
        """Return the layers bound to this pool's memory; None if native code cannot run them."""
        if not self._is_whole:
            return None
        if self._key_cache is not pool.key_cache(0):
            self._decoder = self._bound_to(pool)
            self._key_cache = pool.key_cache(0)
        return self._decoder

    def _bound_to(self, pool: KvPool) -> NativeDecoder | None:
        if not set(pool.layout.dtypes) <= {self._final_norm.dtype, *LARGEST}:
            return None
        caches = [
            LayerCaches(
                pool.key_cache(index),
                pool.value_cache(index),
                pool.key_scales(index),
                pool.value_scales(index),
            )
            for index in range(len(self._layers))
        ]
        return NativeDecoder(self._shape, self._layers, self._final_norm, self._cos_sin, caches)


def _native_layer(layer: DecoderLayer) -> NativeLayer | None:
    mlp = layer.feed_forward
    if not isinstance(mlp, GatedMlp) or mlp.gate is not silu_gate or layer.sinks is not None:
        return None
    if layer.input_norm is None or layer.mlp_norm is None:
        return None
    qkv, output, gate_up, down = layer.qkv, layer.attention_output, mlp.gate_up, mlp.down
    if not (
        isinstance(qkv, PackedLinear)
        and isinstance(output, PackedLinear)
        and isinstance(gate_up, PackedLinear)
        and isinstance(down, PackedLinear)
    ):
        return None
    norms = layer.qk_norm
    return NativeLayer(
        input_norm=layer.input_norm,
        qkv=qkv,
        qk_norm=None if norms is None else (norms.query, norms.key),
        window=layer.window,
        attention_output=output,
        mlp_norm=layer.mlp_norm,
        gate_up=gate_up,
        down=down,
    )
