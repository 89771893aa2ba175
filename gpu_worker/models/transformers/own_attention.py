"""Makes models with their own attention code use the attention interface of transformers.

Symbols: `B` the batch size, always 1, `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

Attend = Callable[..., tuple[torch.Tensor, None]]
"""An attention of transformers; see `register_attention`."""

ALIBI_DIM: Final = 8
"""Number of dimensions that `with_alibi` appends to queries and keys. Only 2 of them are used; the
others keep memory aligned."""


def with_alibi(
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, H, T, D]
    slopes: torch.Tensor,  # [H]
    positions: torch.Tensor,  # int64[T]
    scale: float,
    weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append dimensions to queries and keys, so that the product of the two includes ALiBi's bias.

    ALiBi's bias is `slope * (key position - query position)`. Softmax ignores what all scores of a
    query have in common, so a bias of `slope * key position` has the same effect. Attention
    multiplies each product by `scale`, so the appended dimensions must contribute `bias / scale`.

    The queries' dimensions hold the power of two nearest to `1 / scale`, which 16 bits represent
    exactly. The keys' dimensions hold `bias / scale`, divided by this power of two. Each key holds
    this quotient as the sum of two numbers. With a single bfloat16, the bias would be wrong by up
    to a whole position from position 257 on.
    """
    one = 2.0 ** round(-math.log2(scale))
    bias = slopes.unsqueeze(1) * positions  # [H, T], in the slopes' dtype, as in transformers
    bias = bias.float() * (weight / (scale * one))
    high = bias.to(key.dtype)
    low = (bias - high).to(key.dtype)
    ones = query.new_zeros(*query.shape[:3], ALIBI_DIM)
    ones[..., :2] = one
    biases = key.new_zeros(*key.shape[:3], ALIBI_DIM)
    biases[..., 0], biases[..., 1] = high, low
    return torch.cat((query, ones), -1), torch.cat((key, biases), -1)


def has_own_attention(config: PreTrainedConfig) -> bool:
    """Whether models of the config's type need `use_interface`."""
    return config.model_type in _FAMILIES


def use_interface(causal: Any, name: str) -> None:
    """Make a model that was built with eager attention use the attention registered as `name`."""
    causal.config._attn_implementation = name  # noqa: SLF001 - else it makes masks of T x T
    attend = AttentionInterface._global_mapping[name]  # noqa: SLF001 - as it was registered
    class_name, method, replace = _FAMILIES[causal.config.model_type]
    modules = [module for module in causal.modules() if type(module).__name__ == class_name]
    for layer_idx, module in enumerate(modules):
        module.layer_idx = layer_idx
        setattr(module, method, partial(replace, module, attend))
    if causal.config.model_type == "mpt":
        # It makes a mask and biases for whole sequences; Quire's attention needs neither.
        base = causal.base_model
        base.build_mpt_alibi_tensor = lambda *_, **__: None
        forward, mask = base.forward, torch.zeros(1, 1, 1, 1)
        base.forward = lambda **given: forward(**{**given, "attention_mask": mask})
    for module in causal.modules():
        if type(module).__name__ == "FalconLinear":  # the same map, but it rounds differently
            module.__class__ = nn.Linear


def _by_heads(
    module: Any,
    attend: Attend,
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, H, T, D]
    value: torch.Tensor,  # [B, H, T, D]
    *_: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Replace `_attn` of GPT-J and CodeGen; return `[B, H, T, D]`, and no attention weights."""
    attended, _weights = attend(module, query, key, value, None, **options)
    return attended.transpose(1, 2), None


def _openai(
    module: Any,
    attend: Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
) -> list[torch.Tensor]:
    return [_by_heads(module, attend, query, key.transpose(2, 3), value)[0]]


def _gpt_neo(module: Any, attend: Attend, *given: Any) -> tuple[torch.Tensor, None]:
    window = module.config.window_size if module.attention_type == "local" else None
    return _by_heads(module, attend, *given, scaling=1.0, sliding_window=window)


def _xglm(
    module: Any, attend: Attend, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    maps = (module.q_proj, module.k_proj, module.v_proj)
    shape = (*hidden_states.shape[:2], module.num_heads, module.head_dim)
    query, key, value = (map_(hidden_states).view(shape).transpose(1, 2) for map_ in maps)
    return _project(module.out_proj, attend(module, query, key, value, None)), None


def _mpt(
    module: Any, attend: Attend, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    shape = (*hidden_states.shape[:2], module.n_heads, module.head_dim)
    query, key, value = (part.view(shape).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    biases = build_mpt_alibi_tensor(module.n_heads, 2, device=qkv.device)  # type: ignore[no-untyped-call]
    slopes = biases[:, 0, 1] - biases[:, 0, 0]  # [H], of [H, 1, 2]
    attended = attend(
        module, query, key, value, None, scaling=module.softmax_scale, alibi_slopes=slopes
    )
    return _project(module.out_proj, attended), None


def _bloom(
    module: Any,
    attend: Attend,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = _split_fused(module, hidden_states, module.num_heads)
    slopes = _slopes(module.num_heads, torch.float32, query.device)
    attended = attend(module, query, key, value, None, alibi_slopes=slopes)
    return _project(module.dense, attended) + residual, None


def _falcon(
    module: Any,
    attend: Attend,
    hidden_states: torch.Tensor,
    *_: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **__: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = _split_fused(module, hidden_states, module.num_kv_heads)
    if module.config.alibi:
        slopes = _slopes(module.num_heads, torch.bfloat16, query.device)
        weight = module.head_dim**-0.5  # the model scales its biases like its products
        attended = attend(module, query, key, value, None, alibi_slopes=slopes, alibi_weight=weight)
    else:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)  # type: ignore[no-untyped-call]
        attended = attend(module, query, key, value, None)
    return _project(module.dense, attended), None


def _split_fused(
    module: Any, hidden_states: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute queries, keys and values with one linear map.

    The map's output has, for each kv head, its queries, then its key, then its value.
    """
    qkv = module.query_key_value(hidden_states)
    qkv = qkv.view(*hidden_states.shape[:2], num_kv_heads, -1, module.head_dim)
    query, key, value = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _slopes(num_heads: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ALiBi's slopes `[H]`, as Bloom and Falcon compute them."""
    two = torch.ones(1, 2, dtype=torch.int64, device=device)
    return bloom_alibi(two, num_heads, dtype)[:, 0, 1]


def _project(out: nn.Module, attended: tuple[torch.Tensor, None]) -> torch.Tensor:
    projected: torch.Tensor = out(attended[0].flatten(2))
    return projected


_FAMILIES: Final[dict[str, tuple[str, str, Callable[..., Any]]]] = {
    "bloom": ("BloomAttention", "forward", _bloom),
    "codegen": ("CodeGenAttention", "_attn", _by_heads),
    "falcon": ("FalconAttention", "forward", _falcon),
    "gpt_neo": ("GPTNeoSelfAttention", "_attn", _gpt_neo),
    "gptj": ("GPTJAttention", "_attn", _by_heads),
    "mpt": ("MptAttention", "forward", _mpt),
    "openai-gpt": ("Attention", "_attn", _openai),
    "xglm": ("XGLMAttention", "forward", _xglm),
}
"""By model type: the class of attention, the method to replace, and its replacement."""
