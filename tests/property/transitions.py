"""Records the transitions that sequences make."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from scheduler_svc.core.sequence import TRANSITIONS, SeqStatus, Sequence

Transition = tuple[SeqStatus, SeqStatus]

ALL: frozenset[Transition] = frozenset(
    (before, after) for before, afters in TRANSITIONS.items() for after in afters
)
OF_MOVES = frozenset(each for each in ALL if SeqStatus.MIGRATING in each)
"""The transitions of a request that moves to another core."""


@contextmanager
def recorded_transitions() -> Iterator[set[Transition]]:
    """Record the transitions during the `with` block."""
    taken: set[Transition] = set()
    set_status = Sequence.set_status

    def recorded(seq: Sequence, status: SeqStatus) -> None:
        taken.add((seq.status, status))
        set_status(seq, status)

    with patch.object(Sequence, "set_status", recorded):
        yield taken
