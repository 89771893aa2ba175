"""What every face of the router turns its calls into, and what it answers from.

A face (gRPC, OpenAI over HTTP) makes a `GenerateRequest`, hands it to `Inference.generate` and gets
an asynchronous stream of events: deltas of each output, one `OutputFinished` for each, then one
`Usage`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias


class FinishReason(Enum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class StructuredForm(Enum):
    """A kind of form that an output may have to have; the values are the contract's field names."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must have; see `quire.v1.StructuredOutput`."""

    form: StructuredForm
    texts: tuple[str, ...] = ()
    """The choices; the one text that tells the form; none for JSON_OBJECT."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter of the model; see `quire.v1.LoraAdapter`."""

    name: str
    """What requests call it."""
    digest: bytes
    """Tells its contents from all others."""
    directory: str = field(default="", compare=False)
    """Where the workers find it; empty: not known. Requests do not tell it."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What was loaded."""

    adapter: LoraAdapter
    was_there: bool
    """Whether it had been loaded before."""


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """An adapter that a scheduler's workers hold."""

    adapter: LoraAdapter
    is_leaving: bool
    """Whether it is being unloaded."""


@dataclass(frozen=True, slots=True)
class UnloadedWorker:
    """A worker without a model."""

    worker: str
    """Its target, as its scheduler knows it."""
    was_unloaded: bool
    """Whether it was so before."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a worker is with its model; see `quire.v1.LoadResponse`."""

    worker: str
    """Its target, as its scheduler knows it."""
    status: str
    progress: float | None
    is_done: bool
    was_loaded: bool
    """Whether it was there already."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when an output ends: each field as in `quire.v1.SamplingParams`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    structured: StructuredOutput | None = None
    prompt_logprobs: int | None = None
    adapter: LoraAdapter | None = None
    """That of the request's model: set by the router, not by a face."""


class EarlyStopping(Enum):
    """When a beam search stops before its end: see `quire.v1.EarlyStopping`."""

    HEURISTIC = "heuristic"
    WHEN_FULL = "when_full"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """A search for the likeliest outputs: each field as in `quire.v1.BeamSearch`."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and how to continue it, as a face received it: not yet validated."""

    prompt: str | tuple[int, ...]
    """Text, or token ids."""
    model: str = ""
    """Empty: the only model served."""
    request_id: str = ""
    """Empty: the router makes one."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    add_special_tokens: bool = True
    """Whether text gets the model's own special tokens; False after a chat template."""
    skip_special_tokens: bool = True
    n: int = 1
    beam: BeamSearch | None = None
    """Search for the outputs instead of drawing them."""
    cache_salt: str = ""
    cache_pin_s: float | None = None
    """How long the prompt stays in the prefix cache, whatever else is evicted; None: as others."""
    deadline: float | None = None
    """When the client gives up, on the event loop's clock; None: never."""
    priority: int = 0
    """Higher is sooner."""
    tenant: str = ""
    """Whom the request is for."""
    resumable: bool = False
    """Whether it outlives its stream, so that its client may resume it."""


@dataclass(frozen=True, slots=True)
class TextTerms:
    """What a request says of its outputs' text, which the scheduler never sees."""

    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class OutputReceived:
    """What a client has of one output of a request that it resumes."""

    num_tokens: int = 0
    num_text_bytes: int = 0
    """UTF-8."""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Asks for the rest of a stream that broke: not yet validated."""

    request_id: str
    tenant: str
    received: Mapping[int, OutputReceived]
    """By output index; of others, nothing."""
    has_prompt_scores: bool
    deadline: float | None
    """As in `GenerateRequest`."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one produced token, and of the likeliest at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Token id and log-probability, best first."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New tokens of one output and the text that has become certain with them."""

    output_index: int
    token_offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputError:
    """A failure after acceptance."""

    code: int
    """A google.rpc.Code."""
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """The end of one output; nothing of it follows."""

    output_index: int
    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    error: OutputError | None = None
    cumulative_logprob: float | None = None
    """Of an output that a beam search found."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the request cost; the last event."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    pinned_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What the model makes of the prompt; the first event, if it was asked for."""

    logprobs: tuple[TokenLogprob, ...]
    """Of each token of the prompt but the first."""


Event: TypeAlias = OutputDelta | OutputFinished | Usage | PromptScores


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model that is served, with the limits that requests are checked against."""

    id: str
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    structured_output: bool = False
    """Whether an output can be made to have a form."""
    parent: str = ""
    """If it is a LoRA adapter: the model that it belongs to; empty: it is none."""
    adapter: LoraAdapter | None = None
    """What the scheduler is told to compute it with."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the scheduler is; see `quire.v1.Load`."""

    num_requests_running: int
    num_requests_waiting: int
    max_num_seqs: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    block_size: int
    num_workers: int
    num_requests_swapped: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_cached_host_blocks: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_demoted_blocks: int
    num_promoted_blocks: int
    num_pinned_blocks: int
    num_moved_blocks: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    fragmentation: float
    host_fragmentation: float
    num_slots_held: int
    num_slots_written: int
    num_disk_blocks: int
    num_free_disk_blocks: int
    num_cached_disk_blocks: int
    num_stored_blocks: int
    num_loaded_blocks: int
    num_failed_disk_moves: int
    num_spilled_blocks: int
    num_unloaded_workers: int
