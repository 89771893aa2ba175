"""Requests of clients: to generate, or to resume a stream; and the models that they may name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from contract.lora import LoraAdapter
from contract.pooling import ONLY_GENERATES, Abilities
from contract.sampling import BeamSearch, SamplingParams

MAX_REQUEST_ID_CHARS: Final = 128
MAX_CACHE_SALT_CHARS: Final = 128
MAX_CACHE_PIN_S: Final = 86400
MAX_TENANT_CHARS: Final = 128
MAX_PRIORITY: Final = 100
"""Largest absolute value."""
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 1024
MAX_N: Final = 64
"""Most outputs of one request."""
MAX_STREAM_INTERVAL: Final = 1024
MAX_MESSAGES: Final = 4096
"""Most messages of a chat."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model or LoRA adapter that requests may name."""

    id: str
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    structured_output: bool = False
    """Whether requests may set `SamplingParams.structured`."""
    parent: str = ""
    """The base model of an adapter; empty for a base model."""
    adapter: LoraAdapter | None = None
    """The adapter; None for a base model, and at clients."""
    abilities: Abilities = ONLY_GENERATES

    @property
    def max_prompt_len(self) -> int:
        """Most tokens of a prompt: one less, if an output needs room for one."""
        return self.max_model_len - self.abilities.generates


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and how to continue it. Every API of the router turns its calls into this."""

    prompt: str | tuple[int, ...]
    """Text or token ids."""
    pair: str | None = None
    """The second text of a pair to score; `prompt` is the first."""
    model: str = ""
    """Empty: the served model, without an adapter."""
    request_id: str = ""
    """Empty: the router chooses one."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    add_special_tokens: bool = True
    """Whether the tokenizer adds special tokens to a text prompt; False after a chat template,
    which has written them."""
    skip_special_tokens: bool = True
    """Whether the text of outputs leaves out special tokens."""
    n: int = 1
    beam: BeamSearch | None = None
    """Set: search for the outputs instead of drawing them."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    cache_pin_s: float | None = None
    """How long the prompt stays pinned in the prefix cache; None: it is not pinned."""
    deadline: float | None = None
    """When the client stops waiting, on the event loop's clock; None: never."""
    priority: int = 0
    """Requests with a higher priority go first, if the scheduler's policy uses priorities."""
    tenant: str = ""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens at the prompt's end; -1: as many as leave room for `max_tokens`. For a
    vector, keep them at the prompt's beginning; in a pair of texts, cut the second one."""
    cuts_max_tokens: bool = False
    """Whether a `max_tokens` for which the context has no room is lowered to what fits."""
    bad_words: tuple[str, ...] = ()
    """Texts that outputs must not contain."""
    before_form: str = ""
    """Grammar rules in Lark's syntax, one of them named `before`: what an output has before its
    structured part, such as thinking. Empty: nothing."""
    thinking: "ThinkingMarkers | None" = None
    """How thinking is told from the rest, to count it; None: there is none."""
    resumable: bool = False
    """Whether the request continues when its stream breaks, so that the client may resume it."""
    stream_interval: int | None = None
    """New tokens of an output that go out together; None: as the router is set."""


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """What begins and ends thinking in an output's text."""

    begin: str
    ends: tuple[str, ...]
    """At least one."""
    has_begun: bool = False
    """Whether the prompt ends within thinking."""
    recurs: bool = False
    """Whether it may begin anywhere, and again; else only at the output's start."""


@dataclass(frozen=True, slots=True)
class StopOptions:
    """How the outputs' text ends, is written, counted and streamed.

    It travels in the record of a resumable request, so that another router can finish the text.
    """

    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    thinking: ThinkingMarkers | None = None
    stream_interval: int = 1


@dataclass(frozen=True, slots=True)
class OutputReceived:
    """How much of one output the client has when it resumes a request."""

    num_tokens: int = 0
    num_text_bytes: int = 0
    """Length of the text in UTF-8."""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """A client's request for the rest of a broken stream."""

    request_id: str
    tenant: str
    received: Mapping[int, OutputReceived]
    """By output index. The client has nothing of an output that is absent."""
    has_prompt_scores: bool
    deadline: float | None
    """As in `GenerateRequest`."""
