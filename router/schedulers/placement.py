"""Chooses a scheduler for a request by its prompt's prefix and the schedulers' loads.

The method is consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018).
For each prompt, the schedulers are ranked by a hash of the prompt's first tokens, the request's
cache salt and the scheduler's name. So all routers rank the schedulers alike, and prompts with the
same beginning go to the same scheduler, which has the beginning in its prefix cache.

A scheduler is too busy for a request if, with the request, the scheduler would have more than 1.25
times as many sequences per worker as the average worker. A prompt goes to the first scheduler of
its ranking that is not too busy. So prompts with the same beginning also have the same second
choice. When a scheduler is added or removed, only those prompts move whose ranking begins with this
scheduler. A scheduler with a full queue is skipped while another scheduler has room.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from contract.errors import QuireError
from router.live.live_request import LiveRequest
from router.schedulers.link import SchedulerLink

PREFIX_TOKENS: Final = 64
"""How many tokens at the beginning of a prompt are hashed; they fill a few KV blocks."""
_SLACK: Final = 1.25
_MIN_SEQS: Final = 4
"""A scheduler with at most this many sequences per worker, including those of the new request,
never counts as too busy."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A scheduler to choose from."""

    name: str
    num_seqs: int
    """The last known number of sequences at the scheduler."""
    num_workers: int = 1
    """The number of the scheduler's workers, at least 1."""
    room: int | None = None
    """How many more sequences the scheduler's queue accepts, as the scheduler last reported; None:
    the scheduler has reported no limit."""


def has_room(room: int | None, n: int) -> bool:
    """Whether a queue that has room for `room` more sequences accepts `n` more; None: no limit."""
    return room is None or room >= n


def choose(prompt: Sequence[int], salt: str, n: int, candidates: Sequence[Candidate]) -> int:
    """Return the index in `candidates` of the scheduler that gets a request of `n` sequences."""
    if len(candidates) == 1:
        return 0
    num_workers = sum(each.num_workers for each in candidates)
    num_seqs = n + sum(each.num_seqs for each in candidates)
    share = max(_SLACK * num_seqs / num_workers, _MIN_SEQS)
    indices = [index for index, each in enumerate(candidates) if has_room(each.room, n)]
    indices = indices or list(range(len(candidates)))
    below_share = [
        index
        for index in indices
        if candidates[index].num_seqs + n <= share * candidates[index].num_workers
    ]
    if not below_share:
        return min(
            indices,
            key=lambda index: candidates[index].num_seqs / candidates[index].num_workers,
        )
    prefix = ",".join(map(str, prompt[:PREFIX_TOKENS]))
    return max(below_share, key=lambda i: _score(f"{candidates[i].name}\0{salt}\0{prefix}"))


def _score(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


_REFRESH_S = 1.0
"""Interval at which the schedulers' loads are polled, if there are several schedulers. The router
has to poll because other routers submit sequences, too."""


@dataclass(frozen=True, slots=True)
class _LastLoad:
    """A scheduler's last known load."""

    num_other_seqs: int = 0
    """The number of the scheduler's sequences that belong to other routers."""
    num_workers: int = 1


class SchedulerPlacement:
    """Chooses a scheduler for each request; `watch` polls the loads that the choice depends on."""

    def __init__(self) -> None:
        self._last_loads: dict[SchedulerLink, _LastLoad] = {}

    async def watch(self, connected: Callable[[], Sequence[SchedulerLink]]) -> None:
        """Poll the loads of the connected schedulers until cancelled."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            if len(links := connected()) > 1:
                await asyncio.gather(*map(self._refresh, links))

    def forget(self, link: SchedulerLink) -> None:
        """Forget a scheduler that has left."""
        self._last_loads.pop(link, None)

    def choose(self, live: LiveRequest, links: Sequence[SchedulerLink]) -> SchedulerLink:
        """Return the link to the scheduler that gets a request; `links` must not be empty."""
        adapter = live.record.sampling.adapter
        # If no scheduler has the adapter, any of them will refuse the request
        if adapter is not None:
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
