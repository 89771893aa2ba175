"""Which of several schedulers a request goes to: where its prefix goes, unless that is too busy.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018): each prompt
ranks the schedulers by a hash of its first tokens with their names, the same in every router, and
takes the first that would have no more than its share of all sequences and a quarter. So prompts
with one beginning meet at one scheduler, whose prefix cache has it; those of a busy one overflow
to one that is again the same for all; and if one comes or goes, only its own share moves. One
whose queue is known to have no room is left out, as long as another has some.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PREFIX_TOKENS: Final = 64
"""How much of a prompt counts: a few blocks of KV, whatever their size."""
_SLACK: Final = 1.25
_MIN_SEQS: Final = 4
"""So few per worker are no load: prompts stay together while there is room."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A scheduler that takes requests."""

    name: str
    num_seqs: int
    """Sequences that it has, as far as is known."""
    num_workers: int = 1
    """At least 1."""
    room: int | None = None
    """As `has_room` takes it."""


def has_room(room: int | None, n: int) -> bool:
    """Whether a scheduler takes `n` more sequences, as far as is known.

    `room` is how many its queue takes; None: they need no counting.
    """
    return room is None or room >= n


def choose(prompt: Sequence[int], salt: str, n: int, candidates: Sequence[Candidate]) -> int:
    """Gives the index of the one for a request with `n` sequences; there is at least one."""
    if len(candidates) == 1:
        return 0
    num_workers = sum(each.num_workers for each in candidates)
    num_seqs = n + sum(each.num_seqs for each in candidates)
    share = max(_SLACK * num_seqs / num_workers, _MIN_SEQS)
    indices = [index for index, each in enumerate(candidates) if has_room(each.room, n)]
    indices = indices or list(range(len(candidates)))
    # If all are above their share, or `n` are too many for it, the least loaded.
    open_ = [
        index
        for index in indices
        if candidates[index].num_seqs + n <= share * candidates[index].num_workers
    ]
    if not open_:
        return min(
            indices,
            key=lambda index: candidates[index].num_seqs / candidates[index].num_workers,
        )
    prefix = ",".join(map(str, prompt[:PREFIX_TOKENS]))
    return max(open_, key=lambda index: _score(f"{candidates[index].name}\0{salt}\0{prefix}"))


def _score(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
