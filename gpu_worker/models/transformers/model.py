"""Runs any decoder of `transformers` whose attention can be replaced by paged attention.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim, `E` hidden size,
`V` vocabulary.
"""

import inspect
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.attention import AttentionMetadata, attend, store_kv
from gpu_worker.models.text_part import PREFIXES, has_text_part, name_alone, plain_rope
from gpu_worker.models.transformers.attention import (
    CHUNKED,
    AttentionCall,
    ObservedPass,
    base_name,
    batch_dependent_ropes,
    forget_attention,
    read_options,
    record_calls,
    register_attention,
)
from gpu_worker.models.transformers.own_attention import (
    has_own_attention,
    use_interface,
    with_alibi,
)
from gpu_worker.models.transformers.recurrent import RecurrentStates
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.weights.checkpoint import Checkpoint, has_nan
from gpu_worker.weights.json_fields import JsonFields, ModelError, read_json
from gpu_worker.weights.linear import Linear, make_linear
from gpu_worker.weights.model_config import (
    ModelConfig,
    read_architecture,
    read_dtype,
    read_eos_token_ids,
)


class TransformersModel:
    """A decoder, stateless between calls of `forward`. Call it in `torch.inference_mode()`."""

    def __init__(self) -> None:
        self._base: Any = None
        self._head: Any = None
        self._pool: KvPool | None = None
        self._metadata: AttentionMetadata | None = None
        self._places: dict[int, int] = {}
        self._reading: frozenset[int] = frozenset()
        self._states: RecurrentStates | None = None
        self._counts_tokens = False
        self._windows: dict[int, int] = {}
        self._first_position = 0
        self._positions: torch.Tensor | None = None

    def use(self, causal: Any, recording: ObservedPass) -> None:
        """Make this object compute with `causal`. Called once.

        The attention of `causal` must call `self.attend_in`.
        """
        calls, recurrent, self._first_position = recording
        self._windows = {call.layer: call.window for call in calls if isinstance(call.window, int)}
        numbers = {call.layer: number for number, call in enumerate(_storing(calls))}
        self._places = {call.layer: numbers[call.source] for call in calls}
        self._reading = frozenset(call.layer for call in calls if call.source != call.layer)
        name = base_name(causal)
        self._base = getattr(causal, name)
        if recurrent:
            self._states = RecurrentStates(self._base, recurrent)
        kept = [
            child
            for module in causal.modules()
            if type(module).__name__ in _READING_WEIGHTS
            for child in module.children()
        ]
        for module in causal.modules():
            if module not in kept:
                _replace_linear(module)
        self._counts_tokens = getattr(causal.config, "attn_temperature_tuning", False)
        # The head is the causal model without its base: the map to logits, scales, caps, biases.
        setattr(causal, name, _Given(self._base))
        self._head = causal

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute the final hidden states of a step's tokens; see `LlamaDecoder.forward`."""
        self._pool, self._metadata, self._positions = pool, metadata, positions
        if self._states is not None:
            self._states.begin_step(pool, metadata)
        try:
            out = self._base(
                input_ids=token_ids.unsqueeze(0),
                position_ids=(positions + self._first_position).unsqueeze(0),
                past_key_values=_Seen(positions) if self._counts_tokens else None,
                use_cache=False,
            )
        finally:
            self._pool = self._metadata = self._positions = None
            if self._states is not None:
                self._states.end_step()
        hidden: torch.Tensor = out.last_hidden_state[0]
        return metadata.select(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the next token's logits, float32 `[S, V]`, from final hidden states `[S, E]`."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden.unsqueeze(0)).logits[0]
        return logits.float()

    def attend_in(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [1, H, T, D]
        key: torch.Tensor,  # [1, HKV, T, D]
        value: torch.Tensor,  # [1, HKV, T, D]
        attention_mask: None = None,  # noqa: ARG002  models pass it by position or by name
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend for one layer of the current step; see `register_attention`."""
        assert self._pool is not None, "only `forward` attends"
        assert self._metadata is not None, "only `forward` attends"
        options = read_options(query, given)
        layer_idx: Any = module.layer_idx
        layer = self._places[layer_idx]
        # Some models rotate queries and keys in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if options.alibi_slopes is not None:
            assert self._positions is not None, "only `forward` attends"
            query, key = with_alibi(
                query,
                key,
                options.alibi_slopes,
                self._positions,
                options.scale,
                options.alibi_weight,
            )
        value_dim, missing = value.shape[3], key.shape[3] - value.shape[3]
        if layer_idx not in self._reading:
            if missing:  # the pool has the same head dim for keys and values
                value = functional.pad(value, (0, missing))
            key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
            store_kv(key, value, self._pool, layer, self._metadata)
        attended = attend(
            query[0].transpose(0, 1),
            self._pool,
            layer,
            self._metadata,
            options.scale,
            window=self._windows.get(layer_idx),
            softcap=options.softcap,
            sinks=options.sinks,
        )
        heads = attended.view(1, query.shape[2], query.shape[1], -1)
        return heads[..., :value_dim], None


class _Seen:
    """A cache for models that ask their cache for the number of earlier tokens (Llama 4).

    The model adds that number to a token's index in the step, to get the token's position. A step
    has tokens of several sequences, so the number differs by token.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, _layer: int = 0) -> torch.Tensor:
        return self._before

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
        return key, value


class _Given(nn.Module):
    """Replaces a causal model's base, which is the model without its head.

    Takes final hidden states as its input, and returns them.
    """

    def __init__(self, base: nn.Module) -> None:
        """Copy the numbers among the attributes of `base`.

        Causal models read some of these numbers from their base, such as a scale of logits.
        """
        super().__init__()
        for name, value in vars(base).items():
            if isinstance(value, (int, float)):
                setattr(self, name, value)

    def forward(
        self,
        input_ids: None = None,  # noqa: ARG002  some models pass it by position
        *,
        inputs_embeds: torch.Tensor,
        **_: Any,
    ) -> "_HiddenStates":
        return _HiddenStates(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> "_Given":
        """This object, because some causal models call `decoder` of their base, not the base."""
        return self


@dataclass
class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):
    """What `_Given` returns in place of the output of a causal model's base.

    Has the fields that causal models read from the output of their base.
    """

    cache_params: None = None
    router_logits: None = None
    shared_kv_states: None = None


_READING_WEIGHTS: Final = {"LongcatFlashTopkRouter"}
"""Modules that read the weights of their linear maps instead of calling the maps. `_replace_linear`
would empty these weights, so it is not called for these maps."""


def _replace_linear(module: nn.Module) -> None:
    """Let a linear map of transformers compute with our `Linear`; other modules do not change.

    `Linear` is faster, and its result for a token does not depend on the other tokens of the step.
    `Linear` takes the weight, perhaps in another layout, and the module's own weight is emptied.
    """
    if type(module) is nn.Linear:
        weight, bias = module.weight, module.bias
    elif type(module) is Conv1D:  # GPT-2's linear map, with a transposed weight
        weight, bias = module.weight.t().contiguous(), module.bias
    else:
        return
    linear: Linear = make_linear(weight.detach(), None if bias is None else bias.detach())
    module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return linear(x.flatten(0, -2).contiguous()).view(*x.shape[:-1], -1)

    module.forward = forward  # type: ignore[method-assign]


_NAMES_ALONE: Final = {f"^{re.escape(prefix)}": alone for prefix, alone in PREFIXES.items()}
"""Renames tensors as `name_alone` does."""
_ORIGINAL_LEN: Final = "original_max_position_embeddings"
_LAYER_TYPES: Final = {"full_attention", "sliding_attention", CHUNKED}
_RECURRENT_TYPES: Final = {"conv", "hybrid", "linear_attention", "mamba", "mlp", "moe"}
_RECURRENT_FAMILIES: Final = {
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
"""The supported model types with recurrent layers. Tests compare each of them with transformers."""
_LONGEST_BY_STATE: Final = 131_072
"""The longest sequence, in tokens, of a recurrent model whose config has no limit. This limit
bounds the memory that the worker allocates for each row's token ids. The recurrent states need
no limit, because they take the same memory for a sequence of any length."""


class TransformersSource:
    """A model directory that `transformers` can build a causal language model from."""

    def __init__(
        self, directory: Path, fields: JsonFields, max_model_len: int | None = None
    ) -> None:
        """Read the config, and find out how the model attends, without reading weights.

        With LongRoPE, `max_model_len` decides between the short and the long factors.

        Raises:
            ModelError: The model is not a decoder, or the KV pool or paged attention does not
                support it.
        """
        self._directory = directory
        architecture = read_architecture(fields)
        try:
            config = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the config's code may raise anything
            raise fields.error("cannot be read", f"by transformers: {error}") from error
        self._is_part = has_text_part(read_json(directory / "config.json"))
        stored = fields.nested("quantization_config").values
        self._hf_config = _alone(config, str(fields.get("model_type"))) if self._is_part else config
        try:
            _refuse_config(self._hf_config)
            if getattr(self._hf_config, "rope_parameters", None):
                if getattr(self._hf_config, _ORIGINAL_LEN, 0) is None:  # null counts as absent
                    delattr(self._hf_config, _ORIGINAL_LEN)
                # Moves a top-level original length into `rope_parameters`, as models do later.
                self._hf_config.standardize_rope_params()
            _choose_factors(self._hf_config, max_model_len)
            longest = _max_model_len(self._hf_config)
            self._recording = record_calls(
                self._hf_config, longest, is_recurrent=_is_recurrent(self._hf_config)
            )
            calls, recurrent, first_position = self._recording
            _refuse_sharing(calls)
        except ModelError as error:
            raise fields.error("architectures", f"names {architecture}: {error}") from error
        if stored:
            self._hf_config.quantization_config = {**stored, "dequantize": True}
        if hasattr(self._hf_config, "output_router_logits"):
            self._hf_config.output_router_logits = False  # only for training
        storing = _storing(calls)
        shapes = [(call.num_kv_heads, call.head_dim) for call in storing]
        self.config = self.local_config = ModelConfig(
            architecture=architecture,
            vocab_size=self._hf_config.vocab_size,
            max_model_len=longest - first_position,
            num_layers=len(storing),
            num_kv_heads=calls[0].num_kv_heads if calls else 0,
            head_dim=calls[0].head_dim if calls else 0,
            kv_shapes=tuple(shapes) if len(set(shapes)) > 1 else (),
            windows=tuple(call.window for call in storing),
            has_exact_keys=any(call.has_alibi for call in calls),
            num_states=len(recurrent),
            state_bytes=max((layer.num_bytes for layer in recurrent), default=0),
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
        """Let transformers read the weights from memory-mapped files; see `ModelSource.load`."""
        assert ranks is None, "models of transformers run on one device"
        if self._recording.recurrent and device.type != "cpu":
            raise ModelError(
                f"the device is {device}; {self.config.architecture} has recurrent layers, which"
                " are supported only on cpu"
            )
        Checkpoint(self._directory)  # its errors name the file
        model = TransformersModel()
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        progress(0.0)
        causal: Any
        info: dict[str, Any]
        attention = _register_weakly(model)
        has_own = has_own_attention(self._hf_config)
        try:
            causal, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                self._directory,
                config=self._hf_config,
                dtype=dtype,
                attn_implementation="eager" if has_own else attention,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                key_mapping=_NAMES_ALONE if self._is_part else None,
            )
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{self._directory} cannot be loaded: {error}") from error
        if self._is_part:
            unexpected = info["unexpected_keys"]
            info["unexpected_keys"] = [name for name in unexpected if name_alone(name) is not None]
        for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            if info[problem]:
                names = ", ".join(sorted(map(str, info[problem]))[:5])
                raise ModelError(f"{self._directory} has {problem.replace('_', ' ')}: {names}")
        for name, parameter in causal.named_parameters():
            if has_nan(parameter):
                raise ModelError(f"{self._directory}: {name} has NaN")
        if has_own:
            use_interface(causal, attention)
        model.use(causal.to(device).eval(), self._recording)
        progress(1.0)
        return model


def _register_weakly(model: TransformersModel) -> str:
    """Register a model's attention in transformers until the model is deleted; return its name."""
    method = weakref.WeakMethod(model.attend_in)

    def attend(*args: Any, **options: Any) -> Any:
        bound = method()
        assert bound is not None, "the model runs"
        return bound(*args, **options)

    name = register_attention(attend)
    weakref.finalize(model, forget_attention, name).atexit = False
    return name


def _alone(whole: PreTrainedConfig, model_type: str) -> PreTrainedConfig:
    """Return a config for the text part alone, as a separate model of type `model_type`."""
    part = whole.get_text_config()
    config_class = CONFIG_MAPPING[model_type]
    if isinstance(part, config_class):
        return part
    # The library can run the part only within the whole. But a model of type `model_type` computes
    # the same for text.
    values = part.to_dict() | {"model_type": model_type, "norm_topk_prob": True}
    alone = config_class.from_dict(values | {"rope_parameters": plain_rope(part.rope_parameters)})
    # Chooses how tensors are renamed and transposed.
    alone.model_type = whole.model_type  # type: ignore[misc]
    return alone


def _refuse_config(config: PreTrainedConfig) -> None:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError("it is not a causal language model of transformers")
    if config.get_text_config() is not config:
        raise ModelError("it has inputs other than text")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ModelError("it has an encoder")
    if _is_recurrent(config) and config.model_type not in _RECURRENT_FAMILIES:
        raise ModelError(
            "it has state other than keys and values; of such models, these types are supported:"
            f" {', '.join(sorted(_RECURRENT_FAMILIES))}"
        )
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES - _RECURRENT_TYPES
    if others:
        raise ModelError(f"it has layers of type {', '.join(sorted(others))}")
    takes_positions = "position_ids" in inspect.signature(model_class.forward).parameters
    if not (takes_positions or has_own_attention(config) or _is_recurrent(config)):
        raise ModelError("it takes no position_ids")


def _is_recurrent(config: PreTrainedConfig) -> bool:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    has_types = not _RECURRENT_TYPES.isdisjoint(getattr(config, "layer_types", None) or ())
    return has_types or getattr(model_class, "_is_stateful", False)


def _storing(calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    """Return the calls whose layers store keys and values of their own."""
    return [call for call in calls if call.source == call.layer]


def _refuse_sharing(calls: tuple[AttentionCall, ...]) -> None:
    windows = {call.layer: call.window for call in calls}
    for call in calls:
        if call.window != windows[call.source]:
            raise ModelError(
                f"layer {call.layer} has window {call.window}, and shares the keys and values of"
                f" layer {call.source}, which has window {windows[call.source]}"
            )


def _max_model_len(config: PreTrainedConfig) -> int:
    # MPT and Bloom, whose positions have no table, name the length that they were trained with.
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    default = _LONGEST_BY_STATE if _is_recurrent(config) else None
    length = next((getattr(config, name) for name in names if hasattr(config, name)), default)
    if not isinstance(length, int) or length < 1:
        raise ModelError(f"max_position_embeddings is {length}; it must be a positive integer")
    # Beyond these lengths, rotation would depend on the longest sequence of a batch.
    ends = [
        rope.get(_ORIGINAL_LEN)
        for rope in batch_dependent_ropes(config)
        if "long_factor" not in rope or rope["short_factor"] != rope["long_factor"]
    ]
    return min([length, *(int(end) for end in ends if end)])


def _choose_factors(config: PreTrainedConfig, max_model_len: int | None) -> None:
    """Choose LongRoPE's factors in a config of transformers, as `with_long_factors` does."""
    for rope in batch_dependent_ropes(config):
        original = rope.get(_ORIGINAL_LEN)
        if max_model_len is None or original is None or "long_factor" not in rope:
            continue
        if max_model_len > original:
            rope["short_factor"] = rope["long_factor"]
