"""One live request: its replay record, its outputs, and the events its reader has not taken yet."""

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from contract.errors import InvalidArgumentError, QuireError
from contract.outputs import (
    Event,
    FinishReason,
    OutputError,
    OutputFinished,
    PromptScores,
    TokenLogprob,
    Usage,
)
from contract.request import OutputReceived
from contract.sampling import BeamSearch, SamplingParams
from router import metrics
from router.request.output import LiveOutput


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """What the scheduler must be told of a request, again if it forgets.

    Nothing in it is left to chance or to the scheduler's choice: `sampling.seed` and
    `sampling.max_tokens` are set, so that a request that is submitted again with the tokens it has
    produced goes on exactly as it would have.
    """

    request_id: str
    first_seq_key: int
    """Output i is the sequence `first_seq_key + i`."""
    prompt_token_ids: "array[int]"
    """int32, at least one; never changed."""
    sampling: SamplingParams
    cache_salt: str
    cache_pin_s: float | None
    traceparent: str
    priority: int
    tenant: str
    deadline: float | None
    """On the event loop's clock; None: never."""
    beam: BeamSearch | None = None
    resume_record: bytes | None = None
    """What a router needs to resume the request, besides all this; None: it cannot be resumed."""


class LiveRequest:
    """A request that the scheduler works on, and the stream of its events.

    A face reads it as an asynchronous iterator, under `async with`: leaving the block early, for
    whatever reason, cancels what is still live or, if the request can be resumed, leaves it to the
    scheduler until somebody does. A refusal by the scheduler is raised, as the
    `QuireError` it is, from the first `__anext__`; a failure after that is an `OutputFinished` with
    reason ERROR. After the `Usage` the iteration ends.

    The scheduler client is the only one who calls the methods from `push_token` to `refuse`. None
    of them waits: what the reader has not taken yet is merged into one pending delta per output, so
    a reader that is slow, or never reads, costs the memory of its tokens (at most `max_model_len`
    per output) and stops nobody else.
    """

    def __init__(
        self,
        record: ReplayRecord,
        outputs: Sequence[LiveOutput],
        *,
        model: str,
        cancel: Callable[[Sequence[int]], None],
        leave: Callable[["LiveRequest"], None],
        on_closed: Callable[["LiveRequest"], None],
    ) -> None:
        """Takes its place between scheduler and reader; belongs to the running event loop.

        `cancel` ends sequences at the scheduler, without an echo to this request. `leave` is
        called instead if a reader leaves who may resume. `on_closed` is called once, when the
        reader has taken everything or has left.
        """
        self.record = record
        self.model = model
        self.created = int(time.time())
        self.outputs = tuple(outputs)
        self.num_cached_tokens: int | None = None
        self.num_pinned_tokens = 0
        self.goes_on = False
        """Whether the request goes on without this reader, who has left."""
        self.num_submits = 0
        """How often the scheduler was told; counted by the scheduler client."""
        self.refused_by: set[str] = set()
        """The schedulers that had no room for it; kept by the scheduler client."""
        self._refusal: QuireError | None = None
        loop = asyncio.get_running_loop()
        self._submitted_at = loop.time()
        self._cancel = cancel
        self._leave = leave
        self._on_closed = on_closed
        self._news = asyncio.Event()
        self._prompt_logprobs: list[TokenLogprob] | None = None
        """Those that have come; None: none are wanted, or the reader has taken them."""
        if record.sampling.prompt_logprobs is not None:
            self._prompt_logprobs = []
        self._outputs_with_news: dict[int, None] = {}  # an ordered set: each output has its turn
        self._num_outputs_read = 0  # outputs whose end the reader has taken
        self._accepted = False  # the reader has taken an event: too late to refuse
        self._closed = False
        self._taken_away: QuireError | None = None
        self._timer = (
            None if record.deadline is None else loop.call_at(record.deadline, self._expire)
        )

    @property
    def request_id(self) -> str:
        """The id, given by the client or made by the router."""
        return self.record.request_id

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt's tokens, with special tokens."""
        return self.record.prompt_token_ids

    @property
    def live_seq_keys(self) -> list[int]:
        """The keys of the outputs that have not ended."""
        first = self.record.first_seq_key
        return [first + output.index for output in self.outputs if output.finished is None]

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all outputs so far."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def time_to_first_token_s(self) -> float | None:
        """From taking the request to the first token of output 0, if that has come."""
        first = self.outputs[0].first_token_at
        return None if first is None else first - self._submitted_at

    @property
    def finish_reasons(self) -> list[str]:
        """How each output ended, of those that have."""
        return [output.finished.finish_reason.value for output in self.outputs if output.finished]

    def push_token(
        self,
        seq_key: int,
        token_id: int,
        logprob: TokenLogprob | None,
        now: float,
        *,
        is_new: bool = True,
    ) -> bool:
        """Adds a token to an output that has not ended; True if a stop string ended it thereby.

        The caller then cancels the sequence. `now` is on the event loop's clock. One that is not
        new, but known from before the request was resumed, does not count in the metrics.
        """
        output = self.outputs[seq_key - self.record.first_seq_key]
        if not is_new:
            pass
        elif output.last_token_at is None:
            output.first_token_at = now
            if output.index == 0:
                metrics.TIME_TO_FIRST_TOKEN.observe(now - self._submitted_at)
        elif self.record.beam is None:  # the tokens of a search come all at once
            metrics.INTER_TOKEN_LATENCY.observe(now - output.last_token_at)
        output.last_token_at = now
        output.push(token_id, logprob)
        self._tell(output)
        return output.finished is not None

    def score_prompt(self, position: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Adds the scores of the prompt's tokens from `position` on; some may be known already."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += logprobs[len(self._prompt_logprobs) + 1 - position :]

    def admit(self, seq_key: int, num_cached_tokens: int) -> None:
        """Notes how much of the prompt was in the prefix cache when output 0 was first admitted."""
        if self.num_cached_tokens is None and seq_key == self.record.first_seq_key:
            self.num_cached_tokens = num_cached_tokens

    def pin(self, num_pinned_tokens: int) -> None:
        """Notes how much of the prompt stays in the prefix cache; outputs of it share that."""
        self.num_pinned_tokens = max(self.num_pinned_tokens, num_pinned_tokens)

    def finish(
        self,
        seq_key: int,
        reason: FinishReason,
        stop_token_id: int | None = None,
        error: OutputError | None = None,
        cumulative_logprob: float | None = None,
    ) -> None:
        """Ends an output that has not ended."""
        output = self.outputs[seq_key - self.record.first_seq_key]
        if stop_token_id not in self.record.sampling.stop_token_ids:
            stop_token_id = None  # the model's own end token
        output.finish(
            OutputFinished(
                output.index,
                reason,
                stop_token_id=stop_token_id,
                error=error,
                cumulative_logprob=cumulative_logprob,
            )
        )
        self._tell(output)

    def refuse(self, error: QuireError) -> None:
        """Ends the request because the scheduler does not take it (again).

        The reader gets the error as such if nothing has happened yet, else as each output's end.
        """
        if not self._accepted and not any(output.token_ids for output in self.outputs):
            self._refusal = error
            self._news.set()
            return
        failure = OutputError(error.code.value[0], str(error), error.retryable)
        for seq_key in self.live_seq_keys:
            self.finish(seq_key, FinishReason.ERROR, error=failure)

    def skip(self, received: Mapping[int, OutputReceived], *, has_prompt_scores: bool) -> None:
        """Leaves out what the reader has, of all that was pushed; nothing may be read before.

        Raises `InvalidArgumentError` if it has more than there is, `FailedPreconditionError` if it
        lacks what was lost; then the request is to be closed.
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
            self._num_outputs_read += part.finished
        if has_prompt_scores:
            self._prompt_logprobs = None
        self._accepted = True

    def cancel(self) -> None:
        """Ends what is still live, also if it could be resumed, and the reading with it."""
        if seq_keys := self.live_seq_keys:
            self._cancel(seq_keys)
            for seq_key in seq_keys:
                self.finish(seq_key, FinishReason.CANCELLED)
        self._close()

    def take_away(self, error: QuireError) -> None:
        """Ends the reading with `error`, and nothing else: another call has the request."""
        self._taken_away = error
        self.goes_on = True
        self._close()

    def _tell(self, output: LiveOutput) -> None:
        """Wakes the reader; called after each change of an output."""
        self._outputs_with_news[output.index] = None
        self._news.set()
        if output.finished is not None:
            metrics.REQUEST_SUCCESS.labels(output.finished.finish_reason.value).inc()
            metrics.REQUEST_GENERATION_TOKENS.observe(len(output.token_ids))
            self._observe_pace(output)
            if not self.live_seq_keys:
                took_s = asyncio.get_running_loop().time() - self._submitted_at
                metrics.E2E_REQUEST_LATENCY.observe(took_s)

    def _observe_pace(self, output: LiveOutput) -> None:
        first, last = output.first_token_at, output.last_token_at
        num_gaps = len(output.token_ids) - 1
        if first is not None and last is not None and num_gaps and self.record.beam is None:
            metrics.TIME_PER_OUTPUT_TOKEN.observe((last - first) / num_gaps)

    def _expire(self) -> None:
        self._cancel(seq_keys := self.live_seq_keys)
        for seq_key in seq_keys:
            self.finish(seq_key, FinishReason.DEADLINE)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._closed:
            if self._refusal is not None:
                self._close()
                raise self._refusal
            if (event := self._next_event()) is not None:
                self._accepted = True
                return event
            self._news.clear()
            await self._news.wait()
        if self._taken_away is not None:
            raise self._taken_away
        raise StopAsyncIteration

    def _next_event(self) -> Event | None:
        if self._prompt_logprobs is not None and self._outputs_with_news:
            scores, self._prompt_logprobs = PromptScores(tuple(self._prompt_logprobs)), None
            # They come before, or with, the first token: else this is an end without one.
            if len(scores.logprobs) == len(self.record.prompt_token_ids) - 1:
                return scores
        while self._outputs_with_news:
            index = next(iter(self._outputs_with_news))
            event = self.outputs[index].take()
            if event is None:
                del self._outputs_with_news[index]
                continue
            if isinstance(event, OutputFinished):
                self._num_outputs_read += 1
            return event
        if self._num_outputs_read < len(self.outputs):
            return None
        self._close()
        return Usage(
            prompt_tokens=len(self.record.prompt_token_ids),
            completion_tokens=self.num_completion_tokens,
            cached_tokens=self.num_cached_tokens or 0,
            pinned_tokens=self.num_pinned_tokens,
        )

    async def aclose(self) -> None:
        """Cancels or leaves what is still live and ends the iteration; may be called again."""
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
        self._news.set()
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
