"""The interface of a decoder, and paged attention of one layer for decodes and prefill chunks.

Symbols: `T` tokens, `N` tokens whose final hidden states are wanted, `S` sequences, `M` blocks of
the longest block table, `H` query heads, `HKV` kv heads, `D` head dim, `E` hidden size, `V`
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.decoder_layer import LayerAdapters, LayerT
from kernels import ops
from kernels.sequences import Sequences, SharedPrefixes

Prepare: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Callable[["AttentionMetadata"], None]]
"""Takes a query, `[T, H, D]`, and an output tensor. Returns a function that takes a step's
metadata, attends to the step's sequences with the query, and writes the result to the output
tensor."""
AttendBetween: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, Prepare], None]
"""Takes a layer's index, the layer's query, an output tensor, and a `Prepare`. Makes the function
that `Prepare` returns run between two captured graphs whenever the two graphs are replayed."""


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where the K and V of a step's tokens are stored, and what the tokens attend to.

    The metadata is the same for every layer, unless the model has several KV groups: see
    `in_layer`.

    The first `num_decodes` sequences have exactly one token each in this step; the others are
    chunks of any length. The first `num_decodes` tokens therefore belong to the decodes.
    """

    slot_mapping: torch.Tensor
    """int64[T]: `block * block_size + offset` of each token's K and V, or `kernels.PAD_SLOT`."""
    block_tables: torch.Tensor
    """int32[S, M]: each sequence's blocks in order. Entries past the sequence's length, or behind
    the layer's window, are not read."""
    seq_lens: torch.Tensor
    """int32[S]: tokens of each sequence, including this step's."""
    query_start_loc: torch.Tensor
    """int32[S + 1]: where each sequence's tokens start in this step; the last entry is the end."""
    max_query_len: int
    """The longest chunk of this step, in tokens."""
    num_decodes: int
    """Number of sequences with one token in this step; these sequences come first."""
    wanted: "WantedTokens | None" = None
    """Tokens whose final hidden states are wanted; None: all."""
    adapters: LayerAdapters | None = None
    """LoRA adapters of the tokens; None if no token has one."""
    token_types: torch.Tensor | None = None
    """int64[T]: 1 for tokens of the second text of a pair to score, else 0; None: all are 0."""
    by_group: tuple["AttentionMetadata", ...] = ()
    """The metadata of each KV group; empty if there is only one. Groups differ in slots and block
    tables. In a group with chunked attention, as in Llama 4, the sequences differ, too: the tokens
    of each attention chunk count as a separate sequence. This object has the slots and block tables
    of the first group."""
    shared: SharedPrefixes | None = None
    """The prefixes that decodes share; None: each decode reads its whole context separately."""
    attend_between: AttendBetween | None = None
    """Called in place of each layer's attention while graphs without attention are captured. The
    graphs are replayed in steps with other sequences, so during the capture the fields that
    describe sequences have no values. The graphs can read `slot_mapping`: before each replay, the
    slots of the step are written to this tensor."""

    def in_layer(self, pool: KvPool, layer: int) -> "AttentionMetadata":
        """Return the metadata with the slots and block tables of a layer."""
        return self.by_group[pool.groups.group_of[layer]] if self.by_group else self

    def adapted(self, index: int, layer: LayerT) -> LayerT:
        """Return `layer` if no token has an adapter, else a copy that applies the adapters.

        `index` is the index of the layer in `Adapter.layers`.
        """
        return layer if self.adapters is None else self.adapters.onto(index, layer)

    @property
    def num_wanted(self) -> int:
        """N, the number of wanted tokens."""
        return len(self.slot_mapping if self.wanted is None else self.wanted.places)

    def select(self, hidden: torch.Tensor) -> torch.Tensor:
        """Select the wanted tokens' values: `[T, ...]` to `[N, ...]`."""
        return hidden if self.wanted is None else hidden.index_select(0, self.wanted.places)

    @cached_property
    def decodes(self) -> Sequences | None:
        """Only the decodes; None: there are none."""
        if self.num_decodes == 0:
            return None
        which = slice(self.num_decodes)
        return Sequences(self.block_tables[which], self.seq_lens[which], shared=self.shared)

    @cached_property
    def chunks(self) -> Sequences | None:
        """Only the chunks, whose tokens follow the decodes' tokens; None: there are none."""
        if self.num_decodes == len(self.seq_lens):
            return None
        which = slice(self.num_decodes, None)
        return Sequences(
            self.block_tables[which],
            self.seq_lens[which],
            self.query_start_loc[which],
            self.max_query_len,
        )


@dataclass(frozen=True, slots=True, eq=False)
class WantedTokens:
    """The tokens whose final hidden states are wanted, because the step samples from them.

    Of each sequence these are the last tokens, or none if the step samples nothing for the
    sequence. The last layer stores K and V of all tokens, but then computes only these tokens.
    """

    places: torch.Tensor
    """int64[N]: indexes into the step's tokens, ascending."""
    metadata: AttentionMetadata
    """Metadata of the step's sequences, with only the wanted tokens; a sequence may have none."""


class Decoder(Protocol):
    """A model of any family; `ModelSource.load` returns one."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: Any,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return the wanted tokens' hidden states `[N, E]`; store all tokens' K and V in `pool`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states `[S, E]` to logits `[S, V]`, in float32 or, on a GPU, in 16 bits."""


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
    """Call `store_kv`, then `attend`. Model classes that users write call this (docs/models.md)."""
    store_kv(key, value, pool, layer, metadata)
    return attend(query, pool, layer, metadata, scale, window=window, softcap=softcap, sinks=sinks)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    pool: KvPool,
    layer: int,
    metadata: AttentionMetadata,
) -> None:
    """Store this step's rotated K and its V in `pool`, at the layer's slots.

    `value` is None if the pool does not store values (`ModelConfig.latent_dim`).
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


def rotary_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    pool: KvPool,
    layer: int,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Rotate query and key, store K and V in `pool`, and return the rotated query, `[T, H, D]`."""
    return ops.rotary_store_kv(
        query,
        key,
        value,
        cos_sin,
        positions,
        pool.key_cache(layer),
        pool.value_cache(layer),
        metadata.in_layer(pool, layer).slot_mapping,
        key_scales=pool.key_scales(layer),
        value_scales=pool.value_scales(layer),
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
    """Attend causally within each sequence; this step's K and V must already be stored.

    Args:
        query: `[T, H, D]`, rotated.
        pool: Holds K and V.
        layer: The layer's index in the pool.
        metadata: Where K and V are stored, and the sequences of this step.
        scale: Multiplies the scores, usually `D ** -0.5`.
        window: Number of tokens that a token sees, itself included; None: all before it.
        softcap: Scores s become `softcap * tanh(s / softcap)`, after `scale`.
        sinks: float32[H], an extra score per head, in the softmax's denominator only.

    Returns:
        `[T, H * D]` in `query`'s dtype.
    """
    key_cache, value_cache = pool.key_cache(layer), pool.value_cache(layer)
    out = query.new_empty(len(query), query.shape[1], value_cache.shape[3])
    options: dict[str, Any] = {
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "key_scales": pool.key_scales(layer),
        "value_scales": pool.value_scales(layer),
    }

    def prepare(query: torch.Tensor, out: torch.Tensor) -> Callable[[AttentionMetadata], None]:
        caches = key_cache, value_cache
        attend_chunks = pool.attention.prepare_prefill(query, *caches, scale, out=out, **options)
        attend_decodes = pool.attention.prepare_decode(query, *caches, scale, out=out, **options)

        def attend_to(step: AttentionMetadata) -> None:
            step = step.in_layer(pool, layer)
            # Chunks come first, because attending to them may overwrite the decodes' rows.
            # If no token of a chunk is wanted, the query has only the decodes' rows.
            if step.chunks is not None and len(query) > step.num_decodes:
                attend_chunks(step.chunks)
            if step.decodes is not None:
                attend_decodes(step.decodes)

        return attend_to

    if metadata.attend_between is None:
        prepare(query, out)(metadata)
    else:
        metadata.attend_between(layer, query, out, prepare)
    return out.flatten(1)
