"""Messages of a scheduler on its stream to a router."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from contract.errors import QuireError
from contract.lora import LoraAdapter
from contract.outputs import FinishReason, OutputError, TokenLogprob
from contract.request import StopOptions
from router.request.live import ReplayRecord
from router.schedulers.scheduler_model import SchedulerModel


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first message: the scheduler knows its model and takes requests."""

    epoch: int
    model: SchedulerModel
    resume_grace_s: float
    """For how long a resumable request continues without a reader."""
    superseded_epochs: frozenset[int]
    """Of schedulers whose workers this one has now."""
    max_waiting: int | None
    """Most sequences that may wait at one worker; None: unknown."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request is refused; none of its sequences exists."""

    first_seq_key: int
    error: QuireError
    retry_after_s: float
    """When to retry, if the error is retryable."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence left the queue."""

    seq_key: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log-probabilities of part of a sequence's prompt."""

    seq_key: int
    position: int
    """Position in the prompt of the first one."""
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """A sequence's prompt has been pinned in the prefix cache."""

    seq_key: int
    num_pinned_tokens: int


@dataclass(frozen=True, slots=True)
class Ending:
    """A sequence ended; its last tokens are in the same message."""

    seq_key: int
    reason: FinishReason
    stop_token_id: int | None
    error: OutputError | None
    cumulative_logprob: float | None = None
    """Only if a beam search found the output."""


@dataclass(frozen=True, slots=True)
class QueueRoom:
    """How many more sequences the queues take."""

    num_seqs: int | None
    """None: many; no counting needed."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """The events of one step for this router's sequences; None in a field: no change."""

    seq_keys: list[int]
    token_ids: list[int]
    """Parallel to `seq_keys`."""
    logprobs: Mapping[int, TokenLogprob]
    """By index in `token_ids`."""
    prompt_scores: tuple[PromptPart, ...]
    admissions: tuple[Admitted, ...]
    pins: tuple[Pin, ...]
    endings: tuple[Ending, ...]
    room: QueueRoom | None = None
    max_model_len: int | None = None
    """Most tokens of prompt and output from now on."""
    adapters: tuple[LoraAdapter, ...] | None = None
    """Those that requests may name from now on."""
    is_unloaded: bool | None = None
    """Whether no worker has its model, so that requests wait."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """A resumed request, which belongs to this router from now on."""

    record: ReplayRecord
    """As submitted, under the keys that this router reserved; without its deadline."""
    stop_options: StopOptions
    n: int
    so_far: StepEvents
    """All its output so far."""


SchedulerMessage: TypeAlias = Welcome | StepEvents | Refusal | Resumption
