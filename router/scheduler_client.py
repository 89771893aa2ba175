"""The router's one stream to the scheduler: submits, cancels, and hands out the news.

The stream may break and the scheduler be replaced; live requests do not notice. When there is a
scheduler again, each is submitted again from its replay record with the tokens it has, and goes on.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any

import grpc
import structlog

from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from router import metrics
from router.domain import FinishReason, Load, OutputError
from router.live_request import LiveRequest
from router.scheduler_news import News, Refusal, SchedulerModel, StepNews, Welcome
from router.scheduler_wire import news_from_proto, submit_to_proto
from router.wire import load_from_proto
from rpc.channel import open_channel
from rpc.errors import QuireError, TooBusyError, UnavailableError
from rpc.health import Health
from rpc.status import status_to_error

_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_LOAD_TIMEOUT_S = 5.0

_END: Any = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it

log = structlog.get_logger()


class SchedulerClient:
    """Owns the stream to one scheduler and the table of live sequences by key.

    `run` reads the stream and never waits for a request's reader; `submit` and `cancel` never wait
    at all: what they have to say is queued. The queue is bounded by the live requests, each of
    which it holds at most once, and the ends of their sequences.
    """

    def __init__(self, target: str, *, router_id: str, health: Health, max_message_mb: int) -> None:
        """Talks to `target` once `run` runs; says in `health` whether there is a scheduler."""
        self._target = target
        self._router_id = router_id
        self._health = health
        self._max_message_mb = max_message_mb
        self._model: SchedulerModel | None = None
        self._draining = False
        self._next_seq_key = 0
        self._seq_key_to_live: dict[int, LiveRequest] = {}
        """The sequences that the scheduler works on, or will as soon as there is one."""
        self._outbox: asyncio.Queue[scheduler_pb2.ConnectRequest] | None = None
        """What the scheduler must be told; None while there is no scheduler."""
        self._stub: scheduler_pb2_grpc.SchedulerServiceStub | None = None

    @property
    def model(self) -> SchedulerModel | None:
        """The model that the scheduler serves, or last served; None before the first welcome."""
        return self._model

    def reserve_seq_keys(self, n: int) -> int:
        """Gives the first of `n` fresh keys in a row, for a request to be submitted at once.

        Raises UnavailableError while there is no scheduler.
        """
        if self._outbox is None:
            raise self._unavailable()
        first = self._next_seq_key
        self._next_seq_key += n
        return first

    def submit(self, live: LiveRequest) -> None:
        """Submits a request whose keys were reserved without an await in between."""
        for seq_key in live.live_seq_keys:
            self._seq_key_to_live[seq_key] = live
        self._put_submit(live)

    def cancel(self, seq_keys: Sequence[int]) -> None:
        """Ends sequences; nothing more is heard of them. Those that are not live are ignored."""
        live = [key for key in seq_keys if self._seq_key_to_live.pop(key, None) is not None]
        if live:
            self._put_cancel(live)

    def drain(self) -> None:
        """From now on leaves `health` alone: a process that is ending is not ready."""
        self._draining = True

    async def load(self) -> Load:
        """Asks how busy the scheduler is; raises UnavailableError while there is none."""
        if self._outbox is None or self._stub is None:
            raise self._unavailable()
        try:
            response = await self._stub.GetSchedulerLoad(
                scheduler_pb2.GetSchedulerLoadRequest(), timeout=_LOAD_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error) from error
        return load_from_proto(response.load)

    async def run(self) -> None:
        """Keeps the stream, through as many schedulers as it takes, until cancelled."""
        backoff_s = _MIN_BACKOFF_S
        self._health.set_starting(f"waiting for the scheduler at {self._target}")
        async with open_channel(self._target, self._max_message_mb) as channel:
            self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
            while True:
                try:
                    await self._converse(self._stub)
                    reason = "the scheduler ended the stream"
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details()}"
                except QuireError as error:
                    reason = f"the scheduler does not keep to the contract: {error}"
                if self._outbox is not None:  # there was a scheduler: the next may be soon
                    backoff_s = _MIN_BACKOFF_S
                self._lose(reason)
                # Jitter: many routers lose one scheduler at the same moment.
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _converse(self, stub: scheduler_pb2_grpc.SchedulerServiceStub) -> None:
        call = stub.Connect()
        try:
            await call.write(
                scheduler_pb2.ConnectRequest(
                    hello=scheduler_pb2.RouterHello(router_id=self._router_id)
                )
            )
            if not self._draining:
                self._health.set_starting(f"waiting for the model of {self._target}")
            message = await call.read()
            if message is _END:
                return
            welcome = news_from_proto(message)
            if not isinstance(welcome, Welcome):
                raise QuireError("the first message is not a welcome")
            outbox = self._meet(welcome)
            writer = asyncio.create_task(_write(call, outbox))
            try:
                while (message := await call.read()) is not _END:
                    self._hear(news_from_proto(message))
            finally:
                writer.cancel()
        finally:
            call.cancel()

    def _meet(self, welcome: Welcome) -> asyncio.Queue[scheduler_pb2.ConnectRequest]:
        """Takes up the scheduler's model and submits every live request (again)."""
        before, self._model = self._model, welcome.model
        lives = list(dict.fromkeys(self._seq_key_to_live.values()))
        log.info("scheduler connected", epoch=welcome.epoch, num_resubmitted=len(lives))
        outbox = self._outbox = asyncio.Queue()
        for live in lives:
            if before is not None and not before.is_same_vocabulary(welcome.model):
                self._fail(live, "the service now has another model")
            else:
                self._put_submit(live)
        metrics.SCHEDULER_CONNECTED.set(1)
        if not self._draining:
            self._health.set_ready()
        return outbox

    def _lose(self, reason: str) -> None:
        if self._outbox is None:
            log.info("scheduler not reached", target=self._target, reason=reason)
            return
        self._outbox = None
        num_live = len(set(self._seq_key_to_live.values()))
        log.warning("scheduler lost", target=self._target, reason=reason, num_live=num_live)
        metrics.SCHEDULER_CONNECTED.set(0)
        if not self._draining:
            self._health.set_not_ready(f"lost the scheduler at {self._target}")

    def _hear(self, news: News) -> None:
        match news:
            case StepNews():
                self._hear_step(news)
            case Refusal():
                self._hear_refusal(news)
            case Welcome():
                raise QuireError("a second welcome")

    def _hear_step(self, news: StepNews) -> None:
        # A sequence that is not in the table was cancelled while its news was on the way.
        now = asyncio.get_running_loop().time()
        table = self._seq_key_to_live
        stopped: list[int] = []
        num_tokens = 0
        for i, (seq_key, token_id) in enumerate(zip(news.seq_keys, news.token_ids, strict=True)):
            live = table.get(seq_key)
            if live is None:
                continue
            num_tokens += 1
            if live.push_token(seq_key, token_id, news.logprobs.get(i), now):
                del table[seq_key]
                stopped.append(seq_key)
        metrics.GENERATION_TOKENS.inc(num_tokens)
        for admission in news.admissions:
            if (live := table.get(admission.seq_key)) is not None:
                live.admit(admission.seq_key, admission.num_cached_tokens)
        for ending in news.endings:
            if (live := table.pop(ending.seq_key, None)) is not None:
                live.finish(ending.seq_key, ending.reason, ending.stop_token_id, ending.error)
        if stopped:
            self._put_cancel(stopped)

    def _hear_refusal(self, refusal: Refusal) -> None:
        live = self._seq_key_to_live.get(refusal.first_seq_key)
        if live is None:  # unless output 0 has ended before the request was submitted again
            live = next(
                (
                    other
                    for other in self._seq_key_to_live.values()
                    if other.record.first_seq_key == refusal.first_seq_key
                ),
                None,
            )
        if live is None:
            return
        if live.num_submits > 1 and isinstance(refusal.error, TooBusyError):
            # It had been accepted: a new scheduler that all routers rush at must not undo that.
            asyncio.get_running_loop().call_later(
                refusal.error.retry_after_s, self._submit_again, live, self._outbox
            )
            return
        for seq_key in live.live_seq_keys:
            self._seq_key_to_live.pop(seq_key, None)
        live.refuse(refusal.error)

    def _submit_again(
        self, live: LiveRequest, outbox: asyncio.Queue[scheduler_pb2.ConnectRequest] | None
    ) -> None:
        is_live = any(seq_key in self._seq_key_to_live for seq_key in live.live_seq_keys)
        if is_live and self._outbox is outbox:  # else a newer scheduler knows of it already
            self._put_submit(live)

    def _fail(self, live: LiveRequest, message: str) -> None:
        error = OutputError(grpc.StatusCode.UNAVAILABLE.value[0], message, retryable=True)
        for seq_key in live.live_seq_keys:
            self._seq_key_to_live.pop(seq_key, None)
            live.finish(seq_key, FinishReason.ERROR, error=error)

    def _put_submit(self, live: LiveRequest) -> None:
        assert self._outbox is not None
        live.num_submits += 1
        self._outbox.put_nowait(submit_to_proto(live, asyncio.get_running_loop().time()))

    def _put_cancel(self, seq_keys: Sequence[int]) -> None:
        # Without a scheduler there is nobody to tell: they will not be submitted again.
        if self._outbox is not None:
            self._outbox.put_nowait(
                scheduler_pb2.ConnectRequest(cancel=scheduler_pb2.Cancel(seq_keys=seq_keys))
            )

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(f"the scheduler at {self._target} is not connected")


async def _write(call: Any, outbox: asyncio.Queue[scheduler_pb2.ConnectRequest]) -> None:
    # When the stream ends, the reader learns why; the writer just stops.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outbox.get())
