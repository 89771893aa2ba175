"""What a client asks for: to generate, or to resume a stream; and the models that it may name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from contract.lora import LoraAdapter
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


@dataclass(frozen=True, slots=True)
class Model:
    """A model, or a LoRA adapter of it, that requests may name."""

    id: str
    max_model_len: int
    """Most tokens that prompt and output may have together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    structured_output: bool = False
    """Whether `SamplingParams.structured` can be used."""
    parent: str = ""
    """If it is an adapter: the model that it belongs to."""
    adapter: LoraAdapter | None = None
    """If it is an adapter; known to the router only."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and how to continue it: what every API of the router makes of its calls."""

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
    """Whether text gets the model's own special tokens; False behind a chat template."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the outputs' text."""
    n: int = 1
    beam: BeamSearch | None = None
    """Search for the outputs instead of drawing them."""
    cache_salt: str = ""
    """Only requests with the same salt share prefixes in the cache."""
    cache_pin_s: float | None = None
    """How long the prompt is pinned in the prefix cache; None: not at all."""
    deadline: float | None = None
    """When the client gives up, on the event loop's clock; None: never."""
    priority: int = 0
    """Higher is sooner."""
    tenant: str = ""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens at the prompt's end; -1: as many as leave room for `max_tokens`."""
    bad_words: tuple[str, ...] = ()
    """Texts that outputs must not contain."""
    before_form: str = ""
    """Rules, of which `before` is what outputs have before `sampling.structured`."""
    resumable: bool = False
    """Whether it outlives its stream, so that its client may resume it."""


@dataclass(frozen=True, slots=True)
class StopOptions:
    """What a request says of its outputs' text; only the router needs it."""

    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class OutputReceived:
    """How much of one output a client has when it resumes the request."""

    num_tokens: int = 0
    num_text_bytes: int = 0
    """UTF-8."""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Asks for the rest of a stream that broke."""

    request_id: str
    tenant: str
    received: Mapping[int, OutputReceived]
    """By output index; outputs that are absent: nothing."""
    has_prompt_scores: bool
    deadline: float | None
    """As in `GenerateRequest`."""
