"""Cuts a step that the device has no memory for into parts that are computed one after another.

Symbols: `S` sequences of a step, `N` tokens that it samples.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gpu_worker.sampling.sampler import Sampled, SampledLogprobs
from gpu_worker.step.rows import ScheduledRows

_STEPS_UNTIL_MORE = 64


def halves(scheduled: ScheduledRows) -> tuple[ScheduledRows, ScheduledRows] | None:
    """Two parts of a step, about as large; a chunk may be cut in two.

    What a sequence reads of another's KV of the same step is of one before it, so the second part
    finds what the first has stored.

    Returns:
        None: it cannot be cut: it is one token, or one row and its guesses.
    """
    ends = np.cumsum(scheduled.lens)  # [S]
    cut = int(ends[-1]) // 2
    place = int(np.searchsorted(ends, cut, side="right"))  # the row of the first token after it
    num_before = cut - int(ends[place] - scheduled.lens[place])
    if num_before and place < scheduled.num_decodes + scheduled.num_drafting:
        place, num_before = place + (place == 0), 0  # its guesses are verified together
    if place + (num_before > 0) == 0 or place == len(ends):
        return None
    first = _part(scheduled, 0, place + (num_before > 0))
    second = _part(scheduled, place, len(ends))
    if num_before:
        first.lens[-1] = num_before
        second.starts[0] += num_before
        second.lens[0] -= num_before
        is_whole = first.sampling < place
        first = replace(
            first,
            sampling=first.sampling[is_whole],
            positions=first.positions[is_whole],
            guesses=None if first.guesses is None else first.guesses[is_whole],
        )
    return first, second


def _part(scheduled: ScheduledRows, begin: int, end: int) -> ScheduledRows:
    """The sequences `[begin, end)` of a step, with arrays of their own."""
    places = slice(begin, end)
    is_inside = (scheduled.sampling >= begin) & (scheduled.sampling < end)
    num_decodes, num_drafting = scheduled.num_decodes, scheduled.num_drafting
    decodes_end = min(num_decodes, end)
    drafting_end = min(num_decodes + num_drafting, end)
    return ScheduledRows(
        rows=scheduled.rows[places],
        starts=scheduled.starts[places].copy(),
        lens=scheduled.lens[places].copy(),
        num_decodes=max(0, decodes_end - begin),
        sampling=scheduled.sampling[is_inside] - begin,
        positions=scheduled.positions[is_inside],
        incarnations=scheduled.incarnations[places],
        num_drafting=max(0, drafting_end - max(begin, num_decodes)),
        guesses=None if scheduled.guesses is None else scheduled.guesses[is_inside],
    )


def merged(parts: Sequence[Sampled]) -> Sampled:
    """What a step sampled, of what its parts did in order; at least one."""
    if len(parts) == 1:
        return parts[0]
    firsts = np.cumsum([0, *(len(part.token_ids) for part in parts)])
    return Sampled(
        token_ids=torch.cat([part.token_ids for part in parts]),
        is_finite=torch.cat([part.is_finite for part in parts]),
        logprobs=_merged_logprobs(parts, firsts),
        stuck=np.concatenate(
            [part.stuck + first for part, first in zip(parts, firsts, strict=False)]
        ),
    )


def _merged_logprobs(
    parts: Sequence[Sampled], firsts: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> SampledLogprobs | None:
    found = [
        (part.logprobs, first)
        for part, first in zip(parts, firsts, strict=False)
        if part.logprobs is not None
    ]
    if not found:
        return None
    width = max(logprobs.top_token_ids.shape[1] for logprobs, _ in found)

    def widened(tensor: torch.Tensor) -> torch.Tensor:  # nobody reads past `num_top`
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))

    return SampledLogprobs(
        places=np.concatenate([logprobs.places + first for logprobs, first in found]),
        num_top=np.concatenate([logprobs.num_top for logprobs, _ in found]),
        chosen=torch.cat([logprobs.chosen for logprobs, _ in found]),
        top_token_ids=torch.cat([widened(logprobs.top_token_ids) for logprobs, _ in found]),
        top_logprobs=torch.cat([widened(logprobs.top_logprobs) for logprobs, _ in found]),
    )


class TokenLimit:
    """How many tokens are computed at once: fewer after memory was short, in time more again."""

    def __init__(self) -> None:
        self._most: int | None = None
        """None: as many as a step has."""
        self._num_steps = 0

    def allows(self, num_tokens: int) -> bool:
        """Whether to try so many at once."""
        return self._most is None or num_tokens <= self._most

    def shrink(self, num_tokens: int) -> None:
        """There was no memory for so many."""
        self._most, self._num_steps = max(1, num_tokens // 2), 0

    def note_step(self) -> None:
        """A step was launched."""
        if self._most is None:
            return
        self._num_steps += 1
        if self._num_steps >= _STEPS_UNTIL_MORE:
            self._most, self._num_steps = 2 * self._most, 0
