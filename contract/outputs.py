"""The events of a request's stream: prompt scores, deltas, an end for each output, the usage."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias


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
    """Pairs of token id and log-probability, best first."""


class OutputDelta(NamedTuple):
    """New tokens of one output, and the new text that can no longer change.

    A delta is a tuple, because nearly every token needs one, and a frozen dataclass takes twice as
    long to make.
    """

    output_index: int
    token_offset: int
    """The position of `token_ids[0]` in the output."""
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputError:
    """A failure of one output after its request was accepted."""

    code: int
    """The `google.rpc.Code` of the failure."""
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """The last event of an output, which says how the output ended."""

    output_index: int
    finish_reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    error: OutputError | None = None
    cumulative_logprob: float | None = None
    """The sum of the log-probabilities of the output's tokens; set only for beam searches."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The request's token counts; the last event of its stream."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    pinned_tokens: int = 0
    """Prompt tokens pinned in the prefix cache."""
    reasoning_tokens: int = 0
    """Output tokens that the model spent on thinking; 0 if the router cannot tell thinking from
    text."""

    @property
    def cache_write_tokens(self) -> int:
        """Pinned prompt tokens that the cache did not have, so that the request computed them."""
        return max(0, self.pinned_tokens - self.cached_tokens)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt; if `prompt_logprobs` is set, a stream begins with them.

    A stream may have several of these events. Together, they have one entry for each prompt token
    except the first.
    """

    logprobs: tuple[TokenLogprob, ...]
    has_more: bool = False
    """Whether another such event follows."""


Event: TypeAlias = OutputDelta | OutputFinished | Usage | PromptScores
