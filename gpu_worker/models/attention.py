"""The interface of a decoder, and paged attention of one layer for decodes and prefill chunks.

Symbols: `T` tokens, `N` tokens whose final hidden states are wanted, `S` sequences, `M` blocks of
the longest block table, `H` query heads, `HKV` kv heads, `D` head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.lora.step_adapters import StepAdapters
from kernels import ops

Attention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, "AttentionMetadata"], None]
"""Attends with a query to a step's sequences, and writes into an output."""
AttendBetween: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, Attention], None]
"""Has attention run between graphs: gets its layer, query `[T, H, D]`, output and itself."""


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where a step's tokens are stored, and what they attend to.

    It is the same for every layer, unless the model has several KV groups: see `in_layer`.

    The first `num_decodes` sequences have exactly one token each in this step, the rest are chunks
    of any length. So the first `num_decodes` tokens belong to the decodes.
    """

    slot_mapping: torch.Tensor
    """int64[T]: `block * block_size + offset` of each token's K and V, or `kernels.PAD_SLOT`."""
    block_tables: torch.Tensor
    """int32[S, M]: each sequence's blocks in order; entries past its `seq_len`, or behind the
    layer's window, are not read."""
    seq_lens: torch.Tensor
    """int32[S]: tokens of each sequence, including this step's."""
    query_start_loc: torch.Tensor
    """int32[S + 1]: where each sequence's tokens start in this step; the last entry is the end."""
    max_query_len: int
    """The longest chunk of this step, in tokens."""
    num_decodes: int
    """The first so many sequences have one token each."""
    wanted: "WantedTokens | None" = None
    """Tokens whose final hidden states are wanted; None: all."""
    adapters: StepAdapters | None = None
    """LoRA adapters of the tokens; None if no token has one."""
    token_types: torch.Tensor | None = None
    """int64[T]: 1 for tokens of the second text of a pair; None: there are none."""
    by_group: tuple["AttentionMetadata", ...] = ()
    """With several KV groups: the metadata of each, which differ in slots and block tables. The
    first group's are also in this object. Empty: there is one group."""
    attend_between: AttendBetween | None = None
    """While graphs are captured that leave attention out: passes it on. Only `slot_mapping` is then
    valid: steps that replay the graphs have other sequences."""

    def in_layer(self, pool: KvPool, layer: int) -> "AttentionMetadata":
        """The metadata with the slots and block tables of a layer."""
        return self.by_group[pool.groups.group_of[layer]] if self.by_group else self

    @property
    def num_wanted(self) -> int:
        """N."""
        return len(self.slot_mapping if self.wanted is None else self.wanted.places)

    def select(self, hidden: torch.Tensor) -> torch.Tensor:
        """Select the wanted tokens' values: `[T, ...]` to `[N, ...]`."""
        return hidden if self.wanted is None else hidden.index_select(0, self.wanted.places)

    @cached_property
    def decodes(self) -> "Sequences | None":
        """The decodes alone; None: there are none."""
        return self._sequences(slice(self.num_decodes)) if self.num_decodes else None

    @cached_property
    def chunks(self) -> "Sequences | None":
        """The chunks alone, whose tokens follow those of the decodes; None: there are none."""
        if self.num_decodes == len(self.seq_lens):
            return None
        return self._sequences(slice(self.num_decodes, None))

    def _sequences(self, which: slice) -> "Sequences":
        return Sequences(
            self.block_tables[which], self.seq_lens[which], self.query_start_loc[which.start :]
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """A part of a step's sequences; the fields are those of `AttentionMetadata`."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class WantedTokens:
    """The tokens whose final hidden states are wanted: the last ones of each sequence, or none.

    The last layer stores K and V of all tokens, and then computes these tokens only.
    """

    places: torch.Tensor
    """int64[N]: indexes into the step's tokens, ascending."""
    metadata: AttentionMetadata
    """The same sequences with only these tokens; some may have none."""


class Decoder(Protocol):
    """A model of any family, as `registry.open_model` loads it."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: Any,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states `[N, E]` of the N wanted tokens; stores all tokens' K and V in the pool."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[S, V] from hidden states `[S, E]`."""


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: KvPool,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store this step's K and V in `pool`, then attend causally to each sequence.

    Args:
        query: `[T, H, D]`, rotated.
        key: `[T, HKV, D]`, rotated.
        value: `[T, HKV, D]`.
        pool: Written at the layer's slots; holds earlier tokens' K and V.
        layer: Layer of the pool.
        metadata: The batch.
        scale: Multiplies the scores, usually `D ** -0.5`.
        window: Tokens that a token sees, itself included; None: all before it.
        softcap: Scores s become `softcap * tanh(s / softcap)`, after `scale`.
        sinks: float32[H], an extra score per head, in the softmax's denominator only.

    Returns:
        `[T, H * D]` in `query`'s dtype.
    """
    store_kv(key, value, pool, layer, metadata)
    return attend(query, pool, layer, metadata, scale, window=window, softcap=softcap, sinks=sinks)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    pool: KvPool,
    layer: int,
    metadata: AttentionMetadata,
) -> None:
    """Store this step's K and V in `pool`: the first half of `paged_attention`.

    `value` is None if the pool does not store values (`KvPool.stores_values`).
    """
    metadata = metadata.in_layer(pool, layer)
    ops.store_kv(
        key,
        value,
        pool.key_cache(layer),
        None if value is None else pool.value_cache(layer),
        metadata.slot_mapping,
        key_scales=pool.key_scales(layer),
        value_scales=None if value is None else pool.value_scales(layer),
    )


def attend(
    query: torch.Tensor,
    pool: KvPool,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend: the second half of `paged_attention`, after `store_kv`."""
    key_cache, value_cache = pool.key_cache(layer), pool.value_cache(layer)
    key_scales, value_scales = pool.key_scales(layer), pool.value_scales(layer)
    out = query.new_empty(len(query), query.shape[1], value_cache.shape[3])

    def attention(query: torch.Tensor, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        metadata = metadata.in_layer(pool, layer)
        decodes, chunks = metadata.decodes, metadata.chunks
        # Chunks first, because this may overwrite the rows of the decodes.
        if chunks is not None and len(query) > metadata.num_decodes:  # else none has wanted tokens
            ops.paged_attention_prefill(
                query,
                key_cache,
                value_cache,
                chunks.block_tables,
                chunks.seq_lens,
                chunks.query_start_loc,
                metadata.max_query_len,
                scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                key_scales=key_scales,
                value_scales=value_scales,
                out=out,
            )
        if decodes is not None:
            ops.paged_attention_decode(
                query,
                key_cache,
                value_cache,
                decodes.block_tables,
                decodes.seq_lens,
                scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                key_scales=key_scales,
                value_scales=value_scales,
                out=out,
            )

    if metadata.attend_between is None:
        attention(query, out, metadata)
    else:
        metadata.attend_between(layer, query, out, attention)
    return out.flatten(1)
