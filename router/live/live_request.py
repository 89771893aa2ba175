"""One live request: its replay record, its outputs, and its unread events."""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import TracebackType
from typing import Protocol, Self

from contract.errors import InvalidArgumentError, QuireError
from contract.outputs import (
    Event,
    FinishReason,
    OutputDelta,
    OutputError,
    OutputFinished,
    PromptScores,
    TokenLogprob,
    Usage,
)
from contract.request import OutputReceived
from contract.sampling import BeamSearch, SamplingParams
from router.live.output import MAX_EVENT_TOKENS, LiveOutput
from router.live.usage import UsageKey, Used, used_of
from router.metrics import ModelMetrics


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """The data with which the router submits a request to schedulers, as often as needed.

    `sampling.seed` and `sampling.max_tokens` are set. So a request that is submitted again with its
    tokens so far draws the same further tokens as if it had not been interrupted.
    """

    request_id: str
    first_seq_key: int
    """Output i is the sequence with the key `first_seq_key + i`."""
    prompt_token_ids: "array[int]"
    """An array of int32 with at least one token; it never changes."""
    sampling: SamplingParams
    cache_salt: str
    cache_pin_s: float | None
    traceparent: str
    priority: int
    tenant: str
    deadline: float | None
    """The deadline, on the event loop's clock; None: no deadline."""
    beam: BeamSearch | None = None
    resume_record: bytes | None = None
    """Additional data with which another router can resume the request; None: not resumable."""


class ClientRoom(Protocol):
    """Tells whether a client can take more events."""

    def has_room(self) -> bool: ...

    async def wait_for_room(self) -> None:
        """Wait until there is room; raises an error if the client is gone."""


class LiveRequest:
    """A request at a scheduler, and the stream of its events.

    An API reads the events in an `async with` block. It iterates over the request, or calls
    `send_to`, which costs less per event. If the API leaves the block early, the live outputs are
    cancelled; those of a resumable request continue at the scheduler. If a scheduler refuses the
    request before the first event, the API gets the `QuireError`. A later failure is an
    `OutputFinished` with reason ERROR. The `Usage` is the last event.

    `Inference` calls `replay`; `router/schedulers` calls the other methods from `push_token` to
    `refuse`. None of these methods waits: unread tokens are merged into one pending delta per
    output. So a slow reader costs the memory of its tokens (at most `max_model_len` per output) and
    does not slow down other requests.
    """

    __slots__ = (
        "__weakref__",
        "_accepted",
        "_cancel",
        "_closed",
        "_failure",
        "_first_seq_key",
        "_has_events",
        "_has_gaps",
        "_leave",
        "_metrics",
        "_num_outputs_unread",
        "_num_prompt_logprobs_taken",
        "_on_closed",
        "_prompt_logprobs",
        "_put",
        "_refusal",
        "_room",
        "_submitted_at",
        "_taken_away",
        "_timer",
        "created",
        "goes_on",
        "is_resumed",
        "is_waiting",
        "model",
        "num_cached_tokens",
        "num_pinned_tokens",
        "num_submits",
        "outputs",
        "outputs_with_events",
        "record",
        "refused_by",
        "usage_key",
        "vector",
    )

    def __init__(
        self,
        record: ReplayRecord,
        outputs: Sequence[LiveOutput],
        *,
        model: str,
        metrics: ModelMetrics,
        usage_key: UsageKey,
        cancel: Callable[[Sequence[int]], None],
        leave: Callable[["LiveRequest"], None],
        on_closed: Callable[["LiveRequest"], None],
    ) -> None:
        """Make a live request, which belongs to the running event loop.

        `cancel` ends sequences at the scheduler, which then sends no more events for them. If the
        reader of a resumable request leaves, the `LiveRequest` calls `leave` instead of `cancel`.
        The `LiveRequest` calls `on_closed` once, when the iteration ends.
        """
        self.record = record
        self._first_seq_key = record.first_seq_key
        self._has_gaps = record.beam is None
        self.model = model
        self._metrics = metrics
        self.usage_key = usage_key
        self.is_resumed = False
        """Whether this call resumes a request that an earlier call has started."""
        self.created = int(time.time())
        self.outputs = tuple(outputs)
        self.num_cached_tokens: int | None = None
        self.num_pinned_tokens = 0
        self.vector: bytes | None = None
        """The embedding or scores of a request that pools: float32, little-endian."""
        self.goes_on = False
        """Whether the request continues at the scheduler without this reader."""
        self.num_submits = 0
        """How often the request was submitted; counted by `router/schedulers`."""
        self.refused_by: set[str] = set()
        """Schedulers that refused the request because of full queues; set by
        `router/schedulers`."""
        self._refusal: QuireError | None = None
        loop = asyncio.get_running_loop()
        self._submitted_at = loop.time()
        self._cancel = cancel
        self._leave = leave
        self._on_closed = on_closed
        self._has_events = asyncio.Event()
        self._prompt_logprobs: list[TokenLogprob] | None = None
        """Log-probabilities of the prompt so far; None: not requested, or already read."""
        if record.sampling.prompt_logprobs is not None:
            self._prompt_logprobs = []
        self._num_prompt_logprobs_taken = 0
        self.outputs_with_events: list[LiveOutput] = []
        """The outputs whose `has_event` is true; the first output has waited longest."""
        self.is_waiting = False
        """Whether the call of `flush` is postponed; set by `router/schedulers/delivery.py`."""
        self._num_outputs_unread = len(self.outputs)  # outputs whose end the reader lacks
        self._accepted = False  # the reader has an event, so the request cannot be refused
        self._closed = False
        self._put: Callable[[Event], None] | None = None
        """The argument `put` of `send_to` while `send_to` runs; otherwise None."""
        self._room: ClientRoom | None = None
        self._failure: Exception | None = None
        """The error that `_put` has raised."""
        self._taken_away: QuireError | None = None
        self._timer = (
            None if record.deadline is None else loop.call_at(record.deadline, self._expire)
        )

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt, with special tokens."""
        return self.record.prompt_token_ids

    @property
    def live_seq_keys(self) -> list[int]:
        """The keys of the outputs that have not ended."""
        first = self.record.first_seq_key
        return [first + output.index for output in self.outputs if output.finished is None]

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens of all outputs so far."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        num_prompt_tokens = len(self.record.prompt_token_ids)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            # A request that was submitted again may also find cached blocks of its own outputs.
            cached_tokens=min(num_prompt_tokens, self.num_cached_tokens or 0),
            pinned_tokens=self.num_pinned_tokens,
            reasoning_tokens=sum(output.num_thinking_tokens for output in self.outputs),
        )

    @property
    def used(self) -> Used:
        """The usage to record, once the request has ended or its reader has left.

        A resumed request counts only the tokens that its reader lacked; the earlier call has
        counted the others.
        """
        if self.is_resumed:
            given = [output for output in self.outputs if output.num_skipped is not None]
            return Used(
                generated_tokens=sum(len(o.token_ids) - (o.num_skipped or 0) for o in given),
                # Thinking comes first, so the skipped tokens are taken from it first.
                reasoning_tokens=sum(
                    max(0, o.num_thinking_tokens - (o.num_skipped or 0)) for o in given
                ),
            )
        if self.num_cached_tokens is None and not self.goes_on:
            return Used()  # no worker has started the request, and it does not continue
        return used_of(self.usage)

    @property
    def time_to_first_token_s(self) -> float | None:
        """Time from submission to the first token of output 0; None before that token."""
        first = self.outputs[0].first_token_at
        return None if first is None else first - self._submitted_at

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reasons of the finished outputs."""
        return [output.finished.finish_reason.value for output in self.outputs if output.finished]

    def push_token(
        self,
        seq_key: int,
        token_id: int,
        logprob: TokenLogprob | None,
        now: float,
        gaps: list[float] | None,
    ) -> bool:
        """Append a token to an unfinished output; return whether it completes a stop string.

        If so, the caller cancels the sequence. The caller must call `flush` afterwards, but may
        first push the step's other tokens. `now` is on the event loop's clock. The method appends
        the time since the output's previous token to `gaps`. `gaps` is None for tokens that the
        metrics do not count, because they were computed before the request was resumed.
        """
        output = self.outputs[seq_key - self._first_seq_key]
        if gaps is None:
            pass
        elif output.last_token_at is None:
            output.first_token_at = now
            if output.index == 0:
                self._metrics.time_to_first_token.observe(now - self._submitted_at)
        elif self._has_gaps:  # all tokens of a beam search arrive at once
            gaps.append(now - output.last_token_at)
        output.last_token_at = now
        if output.push(token_id, logprob):
            self._add_event(output)
        if output.finished is not None:
            self._observe_end(output)
            return True
        return False

    def _add_event(self, output: LiveOutput) -> None:
        if not output.has_event:
            output.has_event = True
            self.outputs_with_events.append(output)

    def replay(self, events: Iterable[Event]) -> None:
        """Add the tokens and ends that another process has computed for this request.

        An output whose last token is an end token, or that has its maximum length, ends even if
        that process did not record the end.
        """
        first, now = self.record.first_seq_key, asyncio.get_running_loop().time()
        for event in events:
            match event:
                case OutputDelta():
                    for token_id, logprob in zip_longest(event.token_ids, event.logprobs):
                        seq_key = first + event.output_index
                        self.push_token(seq_key, token_id, logprob, now, None)
                case OutputFinished() if self.outputs[event.output_index].finished is None:
                    seq_key = first + event.output_index
                    self.finish(seq_key, event.finish_reason, event.stop_token_id, event.error)
        for seq_key in self.live_seq_keys:
            output = self.outputs[seq_key - first]
            if output.has_end_token:
                self.finish(seq_key, FinishReason.STOP, output.token_ids[-1])
            elif len(output.token_ids) == self.record.sampling.max_tokens:
                self.finish(seq_key, FinishReason.LENGTH)

    def score_prompt(self, position: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Add log-probabilities of the prompt from `position` on; ignores those that are known.

        The first token of the prompt has no log-probability, so `position` is at least 1.
        """
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += logprobs[len(self._prompt_logprobs) + 1 - position :]

    def set_vector(self, seq_key: int, vector: bytes) -> None:
        """Set the result of a request that pools, and end the request's only output."""
        self.vector = vector
        self.finish(seq_key, FinishReason.STOP)

    def admit(self, seq_key: int, num_cached_tokens: int) -> None:
        """Record how much of the prompt was cached when output 0 was first admitted."""
        if self.num_cached_tokens is None and seq_key == self.record.first_seq_key:
            self.num_cached_tokens = num_cached_tokens

    def pin(self, num_pinned_tokens: int) -> None:
        """Record how much of the prompt is pinned in the prefix cache."""
        self.num_pinned_tokens = max(self.num_pinned_tokens, num_pinned_tokens)

    def finish(
        self,
        seq_key: int,
        reason: FinishReason,
        stop_token_id: int | None = None,
        error: OutputError | None = None,
        cumulative_logprob: float | None = None,
    ) -> None:
        """End an unfinished output. The caller must call `flush` afterwards."""
        output = self.outputs[seq_key - self.record.first_seq_key]
        if stop_token_id not in self.record.sampling.stop_token_ids:
            stop_token_id = None  # it is an end token of the model, not of the request
        output.finish(
            OutputFinished(
                output.index,
                reason,
                stop_token_id=stop_token_id,
                error=error,
                cumulative_logprob=cumulative_logprob,
            )
        )
        self._add_event(output)
        self._observe_end(output)

    def flush(self) -> None:
        """Give the reader the events that should be sent now.

        This method must be called after the last change of a step.

        While `send_to` runs and the client has room, this method passes each event to the function
        `put` that `send_to` was given. Then it wakes the reader's task only if the client has no
        more room, the stream has ended, or `put` has failed. Without `send_to`, this method always
        wakes the reader's task, which takes the events itself.
        """
        put, room = self._put, self._room
        if put is not None and self._failure is None:
            try:
                while room is None or room.has_room():
                    if (event := self._take()) is not None:
                        put(event)
                    if self._closed:
                        break
                    if not self.outputs_with_events and self._num_outputs_unread:
                        return
            except QuireError as error:
                # Drop the traceback: its frames refer to it, and thousands of refusals would be
                # garbage at once.
                self._failure = error.with_traceback(None)
            except Exception as error:  # noqa: BLE001 - `send_to` raises it
                self._failure = error
        self._has_events.set()

    def refuse(self, error: QuireError) -> None:
        """End the request because a scheduler has refused it.

        If no output has a token and the reader has no event, the reader's next call raises the
        error; otherwise each live output ends with the error.
        """
        if not self._accepted and not any(output.token_ids for output in self.outputs):
            self._refusal = error
            self.flush()
            return
        failure = OutputError(error.code.value[0], str(error), error.retryable)
        for seq_key in self.live_seq_keys:
            self.finish(seq_key, FinishReason.ERROR, error=failure)
        self.flush()

    def skip(self, received: Mapping[int, OutputReceived], *, has_prompt_scores: bool) -> None:
        """Skip the events that the reader already has; must be called before any event is read.

        Raises `InvalidArgumentError` if the reader claims more tokens than there are, and
        `FailedPreconditionError` if the reader needs lost log-probabilities. After either error,
        the caller must close the request.
        """
        for index in received:
            if index >= len(self.outputs):
                raise InvalidArgumentError(
                    "received.output_index", f"is {index}; it must be below n = {len(self.outputs)}"
                )
        wants_logprobs = self.record.sampling.logprobs is not None
        for output in self.outputs:
            part = received.get(output.index, OutputReceived())
            output.skip(part, wants_logprobs=wants_logprobs)
            self._num_outputs_unread -= part.finished
        if has_prompt_scores:
            self._prompt_logprobs = None
        self._accepted = True

    def cancel(self) -> None:
        """Cancel the live outputs, even if the request is resumable, and end the iteration."""
        if seq_keys := self.live_seq_keys:
            self._cancel(seq_keys)
            for seq_key in seq_keys:
                self.finish(seq_key, FinishReason.CANCELLED)
        self._close()

    def end(self, error: QuireError) -> bool:
        """End all live outputs, even of a resumable request; return whether there were any.

        The reader gets `error`, as if the scheduler had refused the request.
        """
        seq_keys = [] if self._refusal is not None else self.live_seq_keys
        if seq_keys:
            self._cancel(seq_keys)
            self.refuse(error)
        return bool(seq_keys)

    def take_away(self, error: QuireError) -> None:
        """End the iteration with `error`; the request continues, and another call can resume it."""
        self._taken_away = error
        self.goes_on = True
        self._close()

    def _observe_end(self, output: LiveOutput) -> None:
        assert output.finished is not None
        self._metrics.succeeded(output.finished.finish_reason.value)
        self._metrics.request_generation_tokens.observe(len(output.token_ids))
        if not self.live_seq_keys:
            took_s = asyncio.get_running_loop().time() - self._submitted_at
            self._metrics.e2e_request_latency.observe(took_s)
        first, last = output.first_token_at, output.last_token_at
        num_gaps = len(output.token_ids) - 1
        if first is not None and last is not None and num_gaps and self.record.beam is None:
            self._metrics.time_per_output_token.observe((last - first) / num_gaps)

    def _expire(self) -> None:
        self._cancel(seq_keys := self.live_seq_keys)
        for seq_key in seq_keys:
            self.finish(seq_key, FinishReason.DEADLINE)
        self.flush()

    async def send_to(self, put: Callable[[Event], None], room: ClientRoom | None = None) -> None:
        """Call `put` with each event, as soon as the event has arrived and the client has room.

        `put` must not wait, because the task that reads from the scheduler calls it. If `put`
        raises an error, the stream ends and `send_to` raises the error.
        """
        self._put, self._room = put, room
        try:
            while True:
                self._has_events.clear()
                self.flush()
                if self._failure is not None:
                    break
                if self._closed:
                    break
                if room is not None and not room.has_room():
                    await room.wait_for_room()
                else:
                    await self._has_events.wait()
        finally:
            self._put = self._room = None
        failure, self._failure = self._failure or self._taken_away, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # otherwise its traceback would refer to itself

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while (event := self._take()) is None:
            if self._taken_away is not None:
                raise self._taken_away
            if self._closed:
                raise StopAsyncIteration
            self._has_events.clear()
            await self._has_events.wait()
        return event

    def _take(self) -> Event | None:
        """Return the next event, or None if there is none now. May raise the refusal."""
        if self._closed:
            return None
        if self._refusal is not None:
            self._close()
            refusal, self._refusal = self._refusal, None
            try:
                raise refusal
            finally:
                del refusal  # otherwise its traceback would refer to itself
        if self._prompt_logprobs is not None and self.outputs_with_events:
            scores = self._take_scores(self._prompt_logprobs)
            if scores is not None:
                self._accepted = True
                return scores
        while self.outputs_with_events:
            output = self.outputs_with_events[0]
            event = output.take()
            # The output stays while its end, or the rest of a delta that was too large, is unread.
            if event is None or (output.finished is None and not output.has_rest):
                output.has_event = False
                del self.outputs_with_events[0]
            if event is None:
                continue
            if isinstance(event, OutputFinished):
                self._num_outputs_unread -= 1
            self._accepted = True
            return event
        if self._num_outputs_unread:
            return None
        self._close()
        return self.usage

    def _take_scores(self, logprobs: list[TokenLogprob]) -> PromptScores | None:
        """Return the part of `logprobs` that follows the parts of earlier calls.

        `logprobs` are those of the prompt; a part has at most `MAX_EVENT_TOKENS` of them. Return
        None if the request ended before the log-probabilities of the whole prompt arrived.
        """
        # All log-probabilities of the prompt arrive before the first token.
        is_complete = len(logprobs) == len(self.record.prompt_token_ids) - 1
        first = self._num_prompt_logprobs_taken
        end = self._num_prompt_logprobs_taken = first + MAX_EVENT_TOKENS
        has_more = is_complete and end < len(logprobs)
        if not has_more:
            self._prompt_logprobs = None
        return PromptScores(tuple(logprobs[first:end]), has_more) if is_complete else None

    async def aclose(self) -> None:
        """End the iteration; cancel live outputs unless the request is resumable. Idempotent."""
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        is_over = self._refusal is not None or self._taken_away is not None
        seq_keys = [] if is_over else self.live_seq_keys
        if seq_keys and self.record.resume_record is not None:
            self.goes_on = True
            self._leave(self)
        elif seq_keys:
            self._cancel(seq_keys)
            for seq_key in seq_keys:
                self.finish(seq_key, FinishReason.CANCELLED)
        self._has_events.set()
        self._on_closed(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
