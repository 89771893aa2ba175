"""What the Python client takes and gives: plain values, no protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, TypeAlias, TypedDict


class FinishReason(StrEnum):
    """Why an output ended; equal to its name as text: "stop"."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must have: exactly one is set; see `quire.v1.StructuredOutput`."""

    json_schema: str | Mapping[str, object] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when an output ends; see `quire.v1.SamplingParams` for each field.

    None is the service's own default.
    """

    temperature: float | None = None
    top_k: int = 0
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
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


DEFAULT_SAMPLING = SamplingParams()
"""As the service likes."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """A search for the likeliest outputs; see `quire.v1.BeamSearch` for each field."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    """As `transformers` has it."""


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate`; see `quire.v1.GenerateRequest` for each."""

    model: str
    n: int
    beam: BeamSearch | None
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    cache_salt: str
    cache_pin_s: float | None
    request_id: str
    resumable: bool


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one produced token, and of the likeliest at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Token id and log-probability, best first."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New tokens of one output, and the text that has become certain with them."""

    output_index: int
    token_offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class OutputError:
    """A failure of one output after its request was accepted."""

    code: int
    """The google.rpc.Code that the call would have ended with, had it not been accepted yet."""
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """The end of one output."""

    output_index: int
    finish_reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    error: OutputError | None = None
    cumulative_logprob: float | None = None
    """Of an output that a beam search found: the sum of its tokens' log-probabilities."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost, in tokens; the last event of a stream."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    pinned_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What the model makes of the prompt; the first event, if `prompt_logprobs` is set."""

    logprobs: tuple[TokenLogprob, ...]
    """Of each token of the prompt but the first."""


Event: TypeAlias = OutputDelta | OutputFinished | Usage | PromptScores


@dataclass(frozen=True, slots=True)
class Output:
    """One complete output."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finished: OutputFinished

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.finished.finish_reason


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete outputs of one prompt, by output index."""

    request_id: str
    outputs: tuple[Output, ...]
    usage: Usage
    prompt: PromptScores | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Model:
    """One model that the service offers."""

    id: str
    max_model_len: int
    """Most tokens that prompt and output may have together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    structured_output: bool = False
    """Whether `SamplingParams.structured` can be used."""
    parent: str = ""
    """If it is a LoRA adapter: the model that it belongs to."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the service is."""

    num_requests_running: int
    num_requests_waiting: int
    max_num_seqs: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    block_size: int
    num_workers: int
    num_requests_swapped: int = 0
    """Those of `num_requests_waiting` whose KV is on the host or the disk."""
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_cached_host_blocks: int = 0
    num_pinned_blocks: int = 0
    num_moved_blocks: int = 0
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    fragmentation: float = 0.0
    """1 - longest run of free device blocks / free device blocks."""
    host_fragmentation: float = 0.0
    num_slots_held: int = 0
    """Token slots of the running sequences' device blocks."""
    num_slots_written: int = 0
    num_disk_blocks: int = 0
    """0: there is no disk tier."""
    num_free_disk_blocks: int = 0
    num_cached_disk_blocks: int = 0
    num_swapped_out_blocks: int = 0
    """Blocks copied from device to host since the start, demoted ones included."""
    num_swapped_in_blocks: int = 0
    num_stored_blocks: int = 0
    """Blocks stored on the disk since the start."""
    num_loaded_blocks: int = 0
    num_unloaded_workers: int = 0
    """Workers whose model is unloaded; they are not among `num_workers`."""
