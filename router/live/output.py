"""One output of a live request: its tokens, its text, and its unread events."""

from array import array
from collections.abc import Container
from typing import Final

from contract.errors import FailedPreconditionError, InvalidArgumentError
from contract.outputs import FinishReason, OutputDelta, OutputFinished, TokenLogprob
from contract.request import OutputReceived, ThinkingMarkers
from router.live.stop_strings import StopMatcher
from router.live.thinking_counter import ThinkingCounter
from router.text.detokenizer import Detokenizer

MAX_EVENT_TOKENS: Final = 4096
"""Limit on tokens of one delta, and on log-probabilities of a prompt in one event. With the 20
likeliest tokens at each position, such an event has 0.6 MB of protobuf; gRPC clients accept
messages up to 4 MiB by default."""
MAX_DELTA_CHARS: Final = 1 << 18
"""Limit on characters of one delta, which keeps the delta's text within 1 MiB. `MAX_EVENT_TOKENS`
does not limit the text: one token may be a hundred spaces, and the text of all unread tokens comes
with the last of them (`LiveOutput.take`)."""


class LiveOutput:
    """Turns the tokens of one sequence into deltas and an end.

    Tokens become text when they arrive, not when the reader takes them, because a stop string must
    end the sequence even if the reader is slow. The conversion takes less than a microsecond per
    token.
    """

    __slots__ = (
        "_detokenizer",
        "_end_taken",
        "_end_token_ids",
        "_logprobs",
        "_may_think",
        "_num_due",
        "_num_unread",
        "_stop_matcher",
        "_stream_interval",
        "_text",
        "_thinking",
        "finished",
        "first_token_at",
        "has_event",
        "has_rest",
        "index",
        "last_token_at",
        "num_skipped",
        "skipped",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stop_matcher: StopMatcher | None,
        end_token_ids: Container[int],
        thinking: ThinkingMarkers | None = None,
        stream_interval: int = 1,
    ) -> None:
        """Make an output without tokens.

        Args:
            index: The output's position among those of the request.
            detokenizer: Makes the text.
            stop_matcher: Finds stop strings in the text; None: there are none.
            end_token_ids: Tokens that end the sequence; their text is not part of the output.
            thinking: How to recognize thinking; None: thinking is not counted.
            stream_interval: Number of new tokens after which a delta is due; the first delta is
                due at once.
        """
        self.index = index
        self.token_ids = array("i")
        """int32: all tokens so far; if the request is submitted again, they are submitted, too."""
        self.finished: OutputFinished | None = None
        """The end of the output; once set, no token may be pushed."""
        self.first_token_at: float | None = None
        """When the first token arrived; None: no token has arrived, or the first one arrived before
        the request was resumed."""
        self.last_token_at: float | None = None
        """When the latest token arrived, on the event loop's clock."""
        self._detokenizer = detokenizer
        self._stop_matcher = stop_matcher
        self._end_token_ids = end_token_ids
        self._thinking = None if thinking is None else ThinkingCounter(thinking)
        self._may_think = self._thinking is not None
        self._stream_interval = stream_interval
        # The next two numbers are small in most outputs; Python makes no new objects for small
        # integers.
        self._num_unread = 0
        """Number of tokens for the next delta."""
        self._num_due = 1
        """Once this many tokens are unread, a delta is due, which means that it should be sent. The
        output's end is always due."""
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._end_taken = False
        self.has_event = False
        """Whether an event is due but not taken yet; set by `LiveRequest`."""
        self.has_rest = False
        """Whether tokens or text remain that did not fit into the last delta."""
        self.num_skipped: int | None = None
        """How many tokens the reader had when it resumed the request; None: not resumed."""
        self.skipped: OutputDelta | None = None
        """Tokens, text and log-probabilities that `skip` has skipped; None: nothing."""

    @property
    def has_end_token(self) -> bool:
        """Whether the last token ends the output."""
        return bool(self.token_ids) and self.token_ids[-1] in self._end_token_ids

    @property
    def num_thinking_tokens(self) -> int:
        return 0 if self._thinking is None else self._thinking.num_tokens

    def push(self, token_id: int, logprob: TokenLogprob | None) -> bool:
        """Add the next token; if it completes a stop string, end the output.

        Returns whether an event is due.
        """
        self.token_ids.append(token_id)
        self._num_unread += 1
        if logprob is not None:
            self._logprobs.append(logprob)
        if token_id in self._end_token_ids:
            return self._num_unread >= self._num_due
        text = self._detokenizer.push(token_id)
        if self._may_think and self._thinking is not None:
            self._may_think = self._thinking.push(text)
        if self._stop_matcher is not None:
            text = self._stop_matcher.push(text)
            if (found := self._stop_matcher.found) is not None:
                self.finished = OutputFinished(self.index, FinishReason.STOP, stop_string=found)
        if text:
            self._text.append(text)
        return self._num_unread >= self._num_due or self.finished is not None

    def finish(self, finished: OutputFinished) -> None:
        """End the output, and add the text that stop matcher and detokenizer have held back."""
        if self._stop_matcher is not None:
            self._text.append(self._stop_matcher.flush())
        self._text.append(self._detokenizer.flush())
        self.finished = finished

    def skip(self, received: OutputReceived, *, wants_logprobs: bool) -> None:
        """Skip the tokens and text that the reader already has. Call this before the first `take`.

        Raises `InvalidArgumentError` if the reader claims more tokens than the output has, and
        `FailedPreconditionError` if the reader needs log-probabilities that were not kept.
        """
        field = f"received[{self.index}]"
        text = "".join(self._text).encode()
        for name, value, limit in (
            ("num_tokens", received.num_tokens, len(self.token_ids)),
            ("num_text_bytes", received.num_text_bytes, len(text)),
            ("finished", int(received.finished), int(self.finished is not None)),
        ):
            if value > limit:
                raise InvalidArgumentError(
                    f"{field}.{name}", f"is {value}; it must be at most {limit}, as no more exists"
                )
        num_lost = len(self.token_ids) - len(self._logprobs) if wants_logprobs else 0
        if wants_logprobs and received.num_tokens < num_lost:
            raise FailedPreconditionError(
                f"{field}.num_tokens is {received.num_tokens}; the log-probabilities of the"
                f" first {num_lost} tokens were lost with a scheduler"
            )
        num_logprobs = received.num_tokens - num_lost if wants_logprobs else 0
        skipped, self._logprobs = self._logprobs[:num_logprobs], self._logprobs[num_logprobs:]
        try:
            self._text = [text[received.num_text_bytes :].decode()]
        except UnicodeDecodeError:
            raise InvalidArgumentError(
                f"{field}.num_text_bytes", f"is {received.num_text_bytes}, within a character"
            ) from None
        if received.num_tokens or received.num_text_bytes:
            self.skipped = OutputDelta(
                output_index=self.index,
                token_offset=0,
                token_ids=tuple(self.token_ids[: received.num_tokens]),
                text=text[: received.num_text_bytes].decode(),
                logprobs=tuple(skipped),
            )
        self.num_skipped = received.num_tokens
        self._num_unread = len(self.token_ids) - received.num_tokens
        self._num_due = 1
        self._end_taken = received.finished

    def take(self) -> OutputDelta | OutputFinished | None:
        """Return the next event: a delta if tokens or text are unread, else the output's end.

        Returns None if nothing is unread, and the end has not come yet or was already returned.
        """
        num_unread = self._num_unread
        offset = len(self.token_ids) - num_unread
        if num_unread > MAX_EVENT_TOKENS:
            self._num_unread = num_unread - MAX_EVENT_TOKENS
            self.has_rest = True
            most = offset + MAX_EVENT_TOKENS
            logprobs = tuple(self._logprobs[:MAX_EVENT_TOKENS])
            del self._logprobs[:MAX_EVENT_TOKENS]
            # Text is not stored by token, so all of it comes with the last tokens.
            return OutputDelta(self.index, offset, tuple(self.token_ids[offset:most]), "", logprobs)
        text = "".join(self._text)
        if text or num_unread:
            if num_unread == 1:  # the usual case, which needs no copy of the array
                token_ids: tuple[int, ...] = (self.token_ids[offset],)
            else:
                token_ids = tuple(self.token_ids[offset:])
            logprobs = tuple(self._logprobs)
            if logprobs:
                self._logprobs.clear()
            self._num_unread = 0
            self._num_due = self._stream_interval
            self._text.clear()
            self.has_rest = len(text) > MAX_DELTA_CHARS
            if self.has_rest:
                self._text.append(text[MAX_DELTA_CHARS:])
                text = text[:MAX_DELTA_CHARS]
            return OutputDelta(self.index, offset, token_ids, text, logprobs)
        if self.finished is not None and not self._end_taken:
            self._end_taken = True
            return self.finished
        return None
