"""Accepts turns, computes them to the end, and lets clients follow them."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Final, Protocol

import structlog

from contract.errors import (
    AlreadyExistsError,
    NotFoundError,
    QuireError,
    TooBusyError,
    UnavailableError,
)
from contract.outputs import (
    Event,
    FinishReason,
    OutputDelta,
    OutputError,
    OutputFinished,
    Usage,
)
from contract.request import GenerateRequest
from router.access.api_keys import key_of_call
from router.live.live_request import LiveRequest
from router.live.usage import UsageCounts, UsageKey, UsageRows, Used, hour_of
from router.request.cells import Cells
from router.request.inference import Inference
from router.request.on_demand import is_patient
from router.schedulers.wire import record_from_bytes, record_to_bytes
from router.stored_turns.fair_claims import Models
from router.stored_turns.running import MovedError, RunningTurn, Seen
from router.stored_turns.store import SWEEP_LIMIT, TurnChanges, TurnStore
from router.stored_turns.turn import StoreError, Turn, TurnAnswer, TurnEnd, TurnStatus

log = structlog.get_logger()

TICK_S: Final = 1.0
"""Interval at which tokens are written and leases renewed."""
_USAGE_S: Final = 5.0
"""Interval at which usage is written."""
_NO_USAGE: Final[tuple[int, UsageRows]] = 0, {}
_SWEEP_S: Final = 60.0
_POLL_S: Final = 0.5
"""Interval at which a turn of another router is polled."""
_MAX_RUNNING: Final = 256
"""While a router runs this many turns of a cell, it takes over no more turns of this cell. Turns
that are in a group are not counted; their limit is `_MAX_GROUPED`."""
_MAX_GROUPED: Final = 32
"""The same limit for turns that are in a group. A batch, for example, is a group of turns, one for
each line. The limit is low, to favour clients that wait for an answer."""
_MAX_FAILURES: Final = 3
"""After this many failures without a new token, a turn fails for good."""
_MIN_BACKOFF_S: Final = 0.1
_MAX_BACKOFF_S: Final = 5.0
_CANCEL_S: Final = 5.0
"""Maximum time for which a call waits until the end of a cancelled turn is stored."""


class TurnKind(Protocol):
    """An API's methods for its turns."""

    async def answer(self, turn: Turn) -> TurnAnswer | None:
        """Compute the answer of a turn that generates no tokens, such as one for embeddings.

        Returns None for a turn that generates tokens. The caller then calls `request`, and submits
        the request that it returns. May raise QuireError.
        """

    async def request(self, turn: Turn) -> GenerateRequest:
        """Return the request of a queued turn; raises QuireError if the request is invalid."""

    async def result(
        self, turn: Turn, status: TurnStatus, events: Sequence[Event], at: float
    ) -> bytes:
        """Return the answer to store, as JSON, for the events of a turn that ended at time `at`."""

    def failure(self, turn: Turn, error: QuireError) -> bytes:
        """Return the answer to store, as JSON, if `result` has raised an error; must not raise."""


class Turns:
    """The turns of one router. Each turn has a task that computes it.

    The method `run` writes the turns to the store.
    """

    def __init__(
        self,
        store: TurnStore,
        cells: Cells,
        usage: UsageCounts,
        *,
        retention_s: float,
        usage_retention_s: float,
        tick_s: float = TICK_S,
    ) -> None:
        """Begin without turns; `run` takes over the turns that no router computes.

        `usage` counts the usage of requests that are not turns; `run` stores that usage, too. `run`
        deletes turns `retention_s` after their end, and usage after `usage_retention_s`.
        """
        self.store = store
        self._cells = cells
        self._usage = usage
        self._retention_s = retention_s
        self._usage_retention_s = usage_retention_s
        self._tick_s = tick_s
        self._kinds: dict[str, TurnKind] = {}
        self._running: dict[str, RunningTurn] = {}
        self._accepted: list[tuple[Turn, asyncio.Future[bool]]] = []
        self._released: set[str] = set()
        self._losing: set[asyncio.Task[None]] = set()
        self._is_urgent = asyncio.Event()
        self._is_draining = False
        self._is_failing = False
        self._pacing = asyncio.Lock()
        self._has_ended_grouped = False
        """Whether a turn that is in a group has ended since `run` last took over turns."""

    def serve(self, name: str, kind: TurnKind) -> None:
        """Register a kind of turn."""
        self._kinds[name] = kind

    # --- for the APIs ---------------------------------------------------------------------------

    async def accept(self, turn: Turn, request: GenerateRequest) -> Turn:
        """Submit a turn's request, and store the turn; the service completes every stored turn.

        Returns the turn, or an earlier turn with the same idempotency key.

        Raises:
            AlreadyExistsError: Another request has the turn's idempotency key.
            StoreError: The turn cannot be stored, and will not be computed.
            QuireError: An error of `Inference.generate`.
        """
        if (known := await self._with_key(turn)) is not None:
            return known
        # A client that disconnects now must not interrupt the submission.
        accepting = asyncio.create_task(self._accept(turn, request))
        return await asyncio.shield(accepting)

    async def _accept(self, turn: Turn, request: GenerateRequest) -> Turn:
        live = await self._cells.generate(request, is_kept=True)
        turn = replace(
            turn,
            model=live.model,
            key_name=key_of_call(),
            status=TurnStatus.RUNNING,
            record=record_to_bytes(live, request),
            priority=request.priority,
        )
        try:
            if await self._keep(turn):
                self._start(RunningTurn(turn), live)
                return turn
        except BaseException:
            await live.aclose()
            raise
        await live.aclose()
        known = await self._with_key(turn)
        if known is None:
            raise StoreError("the turn was deleted while it was accepted")
        return known

    async def _keep(self, turn: Turn) -> bool:
        kept: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._accepted.append((turn, kept))
        self._is_urgent.set()
        return await kept

    async def _with_key(self, turn: Turn) -> Turn | None:
        if turn.idempotency_key is None:
            return None
        known = await self.store.find_by_key(turn.tenant, turn.idempotency_key)
        if known is not None and known.fingerprint != turn.fingerprint:
            raise AlreadyExistsError(
                f"Idempotency-Key {turn.idempotency_key!r} belongs to another request"
            )
        return known

    async def find(self, tenant: str, turn_id: str, kind: str) -> Turn:
        """Return a turn; may raise NotFoundError or StoreError."""
        turn = await self.store.find(tenant, turn_id)
        if turn is None or turn.kind != kind:
            raise NotFoundError(f"{kind} {turn_id[:128]!r} is not kept, or has been deleted")
        return turn

    async def read(self, turn: Turn, seen: Seen) -> AsyncGenerator[Event, None]:
        """Yield a turn's events that a reader lacks, until the end of the turn.

        The turn may be computed by any router.
        """
        number = 0
        while True:
            if (running := self._running.get(turn.id)) is not None:
                try:
                    async with contextlib.aclosing(running.read(seen)) as events:
                        async for event in events:
                            yield event
                except MovedError:
                    continue
                return
            # Read the status first: if the turn has ended, all events are stored.
            first = max(0, number - 1)  # the last event may have grown
            try:
                now = await self.store.find(turn.tenant, turn.id)
                kept = [] if now is None else await self.store.events(turn.id, first)
            except StoreError:  # the turn continues, and so does its reader
                await asyncio.sleep(_POLL_S)
                continue
            if now is None:
                raise NotFoundError(f"{turn.kind} {turn.id!r} has been deleted")
            number = first + sum(isinstance(event, OutputDelta) for event in kept)
            if now.status.has_ended:
                seen.ended_at = now.ended_at
            for event in seen.new_of(kept):
                if now.status.has_ended or isinstance(event, OutputDelta):
                    yield event
            if now.status.has_ended:
                return
            await asyncio.sleep(_POLL_S)

    async def cancel(self, turn: Turn) -> Turn:
        """Cancel a turn, unless it has ended; return the turn as it is afterwards."""
        running = self._running.get(turn.id)
        if running is not None:
            await self._cancel(running)
        elif not turn.status.has_ended:
            events = [*await self.store.events(turn.id)]
            left = RunningTurn(turn, events)
            num_before = len(left.events)  # `left` joins the deltas of an output
            left.stop(FinishReason.CANCELLED)
            end = await self._end_of(left)
            await self.store.end(turn.tenant, turn.id, end, left.events[num_before:])
        return await self.find(turn.tenant, turn.id, turn.kind)

    async def delete(self, turn: Turn) -> bool:
        """Cancel and delete a turn, and unpin its prompt; return whether the turn existed."""
        if (running := self._running.get(turn.id)) is not None:
            await self._cancel(running)
        was_there = await self.store.delete(turn.tenant, turn.id)
        self._unpin(turn)
        return was_there

    async def _cancel(self, running: RunningTurn) -> None:
        running.is_cancelled = True
        task = running.task
        assert task is not None, "a running turn has a task"
        if not running.has_ended:
            task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_S)  # the store may fail

    # --- computing ------------------------------------------------------------------------------

    def _start(self, running: RunningTurn, live: LiveRequest | None) -> None:
        self._running[running.turn.id] = running
        running.task = asyncio.create_task(
            self._compute(running, live), name=f"turn {running.turn.id}"
        )

    async def _compute(self, running: RunningTurn, live: LiveRequest | None) -> None:
        try:
            try:
                await self._read_to_the_end(running, live)
            except asyncio.CancelledError:
                if not running.is_cancelled:
                    raise
                running.stop(FinishReason.CANCELLED)
            except QuireError as error:
                running.stop(FinishReason.ERROR, error)
            except Exception:
                log.exception("turn failed", turn=running.turn.id)
                running.stop(FinishReason.ERROR, QuireError("internal error"))
            await self._pace(running.turn)
            while True:
                try:
                    running.end(await self._end_of(running))
                    break
                except (TooBusyError, UnavailableError) as error:
                    log.debug("turn's answer waits", turn=running.turn.id, why=str(error))
                    await asyncio.sleep(self._tick_s)
            self._is_urgent.set()
            await running.done.wait()
        finally:
            if self._running.get(running.turn.id) is running:
                del self._running[running.turn.id]
            running.move()  # readers find the end in the store

    async def _read_to_the_end(self, running: RunningTurn, live: LiveRequest | None) -> None:
        self._cells.shared.act_for(running.turn.tenant, running.turn.key_name)
        backoff_s, num_failures, num_tokens = _MIN_BACKOFF_S, 0, running.num_tokens
        while True:
            try:
                if live is None and running.record is None:
                    running.answer = await self._kinds[running.turn.kind].answer(running.turn)
                if running.answer is not None:
                    running.stop(FinishReason.STOP)
                    return
                live = live or await self._submit(running)
                running.live = live
                async with live:
                    failure = await _take(running, live)
                if failure is None:
                    return
                if running.num_tokens > num_tokens:
                    backoff_s, num_failures, num_tokens = _MIN_BACKOFF_S, 0, running.num_tokens
                num_failures += 1
                if num_failures == _MAX_FAILURES:
                    raise QuireError(failure.message)
                log.warning("turn is submitted again", turn=running.turn.id, why=failure.message)
            except (TooBusyError, UnavailableError) as error:
                log.debug("turn waits", turn=running.turn.id, why=str(error))
            live = None
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _pace(self, turn: Turn) -> None:
        """Delay a turn that is in a group, such as a line of a batch.

        In each round of the event loop, this method returns for only one turn that is in a group.
        Many lines of a batch end in the same step. If the router handled them all in one round, it
        would delay the tokens of waiting clients. For a turn that is in no group, this method
        returns at once.
        """
        if turn.group:
            async with self._pacing:
                await asyncio.sleep(0)

    async def _submit(self, running: RunningTurn) -> LiveRequest:
        turn = running.turn
        await self._pace(turn)
        # To make a prompt, the model's limits must be known.
        cell = await self._cells.use(turn.model, is_patient=is_patient(turn.priority))
        if running.record is not None:
            return cell.restart(record_from_bytes(running.record), running.events)
        request = await self._kinds[turn.kind].request(turn)
        live = await cell.generate(request, is_kept=True)
        running.record = record_to_bytes(live, request)
        return live

    async def _end_of(self, running: RunningTurn) -> TurnEnd:
        """Return a turn's end with its answer, or with an error if the answer can never be made.

        Raises:
            TooBusyError: The answer cannot be made now; a retry may succeed.
            UnavailableError: As for TooBusyError.
        """
        turn, at, kind = running.turn, time.time(), self._kinds[running.turn.kind]
        usage, used = self._usage_of(running, at), running.used
        try:
            if running.answer is not None:
                result, used = running.answer.result, running.answer.used
            else:
                result = await kind.result(turn, running.status, running.events, at)
        except (TooBusyError, UnavailableError):
            raise
        except Exception as error:
            log.exception("turn's answer cannot be made", turn=turn.id)
            shown = error if isinstance(error, QuireError) else QuireError("internal error")
            return TurnEnd(TurnStatus.FAILED, kind.failure(turn, shown), at, usage, used)
        return TurnEnd(running.status, result, at, usage, used)

    def _usage_of(self, running: RunningTurn, at: float) -> UsageRows:
        """Return the usage to record for a turn that has ended."""
        if (used := running.used) == Used():
            return {}
        turn = running.turn
        if running.live is not None:
            model, adapter = running.live.usage_key.model, running.live.usage_key.adapter
        else:
            model = self._cells.served_by(turn.model)
            adapter = turn.model if turn.model != model else ""
        key = UsageKey(turn.tenant, turn.key_name, model, adapter)
        return {(hour_of(at), key): used}

    # --- the store ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Store new events, take over turns that no router computes, and delete old turns.

        Repeat this until cancelled.
        """
        loop = asyncio.get_running_loop()
        next_tick, next_sweep, next_usage = loop.time(), loop.time() + _SWEEP_S, loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_tick):
                    await self._is_urgent.wait()
            self._is_urgent.clear()
            is_tick = loop.time() >= next_tick
            has_usage = loop.time() >= next_usage
            try:
                await self._write(has_tokens=is_tick, has_usage=has_usage)
                if has_usage:
                    next_usage = loop.time() + _USAGE_S
                if is_tick:
                    next_tick = loop.time() + self._tick_s
                if is_tick or self._has_ended_grouped:
                    self._has_ended_grouped = False
                    await self._take_up(only_groups=not is_tick)
                if loop.time() >= next_sweep:
                    next_sweep = loop.time() + _SWEEP_S
                    num_swept = await self.store.sweep(self._retention_s, self._usage_retention_s)
                    if num_swept == SWEEP_LIMIT:
                        next_sweep = loop.time()  # there may be more old turns
                if self._is_failing:
                    log.info("turns can be stored again")
                self._is_failing = False
            except StoreError as error:
                next_tick = loop.time() + self._tick_s
                if not self._is_failing:
                    log.warning("turns cannot be stored", error=str(error))
                self._is_failing = True

    async def _write(self, *, has_tokens: bool, has_usage: bool) -> None:
        accepted, self._accepted = self._accepted, []
        written = {
            running: running.progress()
            for running in self._running.values()
            if has_tokens or running.needs_writing
        }
        usage = self._usage.take() if has_usage else _NO_USAGE
        if not (accepted or written or usage[1]):
            return
        changes = TurnChanges(
            [turn for turn, _ in accepted],
            [progress for progress, _ in written.values()],
            list(self._released),
            usage,
        )
        try:
            own = await self.store.write(changes)
        except StoreError as error:
            for _, kept in accepted:
                if not kept.done():
                    kept.set_exception(error)
            for running, (progress, _) in written.items():
                if progress.end is not None:
                    running.publish()  # readers get the end although it is not stored
            raise
        if usage[1]:
            self._usage.kept()
        self._released = own - {*self._running, *(turn.id for turn in changes.accepted)}
        for turn, kept in accepted:
            if not kept.done():
                kept.set_result(turn.id in own)
        for running, (progress, seen) in written.items():
            if running.turn.id not in own:
                self._lose(running)
                continue
            running.kept(progress, seen)
            if progress.end is not None:
                running.publish()
                running.done.set()
                self._running.pop(running.turn.id, None)
                self._has_ended_grouped |= bool(running.turn.group)

    def _lose(self, running: RunningTurn) -> None:
        """Stop computing a turn that another router has taken over or deleted."""
        log.info("turn was taken over or deleted", turn=running.turn.id)
        self._running.pop(running.turn.id, None)
        running.move()
        if running.task is not None:
            running.task.cancel()
        losing = asyncio.create_task(self._unpin_if_deleted(running))
        self._losing.add(losing)
        losing.add_done_callback(self._losing.discard)

    async def _unpin_if_deleted(self, running: RunningTurn) -> None:
        """If the turn was deleted, unpin its prompt.

        The router that deleted the turn has unpinned the prompt, too, but the turn's request may
        have pinned it again before this router learned of the deletion.
        """
        if running.task is not None:
            await asyncio.wait([running.task])
        with contextlib.suppress(StoreError):
            if await self.store.find(running.turn.tenant, running.turn.id) is None:
                self._unpin(running.turn)

    def _unpin(self, turn: Turn) -> None:
        with contextlib.suppress(NotFoundError):  # no model serves it any more
            self._cells.of(turn.model).schedulers.unpin(turn.id, turn.tenant)

    async def _take_up(self, *, only_groups: bool) -> None:
        for cell in self._cells.all:
            if not self._is_draining and (cell.model.infos() or self._cells.on_demand):
                await self._take_up_for(cell, only_groups=only_groups)

    async def _take_up_for(self, cell: Inference, *, only_groups: bool) -> None:
        """Take over turns of one cell; `_MAX_RUNNING` and `_MAX_GROUPED` are limits per cell."""
        own = [each.turn for each in self._running.values() if self._is_for(cell, each.turn)]
        grouped = Counter(turn.tenant for turn in own if turn.group)
        room = 0 if only_groups else max(0, _MAX_RUNNING - len(own) + grouped.total())
        group_room = max(0, _MAX_GROUPED - grouped.total())
        if not (room or group_room):
            return
        models = self._models_for(cell)
        for turn in await self.store.claim(room, group_room, models, grouped):
            if turn.kind not in self._kinds or turn.id in self._running:
                continue
            has_begun = turn.status is not TurnStatus.QUEUED
            running = RunningTurn(turn, await self.store.events(turn.id) if has_begun else ())
            if has_begun:
                log.info("turn continues", turn=turn.id, num_tokens=running.num_tokens)
            self._start(running, None)

    def _is_for(self, cell: Inference, turn: Turn) -> bool:
        try:
            return self._cells.of(turn.model) is cell
        except NotFoundError:  # the turn ends soon
            return False

    def _models_for(self, cell: Inference) -> Models:
        """Return the models whose turns a cell computes.

        The first cell also takes the turns of unknown models.
        """
        cells = self._cells.all
        names = cell.model.names()
        if cell is not cells[0]:
            return Models(names)
        others = [other for other in cells if other is not cell]
        # Unknown models are refused when the turn is submitted
        if all(other.model.infos() for other in others):
            taken = {name for other in others for name in other.model.names()} - {*names}
            return Models(tuple(taken), are_left_out=True)
        return Models(("", *names))

    # --- the end --------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Release immediately all turns that no client of this router reads."""
        self._is_draining = True
        await self._release([each for each in self._running.values() if not each.num_readers])

    async def close(self) -> None:
        """Release all turns, so that any router can take them over, even this one after a restart.

        Called after `run` has ended.
        """
        self._is_draining = True
        await self._release(list(self._running.values()))
        with contextlib.suppress(StoreError):
            while (usage := self._usage.take())[1]:
                await self.store.write(TurnChanges(usage=usage))
                self._usage.kept()
        await self.store.database.close()

    async def _release(self, leaving: Sequence[RunningTurn]) -> None:
        tasks = [each.task for each in leaving if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        progress = [each.progress()[0] for each in leaving]
        for each in leaving:
            each.move()
        with contextlib.suppress(StoreError):  # on failure, their leases expire
            await self.store.write(
                TurnChanges(progress=progress, released=[each.turn.id for each in leaving])
            )


async def _take(running: RunningTurn, live: LiveRequest) -> OutputError | None:
    """Read a request to its end; return its error if the error is retryable, else None."""
    failure: OutputError | None = None
    last: list[Event] = []

    def put(event: Event) -> None:
        nonlocal failure
        match event:
            case OutputDelta():
                running.add(event)
            case OutputFinished(error=OutputError(retryable=True) as error):
                failure = error
            case OutputFinished() | Usage():
                last.append(event)

    await live.send_to(put)  # a token wakes no task
    if failure is None:
        for event in last:
            running.add(event)
    return failure
