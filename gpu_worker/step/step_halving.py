"""Splits a step into parts if the device's memory is too small for the whole step.

`model_runner.py` catches the out-of-memory error and computes the parts one after another.

Symbols: `S` sequences of a step, `N` tokens that it samples.
"""

from dataclasses import replace

import numpy as np

from gpu_worker.step.rows import ScheduledRows

_STEPS_UNTIL_MORE = 64


def halves(scheduled: ScheduledRows) -> tuple[ScheduledRows, ScheduledRows] | None:
    """Split a step into two parts of about equal size; a chunk may be cut in two.

    Within a step, a sequence reads only its own KV and that of sequences before it. So the second
    part can read the KV that the first part has stored.

    Returns:
        The two parts; None if the step cannot be split, because it computes only one token, or only
        one row and that row has guesses.
    """
    ends = np.cumsum(scheduled.lens)  # [S]
    cut = int(ends[-1]) // 2  # tokens of the first part
    # the row of the first token after the cut
    place = int(np.searchsorted(ends, cut, side="right"))
    num_before = cut - int(ends[place] - scheduled.lens[place])
    if num_before and place < scheduled.num_decodes + scheduled.num_drafting:
        place, num_before = place + (place == 0), 0  # a row with guesses is not cut
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
    """Return sequences `[begin, end)` of a step, with copies of `starts` and `lens`."""
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


class TokenLimit:
    """The largest number of tokens that are computed together; a larger step is split into parts.

    The limit becomes half the number of tokens of a step that did not fit in memory, and doubles
    every 64 steps.
    """

    def __init__(self) -> None:
        self._most: int | None = None
        """None: no limit."""
        self._num_steps = 0

    def allows(self, num_tokens: int) -> bool:
        return self._most is None or num_tokens <= self._most

    def shrink(self, num_tokens: int) -> None:
        """Set the limit to half of `num_tokens`, the size of a step that did not fit in memory."""
        self._most, self._num_steps = max(1, num_tokens // 2), 0

    def count_step(self) -> None:
        """Count a launched step."""
        if self._most is None:
            return
        self._num_steps += 1
        if self._num_steps >= _STEPS_UNTIL_MORE:
            self._most, self._num_steps = 2 * self._most, 0
