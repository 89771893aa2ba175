"""The router's stream to one scheduler: submits and cancels requests, and delivers their events.

If the stream breaks or the scheduler is replaced, live requests wait. The router then submits each
request to the next scheduler, from the request's `ReplayRecord` and with the tokens that the
request already has.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
import structlog

from contract.errors import InvalidArgumentError, QuireError, TooBusyError, UnavailableError
from contract.info import ModelInfo
from contract.liveness.heartbeat import BEAT_S, TICK_S, Heartbeat
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from router.live.live_request import LiveRequest
from router.metrics import of_model
from router.schedulers.calls import SchedulerCalls
from router.schedulers.live_table import LiveTable
from router.schedulers.messages import Refusal, Resumption, SchedulerMessage, StepEvents, Welcome
from router.schedulers.outbox import SchedulerOutbox
from router.schedulers.resuming import ResumingCalls, StartResumed
from router.schedulers.wire import message_from_proto
from rpc.observe import timeline
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls, explain

_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_HURRIED_BACKOFF_S = 0.2
"""For `_HURRY_S` after another scheduler was lost, backoffs are at most this long, because this
link's scheduler may replace the lost one."""
_HURRY_S = 10.0
_POLL_TIMEOUT_S = 5.0

_END: Any = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it

log = structlog.get_logger()


class MisfitError(QuireError):
    """The router cannot serve the scheduler's model."""


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Settings of the links to all schedulers."""

    router_id: str
    max_message_mb: int
    tls: ClientTls | None = None
    """How to connect by TLS; None: no TLS."""
    model_name: str = ""
    """The model's name in metrics, from the router's flags."""


class LinkOwner(Protocol):
    """Callbacks of a link, called from its task; only `prepare` may wait."""

    async def prepare(self, model: ModelInfo) -> None:
        """Read the model's tokenizer; raises MisfitError if it cannot be read."""

    def check_fit(self, link: "SchedulerLink", model: ModelInfo) -> None:
        """Check that the router can serve a scheduler's model; raises MisfitError if it cannot."""

    def connected(self, link: "SchedulerLink") -> None:
        """Called when the link is connected and has submitted its live requests."""

    def changed(self, link: "SchedulerLink") -> None:
        """Called when the link has lost its scheduler, or `link.status` or `link.hang` changed."""

    def refused(self, link: "SchedulerLink", live: LiveRequest) -> bool:
        """Called when a full or draining scheduler refuses a new request.

        Returns whether the request was submitted to another scheduler.
        """

    def model_changed(self) -> None:
        """Called when the length limit or the adapters of a link's model have changed."""


class SchedulerLink:
    """Owns the stream to one scheduler, and a table of the live requests that use the stream.

    `run` reads the stream and never waits for a client to read its events. `submit` and `cancel`
    put messages into the `SchedulerOutbox` and never wait.
    """

    def __init__(self, target: str, config: LinkConfig, owner: LinkOwner) -> None:
        self.target = target
        self.model: ModelInfo | None = None
        """The model of the latest scheduler."""
        self.resume_grace_s = 0.0
        """How long the latest scheduler continues a resumable request whose client has left."""
        self.max_waiting: int | None = None
        """How many sequences may wait at each of the scheduler's workers; None: unknown."""
        self.status = f"waiting for the scheduler at {target}"
        """Why no scheduler is connected. The text has no meaning while a scheduler is connected."""
        self.is_starting = True
        """Whether `status` only says that the link waits for a scheduler or its model, as is normal
        while the service starts. Otherwise `status` names a problem."""
        self.hang: str | None = None
        """Why the connected scheduler seems to hang; None: it does not."""
        self.epoch = 0
        """Epoch of the latest scheduler."""
        self.superseded_epochs: frozenset[int] = frozenset()
        """Epochs of the schedulers whose workers the latest scheduler has taken over."""
        self.away_since: float | None = asyncio.get_running_loop().time()
        """Since when the link has had no scheduler, on the event loop's clock; None: the link is
        connected."""
        self.table = LiveTable(of_model(config.model_name))
        """The live sequences of this link's requests. While no scheduler is connected, they wait,
        and the next scheduler gets them."""
        self.room: int | None = None
        """How many more sequences the scheduler's queues can take, as far as the router knows;
        None: no limit is known."""
        self.is_unloaded = False
        """Whether all workers have unloaded the model, so that requests wait."""
        self._config = config
        self._owner = owner
        self._misfit: MisfitError | None = None
        self._resuming = ResumingCalls()
        self._outbox: SchedulerOutbox | None = None
        """Messages to the scheduler; None while there is no scheduler."""
        self._knows_unpin = False
        self._calls: SchedulerCalls | None = None
        self._limit = asyncio.timeout(None)
        """A timeout that ends the current stream when it expires."""
        self._why_expired = ""
        self._backoff_s = _MIN_BACKOFF_S
        self._is_urgent = asyncio.Event()
        self._hurries_until = 0.0
        """The time, on the event loop's clock, until which the link often tries to connect."""

    @property
    def is_connected(self) -> bool:
        return self._outbox is not None

    @property
    def calls(self) -> SchedulerCalls:
        """Unary calls to the scheduler; raises UnavailableError while no scheduler is connected."""
        if self._outbox is None or self._calls is None:
            raise UnavailableError(self.status)
        return self._calls

    @property
    def misfit(self) -> MisfitError | None:
        """Why the router cannot serve the latest scheduler's model; None: the router can."""
        return self._misfit

    # --- for requests ---------------------------------------------------------------------------

    def submit(self, live: LiveRequest) -> None:
        """Submit a request, now or when a scheduler connects."""
        self.table.add(live)
        if self._outbox is not None:
            if self.room is not None and not live.num_submits:
                self.room = max(0, self.room - len(live.outputs))
            live.num_submits += 1
            self._outbox.submit(live)

    def cancel(self, seq_keys: Sequence[int]) -> None:
        """Cancel live sequences of one request; deliver no further events of these sequences."""
        key_to_live = self.table.take(seq_keys)
        # Without a scheduler, removing the sequences from the table is enough.
        if not key_to_live or self._outbox is None:
            return
        live = next(iter(key_to_live.values()))
        if not self._outbox.drop(live):
            self._outbox.cancel(list(key_to_live))

    def leave(self, live: LiveRequest) -> None:
        """Forget a request, but let it continue at the scheduler.

        A client can resume the request at any router.
        """
        self.table.discard(live)
        # A request that no scheduler has is lost.
        if self._outbox is not None and not self._outbox.drop(live):
            self._outbox.leave(live.live_seq_keys)

    def unpin(self, request_id: str, tenant: str) -> None:
        """Drop the pins of a request's prompt, if the connected scheduler supports this."""
        if self._outbox is not None and self._knows_unpin:
            self._outbox.unpin(request_id, tenant)

    async def resume(
        self, request_id: str, tenant: str, first_seq_key: int, start: StartResumed
    ) -> LiveRequest:
        """Do as `Schedulers.resume` does, at this scheduler.

        `first_seq_key` is the first of `MAX_N` consecutive new sequence keys, because the request
        may have up to `MAX_N` outputs.
        """
        if self._outbox is None:
            raise UnavailableError(self.status)
        self._outbox.resume(request_id, tenant, first_seq_key)
        return await self._resuming.wait(first_seq_key, start)

    # --- for the owner --------------------------------------------------------------------------

    def leave_superseded(self, epoch: int) -> None:
        """End the stream: the scheduler with `epoch` has taken over this scheduler's workers."""
        self._expire(f"the scheduler with epoch {epoch} has taken over its workers")

    def hurry(self) -> None:
        """Try to connect now, and then often for a while.

        Called when the scheduler of another link hangs or was lost, because the scheduler of this
        link may be the standby that replaces it.
        """
        self._backoff_s = _MIN_BACKOFF_S
        self._hurries_until = asyncio.get_running_loop().time() + _HURRY_S
        self._is_urgent.set()

    # --- the stream -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect to a scheduler, and again each time the stream has ended, until cancelled.

        Raises an error only if the code has a bug.
        """
        try:
            await self._keep_stream()
        finally:
            self._outbox = None

    async def _keep_stream(self) -> None:
        config = self._config
        while True:
            try:
                # Open a new channel each time, because an old one would keep its connection to a
                # hanging scheduler instead of trying the next address.
                async with open_channel(self.target, config.max_message_mb, config.tls) as channel:
                    await self._converse(channel)
                reason = "the scheduler ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {explain(error.details() or '')}"
                if self._misfit is not None:  # the scheduler with the wrong model has gone
                    self._misfit = None
                    self._wait(f"waiting for the scheduler at {self.target}")
            except TimeoutError:
                reason = self._why_expired
                if self._outbox is None:
                    self._wait(f"the scheduler at {self.target} hangs: {reason}", is_starting=False)
            except MisfitError as error:
                reason = str(error)
            except QuireError as error:
                reason = f"the scheduler breaks the protocol: {error}"
            if self._outbox is not None:  # a scheduler was connected, so the next may come soon
                self._backoff_s = _MIN_BACKOFF_S
            self._lose(reason)
            await self._back_off()

    async def _back_off(self) -> None:
        # Add jitter, because many routers lose one scheduler at the same moment.
        wait_s = self._backoff_s * random.uniform(0.5, 1.0)  # noqa: S311
        hurries = asyncio.get_running_loop().time() < self._hurries_until
        most_s = _HURRIED_BACKOFF_S if hurries else _MAX_BACKOFF_S
        self._backoff_s = min(2 * self._backoff_s, most_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._is_urgent.wait()
        self._is_urgent.clear()

    async def _converse(self, channel: grpc.aio.Channel) -> None:
        """Exchange messages until the stream ends; raises TimeoutError when `_expire` is called."""
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        self._calls = SchedulerCalls(channel)
        call = stub.Connect()
        heartbeat = Heartbeat()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(None) as self._limit:
                tasks.append(asyncio.create_task(self._watch(heartbeat)))
                poll = asyncio.create_task(_poll(stub, heartbeat))
                tasks.append(poll)
                hello = scheduler_pb2.RouterHello(router_id=self._config.router_id)
                await call.write(scheduler_pb2.ConnectRequest(hello=hello))
                if self._misfit is None:
                    self._wait(f"waiting for the model of {self.target}")
                welcome = await _read(call)
                if welcome is None:
                    return
                if not isinstance(welcome, Welcome):
                    raise QuireError("the first message is not a welcome")
                outbox = await self._meet(welcome)  # this may take longer than the allowed silence
                poll.cancel()  # from now on the stream carries heartbeats
                heartbeat.on_message()
                tasks.append(asyncio.create_task(_write(call, outbox)))
                self._knows_unpin = welcome.wants_heartbeats  # both came in one release
                if welcome.wants_heartbeats:
                    tasks.append(asyncio.create_task(_send_heartbeats(outbox)))
                while (message := await _read(call)) is not None:
                    heartbeat.on_message()
                    self._on_message(message)
        finally:
            for task in tasks:
                task.cancel()
            self.hang = None
            call.cancel()

    async def _watch(self, heartbeat: Heartbeat) -> None:
        """Tell the owner when the scheduler hangs or recovers; end a lost scheduler's stream."""
        while not heartbeat.is_lost:
            await asyncio.sleep(TICK_S)
            heartbeat.on_tick()
            if heartbeat.is_hanging == (self.hang is not None):
                continue
            if heartbeat.is_hanging:
                self.hang = (
                    f"the scheduler at {self.target} has been silent for {heartbeat.silent_s:g} s"
                )
                log.warning("scheduler hangs", target=self.target, silent_s=heartbeat.silent_s)
            else:
                self.hang = None
            self._owner.changed(self)
        self._expire(f"it has been silent for {heartbeat.silent_s:g} s")

    def _expire(self, why: str) -> None:
        if self._limit.when() is None:
            self._why_expired = why
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def _meet(self, welcome: Welcome) -> SchedulerOutbox:
        """Adopt the scheduler's model, and submit every live request to the scheduler."""
        try:
            await self._owner.prepare(welcome.model)
            self._misfit = None
            self._owner.check_fit(self, welcome.model)
        except MisfitError as error:
            self._misfit, self.model = error, None
            self._wait(str(error), is_starting=False)
            raise
        self.model = welcome.model
        self.resume_grace_s = welcome.resume_grace_s
        self.epoch, self.superseded_epochs = welcome.epoch, welcome.superseded_epochs
        self.max_waiting = welcome.max_waiting
        lives = self.table.lives
        log.info(
            "scheduler connected",
            target=self.target,
            epoch=welcome.epoch,
            num_resubmitted=len(lives),
        )
        self.room, self.is_unloaded = None, False
        outbox = self._outbox = SchedulerOutbox()
        self.away_since = None
        for live in lives:
            self.submit(live)
        self._owner.connected(self)
        return outbox

    def _wait(self, status: str, *, is_starting: bool = True) -> None:
        self.status, self.is_starting = status, is_starting
        self._owner.changed(self)

    def _lose(self, reason: str) -> None:
        if self._outbox is None:
            log.info("scheduler not reached", target=self.target, reason=reason)
            return
        self._outbox = None
        self.away_since = asyncio.get_running_loop().time()
        self._resuming.fail_all(UnavailableError(f"lost the scheduler: {reason}"))
        num_live = len(self.table.lives)
        log.warning("scheduler lost", target=self.target, reason=reason, num_live=num_live)
        self._wait(f"lost the scheduler at {self.target}", is_starting=False)

    # --- messages -------------------------------------------------------------------------------

    def _on_message(self, message: SchedulerMessage) -> None:
        match message:
            case StepEvents():
                with timeline.span("deliver a step"):
                    self._on_step(message)
            case Refusal():
                self._on_refused(message)
            case Resumption():
                self._on_resumed(message)
            case Welcome():
                raise QuireError("it sent a second welcome")

    def _on_step(self, events: StepEvents, *, is_new: bool = True) -> None:
        if events.room is not None:
            self.room = events.room.num_seqs
        if events.is_unloaded is not None:
            self.is_unloaded = events.is_unloaded
        if events.max_model_len is not None and self.model is not None:
            self.model = replace(self.model, max_model_len=events.max_model_len)
            self._owner.model_changed()
        if events.adapters is not None and self.model is not None:
            self.model = replace(self.model, adapters=events.adapters)
            self._owner.model_changed()
        stopped = self.table.deliver(events, is_new=is_new)
        if stopped and self._outbox is not None:
            self._outbox.cancel(list(stopped))

    def _on_resumed(self, resumption: Resumption) -> None:
        def replay(live: LiveRequest) -> None:
            live.num_submits = 1
            self.table.add(live)
            self._on_step(resumption.so_far, is_new=False)

        if self._resuming.answer(resumption, replay) is None:  # the client's call has ended
            assert self._outbox is not None, "the scheduler that sent the message is connected"
            first_seq_key = resumption.record.first_seq_key
            self._outbox.leave(range(first_seq_key, first_seq_key + resumption.n))

    def _on_refused(self, refusal: Refusal) -> None:
        if self._resuming.fail(refusal.first_seq_key, refusal.error):
            return
        live = self.table.find(refusal.first_seq_key)
        if live is None:
            return
        if live.num_submits > 1 and isinstance(refusal.error, TooBusyError | UnavailableError):
            # A request that was accepted before is retried: a new scheduler may be full because all
            # routers submit to it at once, and a draining scheduler will be replaced.
            asyncio.get_running_loop().call_later(
                refusal.retry_after_s, self._submit_again, live, self._outbox
            )
            return
        self.table.discard(live)
        is_full = isinstance(refusal.error, TooBusyError | UnavailableError)
        if not (is_full and self._owner.refused(self, live)):
            live.refuse(refusal.error)

    def _submit_again(self, live: LiveRequest, outbox: SchedulerOutbox | None) -> None:
        is_live = any(seq_key in self.table for seq_key in live.live_seq_keys)
        # A newer scheduler may already have the request
        if is_live and self._outbox is outbox:
            self.submit(live)


async def _read(call: Any) -> SchedulerMessage | None:
    """Return the next message; None if the scheduler has ended the stream."""
    message = await call.read()
    if message is _END:
        return None
    if message is None:  # gRPC yields None for bytes that it cannot parse
        raise InvalidArgumentError("message", "cannot be parsed")
    return message_from_proto(message)


async def _poll(stub: scheduler_pb2_grpc.SchedulerServiceStub, heartbeat: Heartbeat) -> None:
    """Call the scheduler again and again, and count each answer as a heartbeat.

    This is needed at first, because a scheduler that waits for its model sends nothing on the
    stream.
    """
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.GetSchedulerLoad(
                scheduler_pb2.GetSchedulerLoadRequest(), timeout=_POLL_TIMEOUT_S
            )
            heartbeat.on_message()
        await asyncio.sleep(BEAT_S)


async def _send_heartbeats(outbox: SchedulerOutbox) -> None:
    """Send heartbeats to the scheduler, until cancelled."""
    while True:
        outbox.send_heartbeat()
        await asyncio.sleep(BEAT_S)


async def _write(call: Any, outbox: SchedulerOutbox) -> None:
    # When the stream ends, the reader gets the error; the writer only stops.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outbox.next())
