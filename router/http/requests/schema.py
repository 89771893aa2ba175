"""The fields that both kinds of call share, their types, and which fields are refused.

Which range a field has is checked where every face passes, behind `Inference.generate`. Here a body
gets its shape: a null counts as unset, an unknown field or a wrong type is an error that names it,
and a field of OpenAI's or vLLM's that is not implemented is refused by name, unless its value asks
for nothing (`echo: false`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field

from contract.errors import InvalidArgumentError
from contract.request import GenerateRequest
from contract.sampling import SamplingParams
from router.http.json_object import Schema
from router.http.json_text import excerpt
from router.http.requests.beam import BeamFields
from router.http.requests.structured import StructuredFields
from router.http.responses.answer import UsageInStream

Prompt: TypeAlias = str | tuple[int, ...]
"""Text, or token ids."""

MAX_TOKEN_ID_DIGITS = 10

NO_EFFECT = frozenset({"user", "safety_identifier", "metadata", "prompt_cache_key"})
"""Accepted, and of no effect on an output, nor would they have one at OpenAI.

Three are labels for records, which are not kept: `store: true` is refused. `prompt_cache_key` helps
to find a cached prefix, which is found without it.
"""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class StreamOptions(Schema):
    """What a stream carries besides the text."""

    unimplemented = MappingProxyType({"include_obfuscation": (False,)})

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's: the usage is in every event, as far as it has come."""


class Body(StructuredFields, BeamFields):
    """What both completions and chat completions take."""

    model: str = ""
    stop: Annotated[list[str], BeforeValidator(_listed), Field(default_factory=list)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""
    safety_identifier: str = ""
    metadata: Annotated[dict[str, str], Field(default_factory=dict)]
    prompt_cache_key: str = ""

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Annotated[dict[str, float], Field(default_factory=dict)]

    # Not OpenAI's, but sent by clients of vLLM.
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: Annotated[list[int], Field(default_factory=list)]
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""

    # Nobody's but ours.
    cache_pin_s: float | None = None

    @property
    def usage_in_stream(self) -> UsageInStream:
        """Where a stream tells what the request cost."""
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats:
            return UsageInStream.ALWAYS
        return UsageInStream.AT_END if options.include_usage else UsageInStream.NEVER

    def check(self) -> None:
        """Check what concerns several fields; raises InvalidArgumentError."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", "is set; it needs stream to be true")
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats and not options.include_usage:
            raise InvalidArgumentError(
                "stream_options.continuous_usage_stats", "is true; it needs include_usage to be too"
            )

    def to_request(
        self, prompt: Prompt, *, request_id: str, sampling: SamplingParams, add_special_tokens: bool
    ) -> GenerateRequest:
        """The request for one prompt of the call."""
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
            cache_pin_s=self.cache_pin_s,
        )

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """How tokens are drawn, given what the two kinds of body say in different words."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k,  # -1 is vLLM's way to say all
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
            structured=self.structured(),
        )


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
        "truncate_prompt_tokens": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "priority": (0,),
    }
)
"""Of both kinds of call: fields that are refused by name, with the values that ask for nothing."""
