"""Finds out whether a decoder of `transformers` can be served, and lets it be loaded."""

import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from gpu_worker.models.config import ModelConfig, read_architecture, read_dtype, read_eos_token_ids
from gpu_worker.models.fallback.attention_calls import (
    AttentionCall,
    batch_dependent_ropes,
    forget_attention,
    record_calls,
    register_attention,
)
from gpu_worker.models.fallback.model import TransformersModel
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.weights.json_fields import JsonFields, ModelError

_LAYER_TYPES: Final = {"full_attention", "sliding_attention"}


class TransformersSource:
    """A model directory that `transformers` can build a causal language model from."""

    def __init__(self, directory: Path, fields: JsonFields) -> None:
        """Read its config and find out how it attends, without its weights.

        Raises:
            ModelError: it is no decoder, or one that the KV pool or paged attention cannot serve.
        """
        self._directory = directory
        architecture = read_architecture(fields)
        try:
            self._hf_config = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever a config's code raises
            raise fields.error("cannot be read", f"by transformers: {error}") from error
        try:
            _refuse_config(self._hf_config)
            max_model_len = _max_model_len(self._hf_config)
            calls = record_calls(self._hf_config, max_model_len)
            _refuse_calls(calls)
        except ModelError as error:
            raise fields.error("architectures", f"names {architecture}: {error}") from error
        if hasattr(self._hf_config, "output_router_logits"):
            self._hf_config.output_router_logits = False  # for a loss
        self.config = self.local_config = ModelConfig(
            architecture=architecture,
            vocab_size=self._hf_config.vocab_size,
            max_model_len=max_model_len,
            num_layers=len(calls),
            num_kv_heads=calls[0].num_kv_heads,
            head_dim=calls[0].head_dim,
            eos_token_ids=read_eos_token_ids(fields),
            dtype=read_dtype(fields),
        )

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None],
        ranks: Ranks | None = None,
    ) -> TransformersModel:
        """Let transformers read the weights, memory-mapped; see `ModelSource.load`."""
        assert ranks is None, "its models are on one device"
        model = TransformersModel()
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        progress(0.0)
        causal: Any
        info: dict[str, Any]
        try:
            causal, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                self._directory,
                config=self._hf_config,
                dtype=dtype,
                attn_implementation=_register_weakly(model),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{self._directory} cannot be loaded: {error}") from error
        for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            if info[problem]:
                names = ", ".join(sorted(map(str, info[problem]))[:5])
                raise ModelError(f"{self._directory} has {problem.replace('_', ' ')}: {names}")
        model.use(causal.to(device).eval())
        progress(1.0)
        return model


def _register_weakly(model: TransformersModel) -> str:
    """Register the attention of a model for as long as there is the model."""
    method = weakref.WeakMethod(model.attend)

    def attend(*args: Any, **options: Any) -> Any:
        bound = method()
        assert bound is not None, "the model runs"
        return bound(*args, **options)

    name = register_attention(attend)
    weakref.finalize(model, forget_attention, name).atexit = False
    return name


def _refuse_config(config: PreTrainedConfig) -> None:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError("it is no causal language model of transformers")
    if config.get_text_config() is not config:
        raise ModelError("it takes more than text")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ModelError("it has an encoder")
    if getattr(model_class, "_is_stateful", False):
        raise ModelError("it has state other than keys and values")
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise ModelError(f"it has layers of type {', '.join(sorted(others))}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ModelError("some of its layers share their keys and values")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise ModelError("it takes no position_ids")


def _refuse_calls(calls: tuple[AttentionCall, ...]) -> None:
    shapes = sorted({(call.num_kv_heads, call.head_dim) for call in calls})
    if len(shapes) > 1:
        raise ModelError(f"its layers differ in kv heads or head dim: {shapes}; the pool has one")


def _max_model_len(config: PreTrainedConfig) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelError(f"max_position_embeddings is {length}; it must be a positive integer")
    # Past these, rotation would depend on the longest sequence of a batch.
    ends = [rope.get("original_max_position_embeddings") for rope in batch_dependent_ropes(config)]
    return min([length, *(int(end) for end in ends if end)])
