"""Rank 0 samples for all ranks, so a row gets the same tokens on every rank.

This holds even if the ranks' logits differ in the last bits.

Symbols: `S` sequences that sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from contract.arrays import Int32Array, Int64Array
from contract.sampling import SamplingParams
from gpu_worker.memory.transfer import upload
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.sampling.grammar_masks import ForcedTokens
from gpu_worker.sampling.params import SamplingTable
from gpu_worker.sampling.sampled_tokens import Sampled
from gpu_worker.sampling.sampler import Sampler


class Sampling(Protocol):
    """The part of `Sampler` that an executor needs."""

    @property
    def table(self) -> SamplingTable: ...

    def add(
        self, row: int, params: SamplingParams, token_ids: Int32Array, num_prompt_tokens: int
    ) -> None: ...

    def release(self, rows: Sequence[int]) -> None: ...

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        positions: Int64Array,
        num_outputs: Int64Array,
        likeliest: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Sampled: ...

    def forced(self, rows: Int64Array) -> ForcedTokens | None: ...

    def follow(self, rows: Int64Array, token_ids: Callable[[], Int64Array]) -> None: ...


def share_sampling(sampler: Sampler, ranks: Ranks) -> Sampling:
    """Return this rank's `Sampling`, which uses the rank's own `sampler`."""
    return (
        SharedSampler(sampler, ranks) if ranks.place.rank == 0 else ReceivedSamples(sampler, ranks)
    )


class SharedSampler:
    """Rank 0's sampler: sends its tokens to the other ranks."""

    def __init__(self, sampler: Sampler, ranks: Ranks) -> None:
        self._sampler = sampler
        self._ranks = ranks
        self.table = sampler.table
        self.add = sampler.add
        self.release = sampler.release
        self.follow = sampler.follow

    def forced(self, rows: Int64Array) -> None:
        """Return None, so that rank 0 computes logits for the same rows as the other ranks.

        The other ranks do not know which tokens a grammar forces, because only rank 0 has grammars.
        """

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        positions: Int64Array,
        num_outputs: Int64Array,
        likeliest: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Sampled:
        sampled = self._sampler.sample(logits, rows, positions, num_outputs, likeliest)
        goes_on = sampled.is_finite
        if len(sampled.stuck):
            (stuck,) = upload([sampled.stuck], goes_on.device)
            goes_on = goes_on.index_fill(0, stuck, value=False)
        self._ranks.share(torch.stack((sampled.token_ids, goes_on.to(torch.int64))))
        return sampled


class ReceivedSamples:
    """The sampler of a rank other than 0: returns rank 0's tokens.

    In the last pipeline stage these ranks have logits, too, but `sample` does not use the logits.
    """

    def __init__(self, sampler: Sampler, ranks: Ranks) -> None:
        self._ranks = ranks
        self.table = sampler.table

    def add(
        self, row: int, params: SamplingParams, token_ids: Int32Array, num_prompt_tokens: int
    ) -> None:
        """Keep the row's parameters, which tell the executor where the row ends."""
        del token_ids, num_prompt_tokens
        if not self._ranks.place.is_last_stage:  # this rank has no logits to score prompts with
            params = replace(params, prompt_logprobs=None)
        self.table.set(row, params)

    def release(self, rows: Sequence[int]) -> None:
        """Do nothing: no state is kept for a row."""

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        positions: Int64Array,
        num_outputs: Int64Array,
        likeliest: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Sampled:
        """Receive rank 0's tokens.

        In the result, `is_finite` is false for rows whose logits were not finite, and also for rows
        whose grammar allows no token.
        """
        del positions, num_outputs, likeliest
        shared = torch.empty(2, len(rows), dtype=torch.int64, device=logits.device)
        self._ranks.share(shared)
        return Sampled(shared[0], shared[1].bool(), None, np.empty(0, np.int64))

    def forced(self, rows: Int64Array) -> None: ...

    def follow(self, rows: Int64Array, token_ids: Callable[[], Int64Array]) -> None:
        """Do nothing: only rank 0 has grammars."""
