"""Places requests on the schedulers of a service, and moves the requests of lost schedulers.

Several schedulers may each have workers of their own, or be standbys of each other; the router does
not need to know which. Live requests of a lost scheduler go to the next scheduler that connects:
the lost scheduler itself, its replacement, or any other. If no scheduler connects soon, these
requests go to schedulers that are still connected.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import grpc

from contract.errors import (
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    TooBusyError,
    UnavailableError,
)
from contract.info import ModelInfo
from contract.outputs import FinishReason, OutputError
from contract.request import MAX_N
from quire.v1.common_pb2 import ActivityQuery, Load, WorkerActivity
from quire.v1.kv_pb2 import KvQuery, WorkerKv
from router.live.live_request import LiveRequest
from router.metrics import of_model
from router.schedulers.calls import SchedulerCalls, sum_loads
from router.schedulers.link import LinkConfig, MisfitError, SchedulerLink
from router.schedulers.placement import SchedulerPlacement, has_room
from router.schedulers.resuming import StartResumed
from router.schedulers.scheduler_model import can_continue, misfit_of, together
from router.text.tokenizer import Tokenizers
from rpc.health import Health
from rpc.peers.discovery import Discovery, keep_members

_RETURN_S = 2.0
"""How long the router waits for a lost scheduler to return, before it submits the scheduler's
requests to other schedulers, which have to compute the requests' KV again."""
_AWAY_S = 10.0
"""If a scheduler was lost less than this time ago, the router refuses changes that must reach all
schedulers, such as a new adapter, because the scheduler may return and would lack the change."""

T = TypeVar("T")


class Schedulers:
    """Owns a `SchedulerLink` to each scheduler."""

    def __init__(
        self, discovery: Discovery, config: LinkConfig, *, tokenizers: Tokenizers, health: Health
    ) -> None:
        """`health` is ready while at least one connected scheduler does not hang.

        When a scheduler connects, its model's tokenizer becomes the current one of `tokenizers`. A
        model whose vocabulary is smaller than its tokenizer's cannot be served.
        """
        self._discovery = discovery
        self._config = config
        self._tokenizers = tokenizers
        self.health = health
        self._links: list[SchedulerLink] = []
        self._placement = SchedulerPlacement()
        self._model: ModelInfo | None = None
        self._model_changed = asyncio.Event()
        self._next_seq_key = 0
        self._is_draining = False

    @property
    def is_loaded(self) -> bool:
        """Whether a connected scheduler has a worker with a model, as far as the router knows."""
        return any(not link.is_unloaded for link in self._connected)

    @property
    def num_live_seqs(self) -> int:
        """The number of this router's sequences that have not ended, whether they run or wait."""
        return sum(len(link.table) for link in self._links)

    @property
    def is_ready(self) -> bool:
        """Whether at least one connected scheduler does not hang."""
        return any(link.hang is None for link in self._connected)

    # --- for requests ---------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo | None:
        """The model that the schedulers serve, or served last.

        If the length limits of the schedulers differ, this model has the smallest limit. None
        before a scheduler has connected, and after the router has refused the only scheduler, whose
        model does not fit the tokenizer.
        """
        return self._model

    async def model_change(self) -> None:
        """Wait until the limits or adapters of a scheduler's model change."""
        self._model_changed.clear()
        await self._model_changed.wait()

    @property
    def resume_grace_s(self) -> float:
        """The longest time that a resumable request continues without a reader."""
        return max((link.resume_grace_s for link in self._links), default=0.0)

    def check_room(self, n: int) -> None:
        """Check that a scheduler has reported enough room in its queue for `n` more sequences.

        The check comes before the prompt is tokenized, so the router rarely tokenizes a prompt that
        no scheduler accepts. Raises InvalidArgumentError if no queue could hold `n` sequences even
        if it were empty, and TooBusyError if no queue has room for `n` more sequences now.
        """
        limits = [link.max_waiting for link in self._connected]
        if limits and all(most is not None and n > most for most in limits):
            most = max(most for most in limits if most is not None)
            raise InvalidArgumentError(
                "n", f"is {n}; it must be at most {most}, the length of the longest queue"
            )
        rooms = [link.room for link in self._connected]
        if rooms and not any(has_room(room, n) for room in rooms):
            most = max(room for room in rooms if room is not None)
            raise TooBusyError(
                f"the queue is full: {most} more sequences may wait, and this request has {n}"
            )

    async def check_capacity(self, num_seqs: int) -> None:
        """Check that `num_seqs` sequences could be live at once if there were no other sequences.

        Raises InvalidArgumentError if the schedulers could not hold so many sequences, and
        UnavailableError if no scheduler is connected, or a scheduler does not answer.
        """
        if not self._connected:
            raise self.unavailable()
        links = [(link, link.max_waiting or 0) for link in self._connected]
        # If the queue of one worker is long enough, do not ask for the loads.
        if any(most == 0 or num_seqs <= most for _, most in links):
            return
        loads = await asyncio.gather(*(link.calls.load() for link, _ in links))
        most = sum(
            load.max_num_seqs + max(1, load.num_workers) * max_waiting
            for (_, max_waiting), load in zip(links, loads, strict=True)
        )
        if num_seqs > most:
            raise InvalidArgumentError(
                "prompt",
                f"makes {num_seqs} sequences, n for each prompt; at most {most} may run and wait at"
                " once",
            )

    def reserve_seq_keys(self, n: int) -> int:
        """Return the first of `n` new consecutive sequence keys.

        Raises UnavailableError if no scheduler is connected. The caller must call `submit` before
        it awaits anything: during an await all schedulers could disconnect, and `submit` needs a
        connected one.
        """
        if not self._connected:
            raise self.unavailable()
        first = self._next_seq_key
        self._next_seq_key += n
        return first

    def submit(self, live: LiveRequest) -> None:
        """Submit a request. At least one scheduler must be connected; see `reserve_seq_keys`."""
        self._placement.choose(live, self._connected).submit(live)

    def cancel(self, seq_keys: Sequence[int]) -> None:
        """Cancel live sequences of one request; their further events are not delivered."""
        for link in self._links:
            link.cancel(seq_keys)

    def leave(self, live: LiveRequest) -> None:
        """Let a request continue at its scheduler until a client resumes it at any router."""
        if (link := self._link_of(live)) is not None:
            link.leave(live)

    def unpin(self, request_id: str, tenant: str) -> None:
        """Drop the pins of a request's prompt at all schedulers."""
        for link in self._links:
            link.unpin(request_id, tenant)

    def is_kept(self, live: LiveRequest) -> bool:
        """Whether a connected scheduler has the request."""
        link = self._link_of(live)
        return link is not None and link.is_connected

    async def resume(self, request_id: str, tenant: str, start: StartResumed) -> LiveRequest:
        """Become the router of a resumable request; return it with all its events so far.

        `start` makes an empty live request. Raises the scheduler's errors, such as `NotFoundError`,
        and `UnavailableError` if no scheduler is connected.
        """
        refusal: QuireError = self.unavailable()
        for link in self._connected:
            try:
                return await link.resume(request_id, tenant, self.reserve_seq_keys(MAX_N), start)
            except NotFoundError as error:
                refusal = error
        raise refusal

    def unavailable(self) -> UnavailableError:
        """Return an error that says why no scheduler is connected."""
        for link in self._links:
            if link.misfit is not None:
                return UnavailableError(str(link.misfit))
        targets = ", ".join(link.target for link in self._links)
        return UnavailableError(
            f"the scheduler at {targets} is not connected" if targets else "no scheduler was found"
        )

    def set_draining(self) -> None:
        """Do not update `health` from now on: a draining router must not become ready again."""
        self._is_draining = True

    # --- unary calls ----------------------------------------------------------------------------

    def calls_to_all(self) -> Sequence[SchedulerCalls]:
        """Return a `SchedulerCalls` for each scheduler, for changes that must reach all of them.

        Raises UnavailableError if no scheduler is connected, or if one was lost or discovered less
        than `_AWAY_S` ago and has not connected since. A scheduler that has been away for longer is
        left out, because it may be a standby.
        """
        if not self._connected:
            raise self.unavailable()
        now = asyncio.get_running_loop().time()
        for link in self._links:
            if link.away_since is not None and (away_s := now - link.away_since) < _AWAY_S:
                raise UnavailableError(
                    f"the scheduler at {link.target} has not been connected for {away_s:.1f} s; the"
                    f" call is refused until it connects or {_AWAY_S:g} s have passed"
                )
        return [link.calls for link in self._connected]

    @property
    def target_to_calls(self) -> Mapping[str, SchedulerCalls]:
        """Calls to the connected schedulers, by address; there may be none."""
        return {link.target: link.calls for link in self._connected}

    @property
    def target_to_is_connected(self) -> Mapping[str, bool]:
        """Maps the address of each known scheduler to whether it is connected; may be empty.

        A scheduler whose workers have never loaded a model is not connected, even while it runs.
        """
        return {link.target: link.is_connected for link in self._links}

    async def load(self) -> Load:
        """Return the sum of the loads of all connected schedulers.

        Raises UnavailableError if no scheduler is connected.
        """
        if not self._connected:
            raise self.unavailable()
        return sum_loads(await asyncio.gather(*(link.calls.load() for link in self._connected)))

    async def describe_kv(self, query: KvQuery) -> Sequence[WorkerKv]:
        """Return which sequences hold which KV blocks.

        Raises the schedulers' errors, and `UnavailableError` if no scheduler is connected.
        """
        return await self._ask_all(lambda link: link.calls.describe_kv(query))

    async def describe_activity(self, query: ActivityQuery) -> Sequence[WorkerActivity]:
        """Return totals and latest steps of the workers; raises the errors of `describe_kv`."""
        return await self._ask_all(lambda link: link.calls.describe_activity(query))

    async def _ask_all(self, ask: Callable[[SchedulerLink], Awaitable[Sequence[T]]]) -> list[T]:
        refusal: QuireError | None = None if self._connected else self.unavailable()
        workers: list[T] = []
        for link in self._connected:
            try:
                workers += await ask(link)
            except NotFoundError as error:  # another scheduler may have the worker
                refusal = error
        if refusal is not None and not workers:
            raise refusal
        return workers

    # --- connections ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a stream to each scheduler until cancelled.

        If a bug raises an exception, all live requests end with an error before `run` raises the
        exception.
        """
        self._update_health()
        watch = asyncio.create_task(
            self._placement.watch(lambda: self._connected), name="schedulers' loads"
        )
        try:
            await keep_members(
                self._discovery, join=self._join, may_leave=self._may_leave, left=self._left
            )
        except Exception:
            for link in self._links:
                self._fail_all(link, "the router failed")
            raise
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _join(self, target: str) -> SchedulerLink:
        link = SchedulerLink(target, self._config, self)
        self._links.append(link)
        self._update_health()
        return link

    def _may_leave(self, link: SchedulerLink) -> bool:
        return not link.is_connected and (not link.table or bool(self._connected))

    def _left(self, link: SchedulerLink) -> None:
        self._links.remove(link)
        self._placement.forget(link)
        self._move_all(link)
        self._update_health()

    # --- for the links (LinkOwner) --------------------------------------------------------------

    async def prepare(self, model: ModelInfo) -> None:
        """Read the model's tokenizer."""
        try:
            await self._tokenizers.read(model.directory)
        except Exception as error:
            # Libraries raise many kinds of errors for bad JSON and templates
            raise MisfitError(
                f"{model} has no tokenizer that this router can read: {error}"
            ) from error

    def check_fit(self, link: SchedulerLink, model: ModelInfo) -> None:
        """Check that a scheduler's model fits its tokenizer and the other schedulers' models.

        A model that fits becomes the served model; live requests that cannot continue with it fail.
        """
        others = [other for other in self._connected if other is not link]
        before = self._model
        num_token_ids = self._tokenizers.num_token_ids(model.directory)
        misfit = misfit_of(model, link.target, num_token_ids, (each.model for each in others))
        if misfit is not None:
            if others:
                self._move_all(link)
            else:
                self._model = None
                self._fail_all(link, misfit)
            raise MisfitError(misfit)
        if before is not None and not can_continue(model, before):
            for each in self._links:
                self._fail_all(each, "the service now has another model")
        self._tokenizers.use(model.directory)
        self._model = together([model, *(other.model for other in others)])

    def connected(self, link: SchedulerLink) -> None:
        """Move live requests to a scheduler that has just connected.

        These are the requests of lost schedulers, and of connected schedulers whose workers the new
        scheduler has taken over.
        """
        for other in self._links:
            self._move_all(other, [link])
            if other.is_connected and other.epoch in link.superseded_epochs:
                other.leave_superseded(link.epoch)  # `changed` then moves its requests
        self._update_health()

    def changed(self, link: SchedulerLink) -> None:
        """Handle a change of a link, such as the loss or the hang of its scheduler.

        If the scheduler hangs or was lost, links that are not connected retry sooner, because a
        standby may replace the scheduler. The requests of a lost scheduler move only after
        `_RETURN_S`, because the scheduler may return, and its workers still have the KV. If another
        scheduler has taken over the lost scheduler's workers, the requests move at once.
        """
        if link.hang is not None or not (link.is_connected or link.is_starting):
            for other in self._links:
                if not (other is link or other.is_connected):
                    other.hurry()
        if not link.is_connected and link.table and (others := self._connected):
            is_superseded = any(link.epoch in other.superseded_epochs for other in others)
            delay_s = 0 if is_superseded else _RETURN_S
            asyncio.get_running_loop().call_later(delay_s, self._move_all, link)
        self._update_health()

    def model_changed(self) -> None:
        """Update `model` after the limits or adapters of a scheduler's model have changed."""
        self._model_changed.set()
        if self._model is not None:
            self._model = together(link.model for link in self._connected)

    def refused(self, link: SchedulerLink, live: LiveRequest) -> bool:
        """Submit a refused request to another scheduler; return False if no other one has room.

        A scheduler that has refused the request does not get it again.
        """
        live.refused_by.add(link.target)
        n = len(live.outputs)
        others = [
            other
            for other in self._connected
            if other.target not in live.refused_by and has_room(other.room, n)
        ]
        if others:
            live.num_submits = 0
            self._placement.choose(live, others).submit(live)
        return bool(others)

    # --- parts ----------------------------------------------------------------------------------

    @property
    def _connected(self) -> list[SchedulerLink]:
        return [link for link in self._links if link.is_connected]

    def _link_of(self, live: LiveRequest) -> SchedulerLink | None:
        keys = live.live_seq_keys
        return next((link for link in self._links if any(k in link.table for k in keys)), None)

    def _move_all(
        self, link: SchedulerLink, targets: Sequence[SchedulerLink] | None = None
    ) -> None:
        """Move a lost scheduler's live requests to `targets`; None: to all connected schedulers.

        Does nothing if the lost scheduler is connected again, or if there are no `targets`.
        """
        targets = self._connected if targets is None else targets
        if link.is_connected or not targets:
            return  # the scheduler has returned, or no other one is connected
        for live in link.table.lives:
            link.table.discard(live)
            self._placement.choose(live, targets).submit(live)

    def _fail_all(self, link: SchedulerLink, message: str) -> None:
        error = OutputError(grpc.StatusCode.UNAVAILABLE.value[0], message, retryable=True)
        for live in link.table.lives:
            link.table.discard(live)
            for seq_key in live.live_seq_keys:
                live.finish(seq_key, FinishReason.ERROR, error=error)
            live.flush()

    def _update_health(self) -> None:
        num_connected = len(self._connected)
        of_model(self._config.model_name).scheduler_connected.set(num_connected)
        if self._is_draining:
            return
        hangs = [link.hang for link in self._connected if link.hang is not None]
        if num_connected > len(hangs):
            self.health.set_ready()
        elif hangs:
            self.health.set_not_ready("; ".join(hangs))
        elif problems := [link.status for link in self._links if not link.is_starting]:
            self.health.set_not_ready("; ".join(problems))
        else:
            waits = [link.status for link in self._links]
            self.health.set_starting("; ".join(waits) or "waiting for a scheduler to be found")
