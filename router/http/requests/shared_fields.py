"""The fields that completions and chats share, and the fields that neither of them implements.

null means unset; an unknown field or a wrong type is an error that names the field. A field of
OpenAI or vLLM that Quire does not implement is refused by name, unless its value has no effect
(`echo: false`). `Inference.generate` checks for every API whether the values are in their ranges,
except a few that are checked here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from contract.errors import InvalidArgumentError
from contract.request import MAX_CACHE_PIN_S, GenerateRequest
from contract.sampling import MAX_LOGIT_BIAS_ENTRIES, SamplingParams
from router.http.answers.answer import UsageInStream
from router.http.answers.objects import TokenText
from router.http.errors import REQUEST_ID_PATTERN
from router.http.requests.beam import BeamFields
from router.http.requests.structured import StructuredFields
from router.http.strict_json import Listed, Schema, at_most, excerpt
from router.request.model_text import ModelText

Prompt: TypeAlias = str | tuple[int, ...]
"""Text, or token ids."""

MAX_TOKEN_ID_DIGITS = 10

MAX_METADATA = 16
"""Limit on the entries of `metadata`, as in OpenAI's API."""

NO_EFFECT = frozenset({"user", "safety_identifier", "metadata"})
"""Fields that are accepted but have no effect, because they only label calls. OpenAI stores
`metadata` with a completion; Quire stores no completions, and refuses `store: true`."""

CacheRetention: TypeAlias = Literal["in_memory", "in-memory", "24h"]
SESSION_PIN_S: Final = 300.0
"""How many seconds a prompt stays pinned, so that the conversation's next turn finds its KV after a
tool has run or the user has read the answer. The value is the shorter one of Anthropic's two
`ttl`s. OpenAI keeps prompts in memory for about as long."""


def session_pin_s(*, is_session: bool, retention: CacheRetention | None) -> float | None:
    """Return how long to pin a turn's prompt; None: do not pin it.

    Args:
        is_session: Whether the client marks the turn as part of a longer conversation.
        retention: How long the client asks to keep the prompt in the prefix cache.
    """
    if retention == "24h":
        return float(MAX_CACHE_PIN_S)
    return SESSION_PIN_S if is_session or retention is not None else None


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


RequestId: TypeAlias = Annotated[str, Field(pattern=f"^{REQUEST_ID_PATTERN}$")]
MAX_TOP_LOGPROBS: Final = 20
"""Limit on `top_logprobs` of chats and responses, as in OpenAI's API."""


class StreamOptions(Schema):
    """OpenAI's `stream_options`: what a stream has in addition to text."""

    unimplemented = MappingProxyType({"include_obfuscation": (False,)})

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """A field of vLLM: whether every event has the usage so far."""


class Body(StructuredFields, BeamFields):
    """The fields of completions and chat completions."""

    model: str = ""
    stop: Annotated[Listed[str], BeforeValidator(_listed), Field(default_factory=list)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""
    safety_identifier: str = ""
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA), Field(default_factory=dict)]
    prompt_cache_key: str = ""
    prompt_cache_retention: CacheRetention | None = None

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Annotated[
        dict[str, float], at_most(MAX_LOGIT_BIAS_ENTRIES), Field(default_factory=dict)
    ]

    # These fields are not OpenAI's; clients of vLLM send them.
    request_id: RequestId | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: Annotated[Listed[int], Field(default_factory=list)]
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    allowed_token_ids: Annotated[Listed[int], Field(min_length=1)] | None = None
    bad_words: Annotated[Listed[str], Field(default_factory=list)]
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Whether log-probabilities name a token by its id, as token_id:7."""

    # Quire extensions.
    cache_pin_s: float | None = None
    stream_interval: int | None = None
    """How many new tokens to send at once; in vLLM, this is a flag of the server."""

    @property
    def usage_in_stream(self) -> UsageInStream:
        """Where a stream reports the usage."""
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats:
            return UsageInStream.ALWAYS
        return UsageInStream.AT_END if options.include_usage else UsageInStream.NEVER

    def check(self) -> None:
        """Check fields against each other; may raise InvalidArgumentError."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", "is set; it needs stream to be true")
        if self.stream_interval is not None and not self.stream:
            raise InvalidArgumentError("stream_interval", "is set; it needs stream to be true")
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats and not options.include_usage:
            raise InvalidArgumentError(
                "stream_options.continuous_usage_stats", "is true; it needs include_usage"
            )

    def to_request(
        self, prompt: Prompt, *, request_id: str, sampling: SamplingParams, add_special_tokens: bool
    ) -> GenerateRequest:
        """Make the request for one prompt of the call."""
        return GenerateRequest(
            prompt=prompt,
            model=self.model,
            request_id=request_id,
            sampling=sampling,
            stop=tuple(self.stop),
            include_stop_str_in_output=self.include_stop_str_in_output,
            add_special_tokens=add_special_tokens,
            skip_special_tokens=self.skip_special_tokens,
            n=self.n,
            beam=self.beam(),
            cache_salt=self.cache_salt,
            cache_pin_s=session_pin_s(
                is_session=bool(self.prompt_cache_key), retention=self.prompt_cache_retention
            )
            if self.cache_pin_s is None
            else self.cache_pin_s,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            bad_words=tuple(self.bad_words),
            stream_interval=self.stream_interval,
        )

    def shown_tokens(self, text: ModelText) -> TokenText:
        """Return a function from a token id to the text that log-probabilities show for the id."""
        return _token_by_id if self.return_tokens_as_token_ids else text.token_text

    def sampling(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Make sampling parameters.

        The arguments are fields that chats and completions name differently.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k,  # -1 means all in vLLM
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            logit_bias={_parse_token_id(key): bias for key, bias in self.logit_bias.items()},
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            structured=self.structured(),
        )


def _token_by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _parse_token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= MAX_TOKEN_ID_DIGITS):
        raise InvalidArgumentError(
            "logit_bias", f"has the key {excerpt(key)}; each key must be a token id"
        )
    return int(key)


UNIMPLEMENTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "spaces_between_special_tokens": (True,),
        "priority": (0,),
    }
)
"""Maps each field that completions and chats do not implement to its accepted values, which have no
effect."""
