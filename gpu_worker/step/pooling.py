"""Pools a prompt's hidden states into a vector: one state, the mean of all states, or a score.

Symbols: `T` tokens of a step, `S` sequences that sample or pool, `P` sequences that pool, `E`
hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from contract.arrays import BoolArray, Int64Array
from contract.pooling import PoolingKind
from gpu_worker.memory.transfer import upload
from gpu_worker.sampling.params import SamplingTable
from gpu_worker.sampling.sampled_tokens import Sampled, Vectors
from gpu_worker.sampling.sampler import NO_SEQUENCES, finite_rows
from gpu_worker.step.rows import ScheduledRows


class Scorer(Protocol):
    """A model with a classification head."""

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map the hidden states of prompts' first tokens, `[P, E]`, to scores, `[P, 1]`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """The sum of the hidden states of a row's pooled tokens, or the first token's hidden state.

    Sums are float64, so that a mean does not depend on how the prompt was cut into chunks.
    """

    end: int
    """Number of tokens pooled so far."""
    before: torch.Tensor | None
    """`value` before the last chunk."""
    value: torch.Tensor
    """`[E]`."""


class Pooler:
    """Makes the vectors of rows, and keeps each row's pooling state between chunks."""

    def __init__(self, table: SamplingTable, model: object) -> None:
        self._table = table
        self._model = model
        self._kept: dict[int, _Kept] = {}
        """By row: the state of its pooled sequence, kept until the row pools another sequence."""

    def add(self, hidden: torch.Tensor, scheduled: ScheduledRows) -> None:
        """Add a step's hidden states, `[T, E]`, to the rows' state.

        If a step runs out of memory after this call, the step's chunks are added again, in parts,
        starting from `_Kept.before`.
        """
        ends = scheduled.lens.cumsum()
        for i in self._table.pools_all[scheduled.rows].nonzero()[0].tolist():
            row, start, num_tokens = (
                int(each[i]) for each in (scheduled.rows, scheduled.starts, scheduled.lens)
            )
            chunk = hidden[int(ends[i]) - num_tokens : int(ends[i])]
            before = None
            if start:
                kept = self._kept[row]
                before = kept.value if kept.end == start else kept.before
            if self._table.pooling[row].kind is PoolingKind.MEAN:
                value = chunk.sum(0, dtype=torch.float64)
                value = value if before is None else before + value
            else:
                value = chunk[0].clone() if before is None else before
            self._kept[row] = _Kept(start + num_tokens, before, value)

    def token_types(self, scheduled: ScheduledRows, device: torch.device) -> torch.Tensor | None:
        """Return int64[T]: 1 for each token in the second text of a scored pair of texts, else 0.

        None: no sequence is a pair of texts.
        """
        rows = scheduled.rows.tolist()
        pooling = self._table.pooling
        firsts = [pooling[row].num_first_tokens if row in pooling else 0 for row in rows]
        if not any(firsts):
            return None
        lens = scheduled.lens
        places = np.arange(lens.sum()) - np.repeat(lens.cumsum() - lens - scheduled.starts, lens)
        num_first = np.repeat(np.array(firsts), lens)
        (types,) = upload([((num_first > 0) & (places >= num_first)).astype(np.int64)], device)
        return types

    def vectors(
        self,
        hidden: torch.Tensor,  # [P, E]: of the rows' last tokens
        places: Int64Array,  # [P]
        rows: Int64Array,  # [P]
        positions: Int64Array,  # [P]: numbers of tokens
    ) -> Vectors:
        """Make the vectors of rows whose whole prompt has been computed."""
        pooling = tuple(self._table.pooling[row] for row in rows.tolist())
        values = []
        for i, (row, kind) in enumerate(
            zip(rows.tolist(), (each.kind for each in pooling), strict=True)
        ):
            match kind:
                case PoolingKind.LAST:
                    values.append(hidden[i].float())
                case PoolingKind.MEAN:
                    values.append((self._kept[row].value / int(positions[i])).float())
                case PoolingKind.CLS:
                    values.append(self._kept[row].value.float())
                case PoolingKind.SCORE:
                    scorer: Scorer = self._model  # type: ignore[assignment]
                    values.append(scorer.score(self._kept[row].value[None])[0].float())
        return Vectors(places, pooling, torch.stack(values))


def sample_or_pool(
    pools: BoolArray,
    hidden: torch.Tensor,
    sample: Callable[[torch.Tensor, Int64Array], Sampled],
    pool: Callable[[torch.Tensor, Int64Array], Vectors],
) -> Sampled:
    """Sample some sequences and pool others.

    Args:
        pools: bool[S], whether each sequence is pooled; at least one must be.
        hidden: `[S, E]`, the hidden state of each sequence's last token.
        sample: Samples the sequences that are not pooled, given their hidden states and indices in
            `pools`.
        pool: Makes the vectors of pooled sequences, given their hidden states and indices in
            `pools`.
    """
    (pooled,), (others,) = pools.nonzero(), (~pools).nonzero()
    pooled_t, others_t = upload([pooled, others], hidden.device)
    vectors = pool(hidden.index_select(0, pooled_t), pooled)
    is_finite = finite_rows(vectors.values)
    if not len(others):
        return Sampled(torch.zeros_like(pooled_t), is_finite, None, NO_SEQUENCES, vectors)
    sampled = sample(hidden.index_select(0, others_t), others)
    token_ids = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    token_ids.index_copy_(0, others_t, sampled.token_ids)
    all_finite = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
    all_finite.index_copy_(0, others_t, sampled.is_finite).index_copy_(0, pooled_t, is_finite)
    logprobs = sampled.logprobs
    if logprobs is not None:
        logprobs = replace(logprobs, places=others[logprobs.places])
    return Sampled(token_ids, all_finite, logprobs, others[sampled.stuck], vectors)
