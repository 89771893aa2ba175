"""What a request's stream carries: deltas, one end for each output, and the usage."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class FinishReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, and of the likeliest tokens at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Token id and log-probability, best first."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New tokens of one output, and the text that has become certain with them."""

    output_index: int
    token_offset: int
    """The position of the first of `token_ids` in the output."""
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputError:
    """A failure of one output after its request was accepted."""

    code: int
    """The google.rpc.Code that the call would have ended with before that."""
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """The end of one output; no more of it follows."""

    output_index: int
    finish_reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    error: OutputError | None = None
    cumulative_logprob: float | None = None
    """The sum of its tokens' log-probabilities; only if a beam search found it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens; the last event."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    pinned_tokens: int = 0
    """Prompt tokens pinned in the prefix cache."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The prompt's log-probabilities; the first event, if `prompt_logprobs` is set."""

    logprobs: tuple[TokenLogprob, ...]
    """For each token of the prompt but the first."""


Event: TypeAlias = OutputDelta | OutputFinished | Usage | PromptScores
