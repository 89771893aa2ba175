"""Shares prefixes with other services through the far tier: stores and fetches the KV of prompts.

A worker reads and writes the far tier; this module decides which blocks are stored or fetched, and
when. The full blocks of a prompt are stored when they are computed. A request and its prompt are
*admitted* when the request's first sequence leaves the queue of a worker's core. A request waits
for blocks from the far tier as it does for blocks of another worker (`PrefixPulls`): at most as
long as computing the blocks would take.
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
from scheduler_svc.core.interface.events import Admitted
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.domain import live_seq_keys
from scheduler_svc.workers.kv.copy import has_answered
from scheduler_svc.workers.kv.prefix_pulls import LEAST_TOKENS, CopyTimes, ends_in_time
from scheduler_svc.workers.placement import prompt_hashes
from scheduler_svc.workers.session import Session

_COMPUTED_S: Final = 60.0
"""The longest time from a prompt's admission until all its blocks are stored, in seconds. After
this time, the blocks that are left are not stored."""
_MAX_STORING: Final = 64
"""The limit on admitted prompts that wait to be computed and then stored, or are being stored."""
_MAX_QUEUED_TOKENS: Final = 2**23
"""The limit on the tokens of all prompts that are to be stored but are not admitted yet. Above the
limit, the oldest prompts are not stored."""
_MAX_LENDING_TRIES: Final = 16
"""If `Scheduler.lend` returns no block this many times in a row, the rest of the prompt is not
stored."""
_MAX_FETCHES: Final = 8
"""The limit on concurrent fetches for one worker."""
_FETCH_BLOCKS: Final = 64
"""How many blocks are fetched together, to reserved host blocks of the worker."""
_FETCH_S: Final = 10.0
"""The longest time for which blocks of one prompt are fetched, in seconds."""
_MAX_KNOWN: Final = 2**17
"""The limit on blocks that are remembered as stored, so that they are not stored again."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A prefix to fetch from the far tier."""

    taking: Session
    hashes: Sequence[BlockHash]
    num_bytes: int
    compute_s: float
    """How many seconds `taking`'s worker would need to compute these blocks instead."""


class FarTier:
    """Decides which prefixes workers store in the far tier, and which they fetch from it."""

    def __init__(self) -> None:
        self._tasks = BackgroundTasks()
        self._times = CopyTimes()
        self._fetches: dict[tuple[Session, BlockHash], asyncio.Task[None]] = {}
        """Fetches in progress, by worker and first block."""
        self._queued: OrderedDict[tuple[SourceId, SeqKey], Request] = OrderedDict()
        """Requests that are not admitted yet. When a request is admitted, its prompt is to be
        stored. If the prompts have more than `_MAX_QUEUED_TOKENS` tokens in all, the oldest
        requests are removed, and their prompts are not stored."""
        self._num_queued_tokens = 0
        self._num_storing = 0
        self._known: OrderedDict[BlockHash, None] = OrderedDict()

    def find(self, hashes: Sequence[BlockHash], taking: Session) -> Fetch | None:
        """Return what to fetch for a prompt, given the hashes of its full blocks; None: nothing."""
        info = taking.info
        if not (_has_far(taking) and hashes and info.prefill_tokens_per_s):
            return None
        missing = hashes[taking.num_cached_blocks(hashes) :]
        num_tokens = len(missing) * taking.block_size
        compute_s = num_tokens / info.prefill_tokens_per_s
        num_bytes = len(missing) * info.block_bytes
        if num_tokens < LEAST_TOKENS or self._times.seconds(num_bytes) >= compute_s:
            return None
        num_fetches = sum(session is taking for session, _ in self._fetches)
        if num_fetches >= _MAX_FETCHES and (taking, missing[0]) not in self._fetches:
            return None
        return Fetch(taking, missing, num_bytes, compute_s)

    def start(self, fetch: Fetch, then: Callable[[], None]) -> None:
        """Fetch a prefix; call `then` when the fetch has ended or has taken too long.

        Requests with the same prefix that arrive together share one fetch.
        """
        key = fetch.taking, fetch.hashes[0]
        if (fetching := self._fetches.get(key)) is None:
            fetching = self._fetches[key] = self._tasks.start(self._fetch(fetch))
            fetching.add_done_callback(lambda _: self._fetches.pop(key))
        self._tasks.start(ends_in_time(fetching, fetch.compute_s, then))

    def store_later(self, request: Request) -> None:
        """Store the full blocks of a request's prompt later, when they have been computed.

        Only admitted requests count towards `_MAX_STORING`, so a long queue does not keep other
        prompts from being stored.
        """
        name = request.source, live_seq_keys(request)[0]
        self._forget(name)
        if len(request.prompt_token_ids) > LEAST_TOKENS and request.reads_prefix_cache:
            self._queued[name] = request
            self._num_queued_tokens += len(request.prompt_token_ids)
        while self._num_queued_tokens > _MAX_QUEUED_TOKENS:
            self._forget(next(iter(self._queued)))

    def on_admitted(self, giving: Session, admitted: Admitted) -> None:
        """Start a task that stores a request's prompt once `giving`'s worker has computed it."""
        request = self._forget((admitted.source, admitted.seq_key))
        if request is None or not _has_far(giving) or self._num_storing >= _MAX_STORING:
            return
        hashes = prompt_hashes(request, giving.block_size)
        new = [each for each in hashes if each not in self._known]
        if new and len(hashes) * giving.block_size >= LEAST_TOKENS:
            self._num_storing += 1
            self._tasks.start(self._store(request, new, giving))

    def stop(self) -> None:
        """Cancel all fetches and stores; called when the sessions end."""
        self._tasks.stop()

    def _forget(self, name: tuple[SourceId, SeqKey]) -> Request | None:
        request = self._queued.pop(name, None)
        if request is not None:
            self._num_queued_tokens -= len(request.prompt_token_ids)
        return request

    async def _fetch(self, fetch: Fetch) -> None:
        taking, loop = fetch.taking, asyncio.get_running_loop()
        started_s = loop.time()
        # The store lacks most prompts; the first block shows whether it has this one.
        num_done, count = 0, 1
        try:
            most = taking.call(lambda core: core.copies.num_expectable)
            hashes = fetch.hashes[:most]  # more blocks would evict the first ones
            while num_done < len(hashes) and loop.time() < started_s + _FETCH_S:
                wanted = hashes[num_done : num_done + count]
                num_arrived = await self._fetch_some(wanted, taking)
                num_done += num_arrived
                if num_arrived < len(wanted):
                    for each in fetch.hashes[num_done:]:
                        # Forget the blocks that failed, so that they are stored again.
                        self._known.pop(each, None)
                    break
                count = _FETCH_BLOCKS
        except QuireError as error:
            log.warning("a prefix was not fetched", reason=str(error))
        self._know(fetch.hashes[:num_done])
        if num_done:
            num_bytes = fetch.num_bytes * num_done / len(fetch.hashes)
            self._times.measure(num_bytes, loop.time() - started_s)

    async def _fetch_some(self, hashes: Sequence[BlockHash], taking: Session) -> int:
        """Fetch blocks in order, until the far tier lacks a block or the host has no room for it.

        Returns:
            The number of blocks that have arrived.
        """
        room = taking.call(lambda core: core.expect(hashes))
        num_arrived = 0
        try:
            if room.hashes:
                await taking.wait_until(has_answered(room.ready_step))
                num_arrived = await taking.link.fetch_kv(room.hashes, room.host_block_ids)
        finally:
            with contextlib.suppress(QuireError):
                taking.call(lambda core: core.receive(room.room_id, num_arrived))
        return num_arrived

    async def _store(self, request: Request, hashes: list[BlockHash], giving: Session) -> None:
        last = hashes[-1:]
        keys = range(request.first_seq_key, request.first_seq_key + request.n)

        def is_computed_or_gone(core: Scheduler) -> bool:
            is_computed = bool(core.lookup.num_cached_blocks(last))
            return is_computed or not core.live.find(request.source, keys)

        try:
            async with asyncio.timeout(_COMPUTED_S):
                await giving.wait_until(is_computed_or_gone)
                num_tries = 0
                while hashes and num_tries < _MAX_LENDING_TRIES:
                    num_stored = await self._store_some(hashes, giving)
                    if num_stored is None:
                        num_tries += 1
                        continue
                    if not num_stored:
                        return  # the store is full, or paused after errors
                    num_tries = 0
                    self._know(hashes[:num_stored])
                    del hashes[:num_stored]
        except TimeoutError:
            pass
        except QuireError as error:
            log.warning("a prefix was not stored", reason=str(error))
        finally:
            self._num_storing -= 1

    async def _store_some(self, hashes: Sequence[BlockHash], giving: Session) -> int | None:
        """Store the first blocks, as many as `Copies.lend` gives; return how many were stored.

        The result is None if the core lent no blocks, because swap-ins wait or the host is full.
        In this case the method has waited for the steps in flight. These steps can end swap-ins and
        free host blocks, so another call may succeed.
        """
        loan = giving.call(lambda core: core.lend(hashes))
        try:
            await giving.wait_until(has_answered(loan.ready_step))
            if not loan.hashes:
                return None
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
