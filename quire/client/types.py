"""Types of the Python client's arguments and results; most come from `contract`."""

from dataclasses import dataclass
from typing import Literal, TypedDict

from contract.arrays import Float32Array
from contract.outputs import (
    Event,
    FinishReason,
    OutputDelta,
    OutputError,
    OutputFinished,
    PromptScores,
    TokenLogprob,
    Usage,
)
from contract.pooling import PoolingKind
from contract.request import Model
from contract.sampling import BeamSearch, SamplingParams, StructuredOutput
from quire.v1.common_pb2 import Load

__all__ = [
    "DEFAULT_SAMPLING",
    "BeamSearch",
    "ChatMessage",
    "Completion",
    "EmbedOptions",
    "Embeddings",
    "Event",
    "FinishReason",
    "GenerateOptions",
    "Load",
    "Model",
    "Output",
    "OutputDelta",
    "OutputError",
    "OutputFinished",
    "PromptScores",
    "SamplingParams",
    "StructuredOutput",
    "TokenLogprob",
    "Usage",
]

DEFAULT_SAMPLING = SamplingParams()


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate`: fields of `contract.request.GenerateRequest`."""

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
    stream_interval: int | None


@dataclass(frozen=True, slots=True)
class Output:
    """One complete output."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finished: OutputFinished

    @property
    def finish_reason(self) -> FinishReason:
        """Why the output ended."""
        return self.finished.finish_reason


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete answer to one prompt; `outputs[i]` is the output with index i."""

    request_id: str
    outputs: tuple[Output, ...]
    usage: Usage
    prompt: PromptScores | None = None


class EmbedOptions(TypedDict, total=False):
    """The keyword arguments of `embed`.

    If `pooling` or `normalize` is None, the model's default applies.
    """

    model: str
    pooling: PoolingKind | Literal["last", "mean", "cls"] | None
    normalize: bool | None
    dimensions: int | None
    truncate_prompt_tokens: int | None
    """Cut an input after this many tokens; -1: after as many tokens as the model takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The embeddings of some inputs."""

    vectors: Float32Array
    """float32[number of inputs, size]."""
    usage: Usage


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat; `role` is "system", "user" or "assistant"."""

    role: str
    content: str
