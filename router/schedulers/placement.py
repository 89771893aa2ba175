"""Which of the schedulers gets a request: who can have it, and how busy each was seen to be."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contract.errors import QuireError
from router.request.live import LiveRequest
from router.schedulers.choice import Candidate, choose
from router.schedulers.link import SchedulerLink

_LOOK_S = 1.0
"""How often schedulers are asked what they have of other routers, if there are several."""


@dataclass(frozen=True, slots=True)
class _Sight:
    """What a scheduler said of itself."""

    num_other_seqs: int = 0
    """Sequences of other routers."""
    num_workers: int = 1


class Placement:
    """Chooses among links, by what it has seen of their schedulers."""

    def __init__(self) -> None:
        self._sights: dict[SchedulerLink, _Sight] = {}

    async def watch(self, connected: Callable[[], Sequence[SchedulerLink]]) -> None:
        """Asks the schedulers that are connected how busy they are, again and again."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if len(links := connected()) > 1:
                await asyncio.gather(*map(self._look, links))

    def forget(self, link: SchedulerLink) -> None:
        """Its scheduler is not one of them any more."""
        self._sights.pop(link, None)

    def choose(self, live: LiveRequest, links: Sequence[SchedulerLink]) -> SchedulerLink:
        """Gives one of `links`, of which there is at least one, for a request."""
        adapter = live.record.sampling.adapter
        if adapter is not None:  # if none has it, any refuses the request by name
            able = [each for each in links if each.model and adapter in each.model.adapters]
            links = able or links
        links = [each for each in links if not each.is_unloaded] or links
        candidates = []
        for link in links:
            sight = self._sights.get(link, _Sight())
            num_seqs = sight.num_other_seqs + len(link.table)
            candidates.append(Candidate(link.target, num_seqs, sight.num_workers, link.room))
        record = live.record
        n = len(live.live_seq_keys)
        return links[choose(record.prompt_token_ids, record.cache_salt, n, candidates)]

    async def _look(self, link: SchedulerLink) -> None:
        with contextlib.suppress(QuireError):
            load = await link.calls.load()
            num_seqs = load.num_requests_running + load.num_requests_waiting
            self._sights[link] = _Sight(
                max(0, num_seqs - len(link.table)), max(1, load.num_workers)
            )
