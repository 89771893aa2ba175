"""Scores prompt tokens: computes the log-probability of each token, given the tokens before it.

Symbols: `T` tokens of a step, `N` tokens whose next token in the prompt is scored, `V` vocabulary,
`E` hidden size, `K` the largest number of top tokens that a row asks for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from contract.step import PromptLogprobs, StepLogprob
from gpu_worker.memory.transfer import Download, upload
from gpu_worker.sampling.params import SamplingTable
from gpu_worker.step.rows import Rows, ScheduledRows

_MAX_LOGITS_BYTES = 32 * 1024**2
"""Limit of the float32 logits that are in memory at once, in bytes. Without a limit, the
logits of a long prompt could need more memory than the model."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The scored tokens of one row in one step."""

    row: int
    position: int
    """Position in the prompt of the first scored token."""
    count: int
    num_top: int


class PromptScoresReadback:
    """One step's prompt scores, while they are copied to the host."""

    def __init__(
        self, parts: list[_Part], chosen: torch.Tensor, top_ids: torch.Tensor, top: torch.Tensor
    ) -> None:
        """Begin to copy the scores to the host.

        `chosen`, float32[N], has the log-probabilities of the scored tokens. `top_ids`,
        int64[N, K], has the likeliest tokens at the position of each scored token, best first.
        `top`, float32[N, K], has the log-probabilities of the tokens in `top_ids`.
        """
        self._parts = parts
        self._download = Download(chosen, top_ids, top)
        self.is_done = self._download.is_done

    def wait(self) -> tuple[PromptLogprobs, ...]:
        """Wait for the scores and return them."""
        chosen, top_ids, top = self._download.wait()
        scores, start = [], 0
        for part in self._parts:
            logprobs = tuple(
                StepLogprob(
                    index=i - start,
                    logprob=float(chosen[i]),
                    top_token_ids=top_ids[i, : part.num_top].astype(np.int32),
                    top_logprobs=top[i, : part.num_top],
                )
                for i in range(start, start + part.count)
            )
            scores.append(PromptLogprobs(part.row, part.position, logprobs))
            start += part.count
        return tuple(scores)


def score_prompts(
    hidden: torch.Tensor,
    rows: Rows,
    scheduled: ScheduledRows,
    table: SamplingTable,
    logits: Callable[[torch.Tensor], torch.Tensor],
) -> PromptScoresReadback | None:
    """Score each prompt token that follows a token of the step; None: there is no such token.

    Args:
        hidden: `[T, E]`, the final hidden states of the step.
        rows: The rows, after `Rows.apply` has applied the step's plan.
        scheduled: What the step computes.
        table: Says which rows want scores.
        logits: Maps hidden states to `[*, V]`.
    """
    wanting = np.nonzero(table.wants_prompt_logprobs[scheduled.rows])[0]
    starts = np.cumsum(scheduled.lens) - scheduled.lens  # [S]: each sequence's first token
    parts, places, token_ids = [], [], []
    for i in wanting.tolist():
        row, first = int(scheduled.rows[i]), int(scheduled.starts[i])
        # The hidden state at a position scores the next position's token.
        end = min(first + int(scheduled.lens[i]), int(rows.num_prompt[row]) - 1)
        if end > first:
            num_top = int(table.num_top_prompt_logprobs[row])
            parts.append(_Part(row, first + 1, end - first, num_top))
            places.append(starts[i] + np.arange(end - first))
            token_ids.append(rows.token_ids[row, first + 1 : end + 1].astype(np.int64))
    if not parts:
        return None
    index, chosen_ids = upload([np.concatenate(places), np.concatenate(token_ids)], hidden.device)
    num_top = max(part.num_top for part in parts)
    vocab_size = table.vocab_size
    piece = max(1, _MAX_LOGITS_BYTES // (4 * vocab_size))
    chosen, top_ids, top = [], [], []
    for start in range(0, len(index), piece):
        where, ids = index[start : start + piece], chosen_ids[start : start + piece]
        of_piece = logits(hidden.index_select(0, where)).float()  # [piece, V]
        logprobs = of_piece.log_softmax(1)
        chosen.append(logprobs.gather(1, ids.unsqueeze(1)).squeeze(1))
        best = logprobs.topk(min(num_top, vocab_size), dim=1)
        top_ids.append(best.indices)
        top.append(best.values)
    return PromptScoresReadback(parts, torch.cat(chosen), torch.cat(top_ids), torch.cat(top))
