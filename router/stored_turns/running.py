"""A turn that this router computes, with its output for readers and for the store."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field, replace

from contract.errors import QuireError
from contract.outputs import (
    Event,
    FinishReason,
    OutputDelta,
    OutputError,
    OutputFinished,
    TokenLogprob,
    Usage,
)
from router.live.live_request import LiveRequest
from router.live.usage import Used, used_of
from router.schedulers.wire import record_from_bytes
from router.stored_turns.store import TurnProgress
from router.stored_turns.turn import Turn, TurnAnswer, TurnEnd, TurnStatus


class MovedError(QuireError):
    """Another router continues the turn."""


@dataclass(slots=True)
class Seen:
    """How much of a turn a reader has received."""

    tokens: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """The number of tokens received, by output index."""
    ended_at: float | None = None
    """When the turn ended; set once the reader has received the end."""

    def end(self) -> float:
        """Return when the turn ended; if that is not known, the current time."""
        return self.ended_at or time.time()

    def new_of(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield those of `events` that the reader lacks, and count them as received."""
        for event in events:
            if not isinstance(event, OutputDelta):
                yield event
                continue
            num_seen = self.tokens[event.output_index] - event.token_offset
            if num_seen < len(event.token_ids):
                self.tokens[event.output_index] = event.token_offset + len(event.token_ids)
                yield event if num_seen <= 0 else _without(event, num_seen)


def _without(delta: OutputDelta, num: int) -> OutputDelta:
    return OutputDelta(
        delta.output_index,
        delta.token_offset + num,
        delta.token_ids[num:],
        "",
        delta.logprobs[num:],
    )


@dataclass(slots=True)
class _OutputTokens:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def since(self, output_index: int, start: int) -> OutputDelta:
        return OutputDelta(
            output_index,
            start,
            tuple(self.token_ids[start:]),
            "",
            tuple(self.logprobs[start:]),
        )


class RunningTurn:
    """Collects the events of a turn.

    Readers get the turn's end once the end is stored, or once the store has failed.
    """

    def __init__(self, turn: Turn, kept: Iterable[Event] = ()) -> None:
        """`kept` are the events that are already stored."""
        self.turn = turn
        self.record = turn.record
        self.task: asyncio.Task[None] | None = None
        self.live: LiveRequest | None = None
        """The request that computes the turn now, or that computed it last."""
        self.answer: TurnAnswer | None = None
        self.is_cancelled = False
        self.num_readers = 0
        self.done = asyncio.Event()
        """Set once the end is stored."""
        self._outputs: defaultdict[int, _OutputTokens] = defaultdict(_OutputTokens)
        self._last: list[Event] = []
        """The events after all tokens: the ends of outputs, and the usage."""
        self._end: TurnEnd | None = None
        self._is_published = False
        self._is_moved = False
        self._news = asyncio.Event()
        self._num_events_kept = 0
        self._kept = Seen()
        self._is_record_kept = turn.record is not None
        for event in kept:
            self.add(event)
            self._num_events_kept += 1
        list(self._kept.new_of(self._deltas()))

    def add(self, event: Event) -> None:
        """Append the next event."""
        match event:
            case OutputDelta():
                output = self._outputs[event.output_index]
                # A request that was submitted again sends its tokens from the first token on.
                num_known = len(output.token_ids) - event.token_offset
                output.token_ids += event.token_ids[num_known:]
                output.logprobs += event.logprobs[num_known:]
                self._tell()
            case OutputFinished() | Usage():
                self._last.append(event)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self._outputs.values())

    @property
    def has_ended(self) -> bool:
        """Whether all events have arrived."""
        return any(isinstance(event, Usage) for event in self._last)

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        return [*self._deltas(), *self._last]

    def stop(self, reason: FinishReason, error: QuireError | None = None) -> None:
        """End all outputs that have not ended."""
        ended = {e.output_index for e in self._last if isinstance(e, OutputFinished)}
        failure = None
        if error is not None:
            failure = OutputError(error.code.value[0], str(error), error.retryable)
        for index in sorted({0, *self._outputs} - ended):
            self._last.append(OutputFinished(index, reason, error=failure))
        self._last.append(self._usage_so_far())

    def _usage_so_far(self) -> Usage:
        if self.live is not None:
            return replace(self.live.usage, completion_tokens=self.num_tokens)
        num_prompt_tokens = 0
        if self.record is not None:
            with contextlib.suppress(QuireError):  # written by another version
                num_prompt_tokens = len(record_from_bytes(self.record).record.prompt_token_ids)
        return Usage(num_prompt_tokens, self.num_tokens, 0)

    @property
    def used(self) -> Used:
        """The usage to record once the turn has ended; empty if no scheduler began the turn."""
        live = self.live
        is_begun = live is None or live.num_cached_tokens is not None or self.num_tokens
        if self.record is None or not is_begun:
            return Used()
        return used_of(next(event for event in self._last if isinstance(event, Usage)))

    @property
    def status(self) -> TurnStatus:
        """The turn's status, which follows from the reasons for which its outputs ended."""
        reasons = {e.finish_reason for e in self._last if isinstance(e, OutputFinished)}
        if FinishReason.CANCELLED in reasons:
            return TurnStatus.CANCELLED
        if reasons & {FinishReason.ERROR, FinishReason.DEADLINE}:
            return TurnStatus.FAILED
        return TurnStatus.COMPLETED

    def end(self, end: TurnEnd) -> None:
        """Set the end to be stored."""
        self._end = end

    # --- for the store --------------------------------------------------------------------------

    def progress(self) -> tuple[TurnProgress, Seen]:
        """Return the part of the turn that the store lacks.

        Also returns how much of the turn the store will have once this part is written. The caller
        then passes both results to `kept`.
        """
        after = Seen(self._kept.tokens.copy(), None if self._end is None else self._end.at)
        events = list(after.new_of(self._deltas(self._kept)))
        if self._end is not None:
            events += self._last
        record = None if self._is_record_kept else self.record
        return TurnProgress(self.turn.id, self._num_events_kept, events, record, self._end), after

    def kept(self, progress: TurnProgress, seen: Seen) -> None:
        """Record that a result of `progress()` has been stored."""
        self._kept = seen
        self._num_events_kept += len(progress.events)
        self._is_record_kept = self._is_record_kept or progress.record is not None

    @property
    def needs_writing(self) -> bool:
        """Whether the end is not stored yet."""
        return self._end is not None and self._kept.ended_at is None

    # --- for readers ----------------------------------------------------------------------------

    def publish(self) -> None:
        """Let readers receive the end."""
        self._is_published = True
        self._tell()

    def move(self) -> None:
        """Tell readers that another router continues the turn."""
        self._is_moved = True
        self._tell()

    async def read(self, seen: Seen) -> AsyncGenerator[Event, None]:
        """Yield the events that a reader lacks, until the end; may raise MovedError."""
        self.num_readers += 1
        try:
            while True:
                news = self._news
                for event in seen.new_of(self._deltas(seen)):
                    yield event
                if self._is_published:
                    seen.ended_at = None if self._end is None else self._end.at
                    for event in [*seen.new_of(self._deltas(seen)), *self._last]:
                        yield event
                    return
                if self._is_moved:
                    raise MovedError("another router continues the turn")
                await news.wait()
        finally:
            self.num_readers -= 1

    def _deltas(self, seen: Seen | None = None) -> list[Event]:
        """Return one delta for each output that has tokens beyond those in `seen`."""
        starts = {} if seen is None else seen.tokens
        return [
            output.since(index, start)
            for index, output in sorted(self._outputs.items())
            if (start := starts.get(index, 0)) < len(output.token_ids)
        ]

    def _tell(self) -> None:
        if self.num_readers:
            self._news.set()
            self._news = asyncio.Event()
