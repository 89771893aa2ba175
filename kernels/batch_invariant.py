"""Batch-invariant attention: no bit of a token's result depends on what else a step computes."""

from collections.abc import Callable
from typing import Any

import torch

from kernels import ops
from kernels.sequences import Sequences


class BatchInvariantAttention:
    """Prepares attention as `kernels.ops` does, but with the same order of sums in every step.

    A decode is computed as a chunk of one token, and no sequence's positions are split into parts
    with separate sums. So a token's result has the same bits whether the token is decoded,
    recomputed in a prompt after a preemption, or verified as a draft token. The price is that a few
    sequences with long contexts do not fill a GPU.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._latest: tuple[Sequences, Sequences] | None = None
        """The `decodes` of the last call of `_as_chunks`, and the result of that call.

        If there is one KV group, all layers of a step pass the same `decodes`, so only the first
        layer makes chunks.
        """

    def prepare_decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        **options: Any,
    ) -> Callable[[Sequences], object]:
        """Do as `ops.prepare_decode`, but do not write rows of `out` for sequences of length 0."""
        attend = self.prepare_prefill(query, key_cache, value_cache, scale, **options)
        return lambda sequences: attend(self._as_chunks(sequences))

    def prepare_prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        **options: Any,
    ) -> Callable[[Sequences], object]:
        """Do as `ops.prepare_prefill`, but never split a sequence's positions into parts."""
        return ops.prepare_prefill(query, key_cache, value_cache, scale, is_whole=True, **options)

    def _as_chunks(self, decodes: Sequences) -> Sequences:
        if self._latest is None or self._latest[0] is not decodes:
            starts = self._starts[: len(decodes.seq_lens) + 1]
            self._latest = decodes, Sequences(decodes.block_tables, decodes.seq_lens, starts)
        return self._latest[1]
