"""Runs any decoder of `transformers` whose attention can be replaced by paged attention.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim, `E` hidden size,
`V` vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.pytorch_utils import Conv1D

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.attention import AttentionMetadata, paged_attention
from gpu_worker.models.fallback.attention_calls import read_options
from gpu_worker.weights.linear import Linear, make_linear


class TransformersModel:
    """A decoder; it changes only while `forward` runs. Callers are in `torch.inference_mode()`."""

    def __init__(self) -> None:
        self._base: Any = None
        self._head: Any = None
        self._pool: KvPool | None = None
        self._metadata: AttentionMetadata | None = None

    def use(self, causal: Any) -> None:
        """Take over a causal language model whose attention is `attend`; called once."""
        for module in causal.modules():
            _replace_linear(module)
        self._base = causal.base_model
        # The head is what the causal model does with the hidden states: scales, caps, biases.
        setattr(causal, causal.base_model_prefix, _Given())
        self._head = causal

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute one step's tokens; the contract is that of `Decoder.forward`."""
        self._pool, self._metadata = pool, metadata
        try:
            out = self._base(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
            )
        finally:
            self._pool = self._metadata = None
        hidden: torch.Tensor = out.last_hidden_state[0]
        return metadata.select(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the token after each of some final hidden states `[S, E]`; float32 `[S, V]`."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden.unsqueeze(0)).logits[0]
        return logits.float()

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [1, H, T, D]
        key: torch.Tensor,  # [1, HKV, T, D]
        value: torch.Tensor,  # [1, HKV, T, D]
        _mask: None,
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend for one layer of the step that runs; see `register_attention`."""
        assert self._pool is not None, "only `forward` attends"
        assert self._metadata is not None, "only `forward` attends"
        options = read_options(query, given)
        layer: Any = module.layer_idx
        value_dim, missing = value.shape[3], key.shape[3] - value.shape[3]
        if missing:  # the pool has one head dim for both
            value = functional.pad(value, (0, missing))
        # Some models rotate queries and keys in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
        attended = paged_attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self._pool,
            layer,
            self._metadata,
            options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
        )
        heads = attended.view(1, query.shape[2], query.shape[1], -1)
        return heads[..., :value_dim], None


class _Given(nn.Module):
    """Stands where a causal model's base was, and returns the hidden states that it is given."""

    def forward(
        self,
        input_ids: None = None,  # noqa: ARG002  some pass it by place
        *,
        inputs_embeds: torch.Tensor,
        **_: Any,
    ) -> "_HiddenStates":
        return _HiddenStates(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> "_Given":
        """Itself: some causal models call not their base but the decoder in it."""
        return self


@dataclass
class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):
    """What the bases of all causal models return, as far as these look at it."""

    router_logits: None = None


def _replace_linear(module: nn.Module) -> None:
    """Let a linear map of transformers compute as ours do: faster, each row on its own.

    Its weight goes to ours, which may lay it out anew; what is left is empty.
    """
    if type(module) is nn.Linear:
        weight, bias = module.weight, module.bias
    elif type(module) is Conv1D:  # GPT-2's name for it, with the weight transposed
        weight, bias = module.weight.t().contiguous(), module.bias
    else:
        return
    linear: Linear = make_linear(weight.detach(), None if bias is None else bias.detach())
    module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return linear(x.flatten(0, -2)).view(*x.shape[:-1], -1)

    module.forward = forward  # type: ignore[method-assign]
