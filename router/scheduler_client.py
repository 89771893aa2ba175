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
from quire.v1.common_pb2 import ActivityQuery, WorkerActivity
from quire.v1.kv_pb2 import KvQuery, WorkerKv
from router import metrics
from router.domain import FinishReason, Load, OutputError
from router.live_request import LiveRequest
from router.outbox import Outbox
from router.resuming import ResumingCalls, StartResumed
from router.scheduler_news import (
    News,
    Refusal,
    Resumption,
    SchedulerModel,
    StepNews,
    Welcome,
)
from router.scheduler_wire import news_from_proto
from router.validation import MAX_N
from router.wire import load_from_proto
from rpc import timeline
from rpc.channel import open_channel
from rpc.errors import InvalidArgumentError, QuireError, TooBusyError, UnavailableError
from rpc.health import Health
from rpc.silence import LOST_AFTER_S, TICK_S, Silence
from rpc.status import status_to_error
from rpc.tls import ClientTls, explain

_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_LOAD_TIMEOUT_S = 5.0

_END: Any = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it

log = structlog.get_logger()


class SchedulerClient:
    """Owns the stream to one scheduler and the table of live sequences by key.

    `run` reads the stream and never waits for a request's reader; `submit` and `cancel` never wait
    at all: what they have to say is queued, see `Outbox`.
    """

    def __init__(
        self,
        target: str,
        *,
        router_id: str,
        num_token_ids: int,
        health: Health,
        max_message_mb: int,
        tls: ClientTls | None = None,
    ) -> None:
        """Talks to `target` once `run` runs; says in `health` whether there is a scheduler.

        `num_token_ids` is what the router's tokenizer can produce: a model with a smaller
        vocabulary is another than the tokenizer's, and is not served. `tls` is None for calls in
        the clear.
        """
        self._target = target
        self._router_id = router_id
        self._num_token_ids = num_token_ids
        self._health = health
        self._max_message_mb = max_message_mb
        self._tls = tls
        self._model: SchedulerModel | None = None
        self._misfit: str | None = None
        """Why the model of the scheduler that was met last is not served."""
        self._draining = False
        self._next_seq_key = 0
        self._seq_key_to_live: dict[int, LiveRequest] = {}
        """The sequences that the scheduler works on, or will as soon as there is one."""
        self._resuming = ResumingCalls()
        self._outbox: Outbox | None = None
        """What the scheduler must be told; None while there is no scheduler."""
        self._stub: scheduler_pb2_grpc.SchedulerServiceStub | None = None

    @property
    def model(self) -> SchedulerModel | None:
        """The model that the scheduler serves, or last served.

        None before the first welcome, and when the scheduler's model does not fit the tokenizer.
        """
        return self._model

    @property
    def is_connected(self) -> bool:
        """Whether there is a scheduler."""
        return self._outbox is not None

    def reserve_seq_keys(self, n: int) -> int:
        """Gives the first of `n` fresh keys in a row, for a request to be submitted at once.

        Raises UnavailableError while there is no scheduler.
        """
        if self._outbox is None:
            raise self.unavailable()
        first = self._next_seq_key
        self._next_seq_key += n
        return first

    def submit(self, live: LiveRequest) -> None:
        """Submits a request whose keys were reserved without an await in between."""
        for seq_key in live.live_seq_keys:
            self._seq_key_to_live[seq_key] = live
        self._put_submit(live)

    def cancel(self, seq_keys: Sequence[int]) -> None:
        """Ends what is live of one request; nothing more is heard of it."""
        table = self._seq_key_to_live
        key_to_live = {key: table.pop(key) for key in seq_keys if key in table}
        # Without a scheduler there is nobody to tell: it will not be submitted again.
        if not key_to_live or self._outbox is None:
            return
        live = next(iter(key_to_live.values()))
        if not self._outbox.drop(live):
            self._outbox.cancel(list(key_to_live))

    def leave(self, live: LiveRequest) -> None:
        """Leaves a request to the scheduler, until its client resumes it through some router."""
        self.drop(live)
        # Without a scheduler, or if it was never told, there is nobody to keep it.
        if self._outbox is not None and not self._outbox.drop(live):
            self._outbox.leave(live.live_seq_keys)

    def drop(self, live: LiveRequest) -> None:
        """Hears no more of a request, whatever the scheduler does."""
        for seq_key in live.live_seq_keys:
            self._seq_key_to_live.pop(seq_key, None)

    async def resume(self, request_id: str, tenant: str, start: StartResumed) -> LiveRequest:
        """Takes over a request; gives it with all that came of it, and its news from then on.

        `start` makes a live request, to which nothing has been pushed. Raises what the scheduler
        refuses, such as `NotFoundError`; `UnavailableError` while there is none.
        """
        first_seq_key = self.reserve_seq_keys(MAX_N)
        assert self._outbox is not None, "else no keys are given"
        self._outbox.resume(request_id, tenant, first_seq_key)
        return await self._resuming.wait(first_seq_key, start)

    def unavailable(self) -> UnavailableError:
        """Why there is no scheduler to serve a request."""
        return UnavailableError(self._misfit or f"the scheduler at {self._target} is not connected")

    def drain(self) -> None:
        """From now on leaves `health` alone: a process that is ending is not ready."""
        self._draining = True

    async def load(self) -> Load:
        """Asks how busy the scheduler is; raises UnavailableError while there is none."""
        if self._outbox is None or self._stub is None:
            raise self.unavailable()
        try:
            response = await self._stub.GetSchedulerLoad(
                scheduler_pb2.GetSchedulerLoadRequest(), timeout=_LOAD_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error) from error
        return load_from_proto(response.load)

    async def describe_kv(self, query: KvQuery) -> Sequence[WorkerKv]:
        """Asks who holds which KV blocks; what the scheduler says is passed on as it is.

        Raises what it refuses, `UnavailableError` while there is none.
        """
        if self._outbox is None or self._stub is None:
            raise self.unavailable()
        try:
            response = await self._stub.DescribeSchedulerKv(
                scheduler_pb2.DescribeSchedulerKvRequest(query=query), timeout=_LOAD_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error) from error
        workers: Sequence[WorkerKv] = response.workers
        return workers

    async def describe_activity(self, query: ActivityQuery) -> Sequence[WorkerActivity]:
        """Asks what the workers are doing; what is said, and raised, is as `describe_kv` has it."""
        if self._outbox is None or self._stub is None:
            raise self.unavailable()
        request = scheduler_pb2.DescribeSchedulerActivityRequest(query=query)
        try:
            response = await self._stub.DescribeSchedulerActivity(request, timeout=_LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error) from error
        workers: Sequence[WorkerActivity] = response.workers
        return workers

    async def run(self) -> None:
        """Keeps the stream, through as many schedulers as it takes, until cancelled.

        Raises whatever breaks it, which is a bug; the live requests fail first.
        """
        try:
            await self._keep_stream()
        except Exception:
            self._outbox = None
            for live in self._lives():
                self._fail(live, "the router broke")
            raise

    async def _keep_stream(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        self._health.set_starting(f"waiting for the scheduler at {self._target}")
        while True:
            try:
                # A channel each time: it would keep its connection to a scheduler that hangs, and
                # not look at the next address.
                async with open_channel(self._target, self._max_message_mb, self._tls) as channel:
                    await self._converse(channel)
                reason = "the scheduler ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {explain(error.details() or '')}"
                if self._misfit is not None:  # that scheduler is gone: so is what it said
                    self._misfit = None
                    self._set_starting(f"waiting for the scheduler at {self._target}")
            except TimeoutError:
                reason = f"it has said nothing for {LOST_AFTER_S:g} s"
            except _MisfitError as error:
                reason = str(error)
            except QuireError as error:
                reason = f"the scheduler does not keep to the contract: {error}"
            if self._outbox is not None:  # there was a scheduler: the next may be soon
                backoff_s = _MIN_BACKOFF_S
            self._lose(reason)
            # Jitter: many routers lose one scheduler at the same moment.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _converse(self, channel: grpc.aio.Channel) -> None:
        """Talk to a scheduler until the stream ends; raises TimeoutError if it is silent long."""
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        call = self._stub.Connect()
        try:
            await call.write(
                scheduler_pb2.ConnectRequest(
                    hello=scheduler_pb2.RouterHello(router_id=self._router_id)
                )
            )
            if self._misfit is None:
                self._set_starting(f"waiting for the model of {self._target}")
            welcome = await _read(call)
            if welcome is None:
                return
            if not isinstance(welcome, Welcome):
                raise QuireError("the first message is not a welcome")
            outbox = self._meet(welcome)
            writer = asyncio.create_task(_write(call, outbox))
            silence = Silence()
            try:
                async with asyncio.timeout(None) as limit:
                    watcher = asyncio.create_task(self._watch(silence, limit))
                    while (news := await _read(call)) is not None:
                        silence.heard()
                        self._hear(news)
            finally:
                writer.cancel()
                watcher.cancel()
        finally:
            call.cancel()

    async def _watch(self, silence: Silence, limit: asyncio.Timeout) -> None:
        """Say in `health` when the scheduler hangs and goes on; let `limit` pass if it is lost."""
        did_hang = False
        while not silence.is_loss:
            await asyncio.sleep(TICK_S)
            silence.tick()
            if silence.is_hang == did_hang:
                continue
            did_hang = silence.is_hang
            if did_hang:
                log.warning("scheduler hangs", target=self._target, silent_s=silence.seconds)
            if not self._draining:
                if did_hang:
                    hang = f"has said nothing for {silence.seconds:g} s"
                    self._health.set_not_ready(f"the scheduler at {self._target} {hang}")
                else:
                    self._health.set_ready()
        limit.reschedule(asyncio.get_running_loop().time())

    def _meet(self, welcome: Welcome) -> Outbox:
        """Takes up the scheduler's model and submits every live request (again).

        Raises _MisfitError, and fails them, if the model is not the tokenizer's.
        """
        self._check_fit(welcome.model)
        before, self._model = self._model, welcome.model
        lives = self._lives()
        log.info("scheduler connected", epoch=welcome.epoch, num_resubmitted=len(lives))
        outbox = self._outbox = Outbox()
        for live in lives:
            if before is not None and not welcome.model.can_continue(before):
                self._fail(live, "the service now has another model")
            else:
                self._put_submit(live)
        metrics.SCHEDULER_CONNECTED.set(1)
        if not self._draining:
            self._health.set_ready()
        return outbox

    def _check_fit(self, model: SchedulerModel) -> None:
        self._misfit = None
        if self._num_token_ids <= model.vocab_size:
            return
        self._model = None
        self._misfit = (
            f"the router's tokenizer has {self._num_token_ids} token ids, but the model"
            f" {model.id!r} of the scheduler at {self._target} has a vocabulary of"
            f" {model.vocab_size}: --model must name the directory of the model that is served"
        )
        if not self._draining:
            self._health.set_not_ready(self._misfit)
        for live in self._lives():
            self._fail(live, self._misfit)
        raise _MisfitError(self._misfit)

    def _set_starting(self, status: str) -> None:
        if not self._draining:
            self._health.set_starting(status)

    def _lives(self) -> list[LiveRequest]:
        return list(dict.fromkeys(self._seq_key_to_live.values()))

    def _lose(self, reason: str) -> None:
        if self._outbox is None:
            log.info("scheduler not reached", target=self._target, reason=reason)
            return
        self._outbox = None
        self._resuming.fail_all(UnavailableError(f"lost the scheduler: {reason}"))
        num_live = len(set(self._seq_key_to_live.values()))
        log.warning("scheduler lost", target=self._target, reason=reason, num_live=num_live)
        metrics.SCHEDULER_CONNECTED.set(0)
        if not self._draining:
            self._health.set_not_ready(f"lost the scheduler at {self._target}")

    def _hear(self, news: News) -> None:
        match news:
            case StepNews():
                with timeline.span("hear a step"):
                    self._hear_step(news)
            case Refusal():
                self._hear_refusal(news)
            case Resumption():
                self._hear_resumption(news)
            case Welcome():
                raise QuireError("a second welcome")

    def _hear_step(self, news: StepNews, *, is_new: bool = True) -> None:
        # A sequence that is not in the table was cancelled while its news was on the way.
        now = asyncio.get_running_loop().time()
        table = self._seq_key_to_live
        for pin in news.pins:  # before the tokens, which may end its last output
            if (live := table.get(pin.seq_key)) is not None:
                live.pin(pin.num_pinned_tokens)
        stopped: list[int] = []
        num_tokens = 0
        for part in news.prompt_scores:
            if (live := table.get(part.seq_key)) is not None:
                live.score_prompt(part.position, part.logprobs)
        for i, (seq_key, token_id) in enumerate(zip(news.seq_keys, news.token_ids, strict=True)):
            live = table.get(seq_key)
            if live is None:
                continue
            num_tokens += is_new
            if live.push_token(seq_key, token_id, news.logprobs.get(i), now, is_new=is_new):
                del table[seq_key]
                stopped.append(seq_key)
        metrics.GENERATION_TOKENS.inc(num_tokens)
        for admission in news.admissions:
            if (live := table.get(admission.seq_key)) is not None:
                live.admit(admission.seq_key, admission.num_cached_tokens)
        for ending in news.endings:
            if (live := table.pop(ending.seq_key, None)) is not None:
                live.finish(
                    ending.seq_key,
                    ending.reason,
                    ending.stop_token_id,
                    ending.error,
                    ending.cumulative_logprob,
                )
        if stopped and self._outbox is not None:
            self._outbox.cancel(stopped)

    def _hear_resumption(self, resumption: Resumption) -> None:
        def replay(live: LiveRequest) -> None:
            live.num_submits = 1
            self._seq_key_to_live.update(dict.fromkeys(live.live_seq_keys, live))
            self._hear_step(resumption.so_far, is_new=False)

        if self._resuming.answer(resumption, replay) is None:  # the call has ended meanwhile
            assert self._outbox is not None, "it is heard"
            first_seq_key = resumption.record.first_seq_key
            self._outbox.leave(range(first_seq_key, first_seq_key + resumption.n))

    def _hear_refusal(self, refusal: Refusal) -> None:
        if self._resuming.fail(refusal.first_seq_key, refusal.error):
            return
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
        if live.num_submits > 1 and isinstance(refusal.error, TooBusyError | UnavailableError):
            # It had been accepted: neither a new scheduler that all routers rush at may undo that,
            # nor one that drains, after which there will be another.
            asyncio.get_running_loop().call_later(
                refusal.retry_after_s, self._submit_again, live, self._outbox
            )
            return
        for seq_key in live.live_seq_keys:
            self._seq_key_to_live.pop(seq_key, None)
        live.refuse(refusal.error)

    def _submit_again(self, live: LiveRequest, outbox: Outbox | None) -> None:
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
        self._outbox.submit(live)


class _MisfitError(QuireError):
    """The scheduler's model is not the one that the tokenizer is of."""


async def _read(call: Any) -> News | None:
    """What the scheduler says next; None: it has ended the stream."""
    message = await call.read()
    if message is _END:
        return None
    if message is None:  # so gRPC says that the bytes are no message
        raise InvalidArgumentError("message", "cannot be parsed")
    return news_from_proto(message)


async def _write(call: Any, outbox: Outbox) -> None:
    # When the stream ends, the reader learns why; the writer just stops.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outbox.next())
