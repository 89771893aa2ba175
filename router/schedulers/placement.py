"""Chooses a scheduler for a request: the one that its prefix maps to, unless that is too busy.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018): each prompt
ranks the schedulers by a hash of its first tokens with their names, the same in every router, and
takes the first that would stay below 1.25 times its share of all sequences. So prompts with the
same beginning go to the same scheduler, which has it in its prefix cache. What a busy scheduler
cannot take goes to the next in the ranking, which is also the same for all of these prompts. If a
scheduler is added or removed, only its own share of the prompts moves. A scheduler whose queue is
known to be full is left out while another has room.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from contract.errors import QuireError
from router.request.live import LiveRequest
from router.schedulers.link import SchedulerLink

PREFIX_TOKENS: Final = 64
"""How much of a prompt is hashed: a few KV blocks, whatever their size."""
_SLACK: Final = 1.25
_MIN_SEQS: Final = 4
"""Up to so many per worker count as no load: prompts stay together."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A scheduler to choose from."""

    name: str
    num_seqs: int
    """Its sequences, as far as is known."""
    num_workers: int = 1
    """At least 1."""
    room: int | None = None
    """As `has_room` takes it."""


def has_room(room: int | None, n: int) -> bool:
    """Whether a scheduler takes `n` more sequences, as far as is known.

    `room` is how many its queue takes; None: many.
    """
    return room is None or room >= n


def choose(prompt: Sequence[int], salt: str, n: int, candidates: Sequence[Candidate]) -> int:
    """Return the index of the candidate for a request with `n` sequences."""
    if len(candidates) == 1:
        return 0
    num_workers = sum(each.num_workers for each in candidates)
    num_seqs = n + sum(each.num_seqs for each in candidates)
    share = max(_SLACK * num_seqs / num_workers, _MIN_SEQS)
    indices = [index for index, each in enumerate(candidates) if has_room(each.room, n)]
    indices = indices or list(range(len(candidates)))
    # If all would exceed their share, the least loaded.
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


_REFRESH_S = 1.0
"""How often schedulers are asked for their loads, if there are several: other routers add to these.
"""


@dataclass(frozen=True, slots=True)
class _LastLoad:
    """A scheduler's last known load."""

    num_other_seqs: int = 0
    """Sequences of other routers."""
    num_workers: int = 1


class Placement:
    """Chooses among links by their schedulers' last known loads."""

    def __init__(self) -> None:
        self._last_loads: dict[SchedulerLink, _LastLoad] = {}

    async def watch(self, connected: Callable[[], Sequence[SchedulerLink]]) -> None:
        """Keep asking the connected schedulers for their loads."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            if len(links := connected()) > 1:
                await asyncio.gather(*map(self._refresh, links))

    def forget(self, link: SchedulerLink) -> None:
        """Forget a scheduler that has left."""
        self._last_loads.pop(link, None)

    def choose(self, live: LiveRequest, links: Sequence[SchedulerLink]) -> SchedulerLink:
        """Return one of `links`, at least one, for a request."""
        adapter = live.record.sampling.adapter
        if adapter is not None:  # if none has it, any refuses the request by name
            able = [each for each in links if each.model and adapter in each.model.adapters]
            links = able or links
        links = [each for each in links if not each.is_unloaded] or links
        candidates = []
        for link in links:
            load = self._last_loads.get(link, _LastLoad())
            num_seqs = load.num_other_seqs + len(link.table)
            candidates.append(Candidate(link.target, num_seqs, load.num_workers, link.room))
        record = live.record
        n = len(live.live_seq_keys)
        return links[choose(record.prompt_token_ids, record.cache_salt, n, candidates)]

    async def _refresh(self, link: SchedulerLink) -> None:
        with contextlib.suppress(QuireError):
            load = await link.calls.load()
            num_seqs = load.num_requests_running + load.num_requests_waiting
            self._last_loads[link] = _LastLoad(
                max(0, num_seqs - len(link.table)), max(1, load.num_workers)
            )
