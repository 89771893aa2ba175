"""The messages that a scheduler sends to a router."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from contract.errors import QuireError
from contract.info import ModelInfo
from contract.lora import LoraAdapter
from contract.outputs import FinishReason, OutputError, TokenLogprob
from contract.request import StopOptions
from router.live.live_request import ReplayRecord


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first message, sent once the scheduler knows its model and accepts requests."""

    epoch: int
    model: ModelInfo
    resume_grace_s: float
    """How long the scheduler continues a resumable request whose client has left."""
    superseded_epochs: frozenset[int]
    """Epochs of the schedulers whose workers this scheduler has taken over."""
    max_waiting: int | None
    """Limit on sequences that wait at one worker; None: unknown."""
    wants_heartbeats: bool
    """Whether the scheduler expects heartbeats from this router."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The scheduler has refused a request, and has created none of its sequences."""

    first_seq_key: int
    error: QuireError
    retry_after_s: float
    """Seconds to wait before a retry, if the error is retryable."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence has left the queue."""

    seq_key: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log-probabilities of a part of a sequence's prompt."""

    seq_key: int
    position: int
    """The index, in the prompt, of the part's first token."""
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """A sequence's prompt has been pinned in the prefix cache."""

    seq_key: int
    num_pinned_tokens: int


@dataclass(frozen=True, slots=True)
class Ending:
    """A sequence has ended; its last tokens are in the same message."""

    seq_key: int
    reason: FinishReason
    stop_token_id: int | None
    error: OutputError | None
    cumulative_logprob: float | None = None
    """The sum of the tokens' log-probabilities, set only for outputs of a beam search."""


@dataclass(frozen=True, slots=True)
class QueueRoom:
    """The room in the scheduler's queues."""

    num_seqs: int | None
    """How many sequences may be submitted; None: no limit."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """The events of one step for this router's sequences. None in a field: no change."""

    seq_keys: list[int]
    token_ids: list[int]
    """The token of each sequence in `seq_keys`, at the same index."""
    logprobs: Mapping[int, TokenLogprob]
    """The log-probabilities of some tokens, by the index in `token_ids`."""
    prompt_scores: tuple[PromptPart, ...]
    admissions: tuple[Admitted, ...]
    pins: tuple[Pin, ...]
    vectors: Mapping[int, bytes]
    """Maps the keys of sequences to their embeddings or scores (float32, little-endian). A message
    also has a token and an end for each of these sequences, which the router ignores."""
    endings: tuple[Ending, ...]
    room: QueueRoom | None = None
    max_model_len: int | None = None
    """The new limit on tokens of prompt and output together."""
    adapters: tuple[LoraAdapter, ...] | None = None
    """The adapters that requests may name from now on."""
    is_unloaded: bool | None = None
    """Whether no worker is attached, and the model of at least one worker is unloaded. If true,
    requests wait."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """A resumed request, which this router owns from now on."""

    record: ReplayRecord
    """The request as it was submitted, but with this router's keys and without the deadline."""
    stop_options: StopOptions
    n: int
    so_far: StepEvents
    """All events of the request so far."""


SchedulerMessage: TypeAlias = Welcome | StepEvents | Refusal | Resumption
