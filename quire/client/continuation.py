"""Tracks what a client has received of one stream, so that a broken stream can continue.

This module never waits, and sends nothing: it only makes the requests, and processes the events and
errors that arrive. The caller sends the requests. When a call has failed, the caller waits for the
time that `Continuation.failed` returns, and then sends the next request.
"""

import secrets
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from contract.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    QuireError,
    TooBusyError,
    UnavailableError,
)
from quire.client.retry import NO_RETRY, Retry, RetryBudget
from quire.client.types import (
    Event,
    OutputDelta,
    OutputFinished,
    PromptScores,
    TokenLogprob,
    Usage,
)
from quire.v1 import inference_pb2

_SEED_BITS = 63
_REFUSED_WITHIN_S = 1.0
"""If a call ends as UNAVAILABLE more than this many seconds after its start, the service did not
refuse the call: the connection was lost."""


@dataclass(slots=True)
class _Received:
    """The received part of one output."""

    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    texts: list[str] = field(default_factory=list)
    num_text_bytes: int = 0
    finished: bool = False
    is_finished_again: bool = False
    """Whether the output's `OutputFinished` has arrived since the request was last sent."""
    token_ids_to_repeat: Sequence[int] = ()
    """The part of `token_ids` that the service has yet to repeat, if the request was sent again."""
    text_to_repeat: str = ""


class Continuation:
    """One request, over several calls.

    A broken stream is resumed. If the service cannot resume the stream, because router and
    scheduler are gone or too much time has passed, the request is sent again. With the same seed,
    the service generates the same tokens. The client skips each repeated token that equals the
    received one, and raises QuireError otherwise. So the caller gets each token exactly once.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        policy: Retry | None,
        budget: RetryBudget,
    ) -> None:
        """Give a resumable `request` an id and a seed, unless it has them.

        If `policy` is None, a resumable request is retried as with `Retry()`, and other requests
        are not retried.
        """
        self.is_complete = False
        """Whether the last event has arrived."""
        self._request = request
        self._policy = policy or (Retry() if request.resumable else NO_RETRY)
        self._budget = budget
        self._outputs: dict[int, _Received] = {}
        self._has_prompt_scores = False
        self._prompt_logprobs: list[TokenLogprob] = []
        """The prompt's log-probabilities that the current call has delivered."""
        self._is_resuming = False
        self._is_accepted = False
        """Whether any call has delivered an event."""
        self._may_be_live = False
        """Whether the request may be live at the service although no event has arrived."""
        self._num_failures = 0
        """Failures since the last new event."""
        self._failing_since = 0.0
        if request.resumable:
            request.request_id = request.request_id or uuid.uuid4().hex
            if not request.sampling.HasField("seed"):
                request.sampling.seed = secrets.randbits(_SEED_BITS)

    @property
    def request_id(self) -> str:
        """The request's id; empty: the service chooses one."""
        return self._request.request_id

    @property
    def is_resumable(self) -> bool:
        """Whether the request continues at the service if a stream breaks."""
        return self._request.resumable

    def next_request(self) -> inference_pb2.GenerateRequest | inference_pb2.ResumeRequest:
        """Make the request of the next call."""
        self._prompt_logprobs.clear()
        if not self._is_resuming:
            for output in self._outputs.values():
                output.is_finished_again = False
                output.token_ids_to_repeat = output.token_ids[:]
                output.text_to_repeat = "".join(output.texts)
            return self._request
        # If the stream broke while the service was repeating tokens, the tokens not yet repeated
        # count as not received.
        return inference_pb2.ResumeRequest(
            request_id=self._request.request_id,
            model=self._request.model,
            received=[
                inference_pb2.OutputReceived(
                    output_index=index,
                    num_tokens=len(output.token_ids) - len(output.token_ids_to_repeat),
                    num_text_bytes=output.num_text_bytes - len(output.text_to_repeat.encode()),
                    finished=output.is_finished_again,
                )
                for index, output in self._outputs.items()
            ],
            has_prompt_scores=self._has_prompt_scores,
        )

    def receive(self, event: Event) -> Event | None:
        """Process the next event of the current call; return what is new in it, or None.

        After a broken stream, the next call may repeat what the client has already received. Parts
        of the prompt's scores are returned together, when the last part arrives.

        Raises QuireError if the event leaves a gap or contradicts the received tokens.
        """
        if not self._is_accepted:
            self._is_accepted = True
            self._budget.succeeded()
        new = self._new(event)
        if new is not None:
            self._num_failures = 0
        return new

    def _new(self, event: Event) -> Event | None:
        match event:
            case OutputDelta():
                return self._take_delta(event) if self.is_resumable else event
            case OutputFinished():
                output = self._outputs.setdefault(event.output_index, _Received())
                is_new = not output.finished
                output.finished = output.is_finished_again = True
                return event if is_new else None
            case PromptScores():
                if self._has_prompt_scores:
                    return None
                self._prompt_logprobs += event.logprobs
                self._has_prompt_scores = not event.has_more
                return None if event.has_more else PromptScores(tuple(self._prompt_logprobs))
            case Usage():
                self.is_complete = True
                return event

    def _take_delta(self, delta: OutputDelta) -> OutputDelta | None:
        output = self._outputs.setdefault(delta.output_index, _Received())
        expected = len(output.token_ids) - len(output.token_ids_to_repeat)
        if delta.token_offset != expected:
            raise QuireError(
                f"output {delta.output_index} continues at token {delta.token_offset}; it should"
                f" continue at {expected}"
            )
        num_again = min(len(delta.token_ids), len(output.token_ids_to_repeat))
        num_chars_again = min(len(delta.text), len(output.text_to_repeat))
        if (
            tuple(output.token_ids_to_repeat[:num_again]) != delta.token_ids[:num_again]
            or output.text_to_repeat[:num_chars_again] != delta.text[:num_chars_again]
        ):
            raise QuireError(
                f"output {delta.output_index} differs from the tokens received before, from token"
                f" {expected} on"
            )
        output.token_ids_to_repeat = output.token_ids_to_repeat[num_again:]
        output.text_to_repeat = output.text_to_repeat[num_chars_again:]
        new = delta._replace(
            token_offset=delta.token_offset + num_again,
            token_ids=delta.token_ids[num_again:],
            text=delta.text[num_chars_again:],
            logprobs=delta.logprobs[num_again:],
        )
        output.token_ids.extend(new.token_ids)
        output.texts.append(new.text)
        output.num_text_bytes += len(new.text.encode())
        return new if new.token_ids or new.text else None

    def check_complete(self) -> None:
        """Raise UnavailableError if a stream ended without its last event, the usage."""
        if not self.is_complete:
            raise UnavailableError("the stream ended before its usage")

    def failed(self, error: QuireError, now: float, took_s: float = 0.0) -> float:
        """Record the failure of the current call; return the seconds until the next call.

        Raises `error` if another call cannot help. `now` is on the monotonic clock; `took_s` is the
        duration of the call.
        """
        if self._num_failures == 0:
            self._failing_since = now
        self._num_failures += 1
        delay_s = self._policy.backoff_s(self._num_failures)
        match error:
            case NotFoundError() | FailedPreconditionError() if self._is_resuming:
                self._is_resuming = False
            case AlreadyExistsError() if self.is_resumable and (
                self._is_accepted or self._num_failures > 1
            ):
                # The router of an earlier call has not noticed yet that the call broke, so the
                # request is live there. An accepted request is not given up like a refused one.
                self._is_resuming = self._may_be_live = True
            case TooBusyError():
                delay_s = max(delay_s, error.retry_after_s)
            case UnavailableError():
                self._may_be_live = self._may_be_live or took_s > _REFUSED_WITHIN_S
                self._is_resuming = self.is_resumable and (self._is_accepted or self._may_be_live)
            case _:
                raise error
        if self.is_resumable and (self._is_accepted or self._may_be_live):
            may_retry = now + delay_s - self._failing_since <= self._policy.resume_within_s
        else:
            may_retry = self._budget.failed() and self._num_failures < self._policy.max_attempts
            may_retry = may_retry and not self._is_accepted
        if not may_retry:
            raise error
        return delay_s
