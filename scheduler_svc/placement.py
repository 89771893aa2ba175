"""Which worker a request goes to."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy one worker is, as far as placement cares."""

    num_running: int
    num_waiting: int
    """Sequences that wait, those that its engine has not looked at yet included."""
    max_waiting: int
    max_request_len: int
    """Most tokens of one of its sequences."""

    @property
    def num_seqs(self) -> int:
        """Sequences, waiting or running."""
        return self.num_running + self.num_waiting

    def has_room(self, n: int) -> bool:
        """Say whether `n` more sequences may wait here."""
        return self.num_waiting + n <= self.max_waiting


def least_loaded(
    loads: Sequence[WorkerLoad], n: int, num_tokens: int, *, can_refuse: bool
) -> int | None:
    """Choose the worker for a request of `n` sequences.

    Args:
        loads: The workers'; at least one.
        n: How many sequences the request has.
        num_tokens: How long each may become. If that is too long for all, those that take the most
            come into question: one of them will refuse it, and name the limit.
        can_refuse: Whether only workers with room for it in their queue come into question.

    Returns:
        The index of the one with the fewest sequences, the first of equals; None: none has room.
    """
    num_tokens = min(num_tokens, max(load.max_request_len for load in loads))
    candidates = [
        i
        for i, load in enumerate(loads)
        if load.max_request_len >= num_tokens and (load.has_room(n) or not can_refuse)
    ]
    return min(candidates, key=lambda i: loads[i].num_seqs, default=None)
