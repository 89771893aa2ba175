"""Shares prefixes with other services through the far tier: stores prompts' KV, and fetches it.

A worker reads and writes the store; this module decides what and when. The full blocks of a prompt
are stored when they are computed. A request waits for blocks from the store as it would for those
of another worker (`PrefixPulls`): never longer than computing them would take.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from contract.errors import QuireError
from contract.hashing import BlockHash
from rpc.tasks import BackgroundTasks
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.workers.kv.copy import has_answered
from scheduler_svc.workers.kv.prefix_pulls import LEAST_TOKENS, CopyRate, ends_in_time
from scheduler_svc.workers.session import Session

_COMPUTED_S: Final = 60.0
"""A prompt that takes longer, from its submission on, is not stored."""
_MAX_STORING: Final = 64
"""Most prompts that wait to be stored."""
_MAX_KNOWN: Final = 2**17
"""How many blocks are known to be in the store, and not sent there again."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A prefix to fetch."""

    taking: Session
    hashes: Sequence[BlockHash]
    num_bytes: int
    compute_s: float
    """How long the prefix would take to compute."""


class FarTier:
    """Decides which prefixes to store and to fetch."""

    def __init__(self) -> None:
        self._tasks = BackgroundTasks()
        self._rate = CopyRate()
        self._fetches: dict[tuple[Session, BlockHash], asyncio.Task[None]] = {}
        """Those in progress, by the worker and the first block."""
        self._num_storing = 0
        self._known: OrderedDict[BlockHash, None] = OrderedDict()

    def find(self, hashes: Sequence[BlockHash], taking: Session) -> Fetch | None:
        """Decide whether to look for a prompt's full blocks in the store."""
        info = taking.info
        if not (_has_far(taking) and hashes and info.prefill_tokens_per_s):
            return None
        missing = hashes[taking.num_cached_blocks(hashes) :]
        num_tokens = len(missing) * taking.block_size
        compute_s = num_tokens / info.prefill_tokens_per_s
        num_bytes = len(missing) * info.block_bytes
        if num_tokens < LEAST_TOKENS or self._rate.seconds(num_bytes) >= compute_s:
            return None
        return Fetch(taking, missing, num_bytes, compute_s)

    def start(self, fetch: Fetch, then: Callable[[], None]) -> None:
        """Fetch a prefix, and call `then` when that has ended, or has taken too long.

        Requests that begin alike and arrive together wait for one fetch.
        """
        key = fetch.taking, fetch.hashes[0]
        if (fetching := self._fetches.get(key)) is None:
            fetching = self._fetches[key] = self._tasks.start(self._fetch(fetch))
            fetching.add_done_callback(lambda _: self._fetches.pop(key))
        self._tasks.start(ends_in_time(fetching, fetch.compute_s, then))

    def store_later(self, hashes: Sequence[BlockHash], giving: Session) -> None:
        """Store a prompt's full blocks when they are computed."""
        new = [each for each in hashes if each not in self._known]
        is_long = len(hashes) * giving.block_size >= LEAST_TOKENS
        if new and is_long and _has_far(giving) and self._num_storing < _MAX_STORING:
            self._num_storing += 1
            self._tasks.start(self._store(new, giving))

    def stop(self) -> None:
        """Cancel what is in progress, when the sessions end."""
        self._tasks.stop()

    async def _fetch(self, fetch: Fetch) -> None:
        taking = fetch.taking
        started_s = asyncio.get_running_loop().time()
        room = taking.call(lambda core: core.expect(fetch.hashes))
        num_arrived = 0
        try:
            if room.hashes:
                await taking.wait_until(has_answered(room.ready_step))
                num_arrived = await taking.link.fetch_kv(room.hashes, room.host_block_ids)
        except QuireError as error:
            log.warning("a prefix was not fetched", reason=str(error))
        finally:
            with contextlib.suppress(QuireError):
                taking.call(lambda core: core.receive(room.room_id, num_arrived))
        self._know(room.hashes[:num_arrived])
        for each in room.hashes[num_arrived:]:
            self._known.pop(each, None)  # to be stored again
        if num_arrived:
            seconds = asyncio.get_running_loop().time() - started_s
            num_bytes = fetch.num_bytes * num_arrived / len(fetch.hashes)
            self._rate.measure(num_bytes / seconds)

    async def _store(self, hashes: list[BlockHash], giving: Session) -> None:
        last = hashes[-1:]

        def is_computed(core: Scheduler) -> bool:
            return bool(core.lookup.num_cached_blocks(last))

        try:
            async with asyncio.timeout(_COMPUTED_S):
                await giving.wait_until(is_computed)
                while hashes:
                    num_stored = await self._store_some(hashes, giving)
                    self._know(hashes[:num_stored])
                    if not num_stored:
                        return
                    del hashes[:num_stored]
        except TimeoutError:
            pass
        except QuireError as error:
            log.warning("a prefix was not stored", reason=str(error))
        finally:
            self._num_storing -= 1

    async def _store_some(self, hashes: Sequence[BlockHash], giving: Session) -> int:
        """Store as many of the first blocks as the host has room for; return their number."""
        loan = giving.call(lambda core: core.lend(hashes))
        try:
            if not loan.hashes:
                return 0
            await giving.wait_until(has_answered(loan.ready_step))
            return await giving.link.store_kv(loan.hashes, loan.host_block_ids)
        finally:
            with contextlib.suppress(QuireError):
                giving.call(lambda core: core.end_loan(loan.loan_id))

    def _know(self, hashes: Sequence[BlockHash]) -> None:
        for each in hashes:
            self._known[each] = None
            self._known.move_to_end(each)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


def _has_far(session: Session) -> bool:
    info = session.info
    return info.has_far_kv and info.limits.kv_windows == (None,)
