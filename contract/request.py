"""Clients' requests, to generate or to resume a stream, and the models that requests may name."""

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
"""The largest absolute value of a priority."""
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 1024
MAX_N: Final = 64
"""The limit on outputs of one request."""
MAX_STREAM_INTERVAL: Final = 1024
MAX_MESSAGES: Final = 4096
"""The limit on messages of a chat."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model or LoRA adapter that requests may name."""

    id: str
    max_model_len: int
    """The limit on tokens of prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    structured_output: bool = False
    """Whether requests may set `SamplingParams.structured`."""
    parent: str = ""
    """The base model of an adapter; empty for a base model."""
    adapter: LoraAdapter | None = None
    """The LoRA adapter. None for a base model; in the Python client always None."""
    abilities: Abilities = ONLY_GENERATES

    @property
    def max_prompt_len(self) -> int:
        """The limit on tokens of a prompt: `max_model_len`, less one if the model generates."""
        return self.max_model_len - self.abilities.generates


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and how to continue it. Every API of the router converts calls to this class."""

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
    """Whether the tokenizer adds special tokens to a text prompt. False for a text that a chat
    template has made, because the template adds special tokens itself."""
    skip_special_tokens: bool = True
    """Whether the text of outputs leaves out special tokens."""
    n: int = 1
    beam: BeamSearch | None = None
    """If set, the outputs come from a beam search instead of sampling."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    cache_pin_s: float | None = None
    """How long the prompt stays pinned in the prefix cache; None: the prompt is not pinned."""
    deadline: float | None = None
    """When the client stops waiting, on the event loop's clock; None: never."""
    priority: int = 0
    """If the scheduler's policy uses priorities, requests with a higher priority go first. If the
    policy does not, requests with priority -100 go last."""
    tenant: str = ""
    truncate_prompt_tokens: int | None = None
    """How many of the prompt's last tokens are used. None: the whole prompt is used; -1: as many
    tokens as leave room for `max_tokens`. A request for an embedding or a score uses the first
    tokens instead; with a pair of texts, the second text is cut."""
    cuts_max_tokens: bool = False
    """Whether `max_tokens` is lowered if it does not fit the context."""
    bad_words: tuple[str, ...] = ()
    """Texts that outputs must not contain."""
    before_form: str = ""
    """Grammar rules, in Lark's syntax, for the part of an output that comes before the structured
    part, such as thinking. The main rule has the name `before`. Empty: there is no such part."""
    thinking: "ThinkingMarkers | None" = None
    """The markers by which the tokens of thinking are counted; None: the model does not think."""
    resumable: bool = False
    """Whether the request continues when its stream breaks, so that the client may resume it."""
    stream_interval: int | None = None
    """How many new tokens of an output are sent together; None: the router's setting."""


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """The texts that begin and end thinking in an output."""

    begin: str
    ends: tuple[str, ...]
    """One or more texts, each of which ends thinking."""
    has_begun: bool = False
    """Whether thinking has already begun at the end of the prompt."""
    recurs: bool = False
    """Whether thinking may begin anywhere and several times; otherwise only at the output's
    start."""


@dataclass(frozen=True, slots=True)
class StopOptions:
    """How outputs become text and are streamed: stop strings, special tokens, thinking.

    The record of a resumable request contains these options, so another router can continue the
    text.
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
    """What the client has of each output, by the output's index. An output that is absent from the
    mapping has not reached the client at all."""
    has_prompt_scores: bool
    """Whether the client has all scores of the prompt (`PromptScores`)."""
    deadline: float | None
    """As in `GenerateRequest`."""
