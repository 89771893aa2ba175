"""Lets one rank sample for all, so that their rows stay equal whatever the last bits of logits are.

Symbols: `S` sequences that sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from contract.sampling import SamplingParams
from gpu_worker.memory.transfer import upload
from gpu_worker.parallel.collectives import Ranks
from gpu_worker.sampling.grammars import ForcedTokens
from gpu_worker.sampling.params import SamplingTable
from gpu_worker.sampling.sampled import Sampled
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.step.messages import Int32Array, Int64Array


class Sampling(Protocol):
    """What an executor needs of a sampler; `Sampler` says what its methods do."""

    @property
    def table(self) -> SamplingTable:
        """The rows' parameters."""

    def add(
        self, row: int, params: SamplingParams, token_ids: Int32Array, num_prompt_tokens: int
    ) -> None:
        """Give a free row its parameters."""

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows."""

    def sample(
        self, logits: torch.Tensor, rows: Int64Array, positions: Int64Array, num_outputs: Int64Array
    ) -> Sampled:
        """Give each sequence its next token."""

    def forced(self, rows: Int64Array) -> ForcedTokens | None:
        """Tell who needs no logits; None: all do."""

    def follow(self, rows: Int64Array, token_ids: Callable[[], Int64Array]) -> None:
        """Let the grammars move on."""


def share_sampling(sampler: Sampler, ranks: Ranks) -> Sampling:
    """What samples at this rank of a group; its own sampler is `sampler`."""
    return SamplesForAll(sampler, ranks) if ranks.place.rank == 0 else TakesSamples(sampler, ranks)


class SamplesForAll:
    """Rank 0's: samples, and tells the others. All make the logits of all rows, together."""

    def __init__(self, sampler: Sampler, ranks: Ranks) -> None:
        self._sampler = sampler
        self._ranks = ranks
        self.table = sampler.table
        self.add = sampler.add
        self.release = sampler.release
        self.follow = sampler.follow

    def forced(self, rows: Int64Array) -> None:
        """Nobody: the other ranks do not know the grammars."""

    def sample(
        self, logits: torch.Tensor, rows: Int64Array, positions: Int64Array, num_outputs: Int64Array
    ) -> Sampled:
        """See `Sampler.sample`."""
        sampled = self._sampler.sample(logits, rows, positions, num_outputs)
        goes_on = sampled.is_finite
        if len(sampled.stuck):
            (stuck,) = upload([sampled.stuck], goes_on.device)
            goes_on = goes_on.index_fill(0, stuck, value=False)
        self._ranks.share(torch.stack((sampled.token_ids, goes_on.to(torch.int64))))
        return sampled


class TakesSamples:
    """Another rank's: takes rank 0's tokens, whatever the logits here."""

    def __init__(self, sampler: Sampler, ranks: Ranks) -> None:
        self._ranks = ranks
        self.table = sampler.table

    def add(
        self, row: int, params: SamplingParams, token_ids: Int32Array, num_prompt_tokens: int
    ) -> None:
        """Keep what tells where the row ends."""
        del token_ids, num_prompt_tokens
        if not self._ranks.place.is_last_stage:  # it has no logits to score prompts with
            params = replace(params, prompt_logprobs=None)
        self.table.set(row, params)

    def release(self, rows: Sequence[int]) -> None:
        """Nothing is kept but in the table."""

    def sample(
        self, logits: torch.Tensor, rows: Int64Array, positions: Int64Array, num_outputs: Int64Array
    ) -> Sampled:
        """Take the tokens; a row that cannot go on, for whatever reason, is not finite."""
        del positions, num_outputs
        shared = torch.empty(2, len(rows), dtype=torch.int64, device=logits.device)
        self._ranks.share(shared)
        return Sampled(shared[0], shared[1].bool(), None, np.empty(0, np.int64))

    def forced(self, rows: Int64Array) -> None:
        """See `SamplesForAll`."""

    def follow(self, rows: Int64Array, token_ids: Callable[[], Int64Array]) -> None:
        """Grammars are rank 0's."""
