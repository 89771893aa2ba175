"""What a scheduler tells a router on their stream."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from contract.errors import QuireError
from contract.lora import LoraAdapter
from contract.outputs import FinishReason, OutputError, TokenLogprob
from contract.request import StopOptions
from router.request.live import ReplayRecord


@dataclass(frozen=True, slots=True)
class SchedulerModel:
    """The model that the scheduler's workers hold."""

    id: str
    """What the workers call it; clients may know it by another name, the router's."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    structured_output: bool = False
    adapters: tuple[LoraAdapter, ...] = ()
    directory: str = ""
    """Where it is, if its workers were told to load it; empty: it is that of the flags."""

    def __str__(self) -> str:
        """Names it as far as it is shown where two differ."""
        if not self.adapters:
            return f"{self.id!r} from {self.directory}" if self.directory else repr(self.id)
        names = ", ".join(f"{a.name!r} {a.digest.hex()[:8]}" for a in self.adapters)
        return f"{self.id!r} with LoRA adapters {names}"

    def can_continue(self, other: "SchedulerModel") -> bool:
        """Whether this is `other` again, as far as a router can tell: its outputs can go on.

        Those of an adapter that has gone or changed cannot: the scheduler refuses them one by one.
        """
        return self.can_stand_beside(replace(other, adapters=self.adapters))

    def can_stand_beside(self, other: "SchedulerModel") -> bool:
        """Whether a router may send any request to either that both have the adapter of."""
        one, two = (replace(each, max_model_len=0, adapters=()) for each in (self, other))
        name_to_digest = {each.name: each.digest for each in self.adapters}
        return one == two and all(
            name_to_digest.get(each.name, each.digest) == each.digest for each in other.adapters
        )


@dataclass(frozen=True, slots=True)
class Welcome:
    """The scheduler knows its model: requests may come."""

    epoch: int
    model: SchedulerModel
    resume_grace_s: float
    """For how long a request runs on that its client has left, to be resumed."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request is not taken; none of its sequences exists."""

    first_seq_key: int
    error: QuireError
    retry_after_s: float
    """When it may be worth another try, if it ever is."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence left the queue."""

    seq_key: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log-probabilities of a part of a sequence's prompt."""

    seq_key: int
    position: int
    """Of the first token told of, in the prompt."""
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """A sequence's prompt stays in the prefix cache, as its request wanted."""

    seq_key: int
    num_pinned_tokens: int


@dataclass(frozen=True, slots=True)
class Ending:
    """A sequence ended; its last tokens are in the same news."""

    seq_key: int
    reason: FinishReason
    stop_token_id: int | None
    error: OutputError | None
    cumulative_logprob: float | None = None
    """Of an output that a beam search found."""


@dataclass(frozen=True, slots=True)
class QueueRoom:
    """How much room the queues have."""

    num_seqs: int | None
    """Sequences that may be submitted; None: as many as may be."""


@dataclass(frozen=True, slots=True)
class StepNews:
    """What one step produced for this router's sequences."""

    seq_keys: list[int]
    token_ids: list[int]
    """Parallel to `seq_keys`."""
    logprobs: Mapping[int, TokenLogprob]
    """By place in `token_ids`."""
    prompt_scores: tuple[PromptPart, ...]
    admissions: tuple[Admission, ...]
    pins: tuple[Pin, ...]
    endings: tuple[Ending, ...]
    room: QueueRoom | None = None
    """None: no news of that."""
    max_model_len: int | None = None
    """Most tokens of prompt and output from now on; None: as before."""
    adapters: tuple[LoraAdapter, ...] | None = None
    """Those that requests may have from now on; None: as before."""
    is_unloaded: bool | None = None
    """Whether no worker has its model, so that requests wait; None: as before."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """A request that is this router's from now on."""

    record: ReplayRecord
    """As it was submitted, under the keys that this router gave it; its deadline is not known."""
    stop_options: StopOptions
    n: int
    so_far: StepNews
    """All that came of it."""


News: TypeAlias = Welcome | StepNews | Refusal | Resumption
