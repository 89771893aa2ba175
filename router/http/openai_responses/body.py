"""POST /v1/responses: the body, and its conversion to a chat."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, InstanceOf, SerializeAsAny

from contract.errors import InvalidArgumentError
from contract.request import GenerateRequest
from contract.sampling import SamplingParams, StructuredOutput
from router.http.answers.objects import Json
from router.http.openai_responses.items import Item, messages_of, parse_items
from router.http.openai_responses.tools import ResponseTools
from router.http.requests.chat_words import ChatWords
from router.http.requests.conversation import Conversation, Effort
from router.http.requests.shared_fields import (
    MAX_METADATA,
    MAX_TOP_LOGPROBS,
    CacheRetention,
    session_pin_s,
)
from router.http.requests.structured import JsonSchema
from router.http.strict_json import Listed, Schema, at_most

FIELD_TO_JSON: Final[Mapping[str, str]] = MappingProxyType(
    {
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "structured.json_schema": "text.format.schema",
        "structured.grammar": "tools",
    }
)
"""Maps a request's fields to their names in the JSON, if these differ."""


class ReasoningOptions(Schema):
    """How much to think, and how to show it."""

    unimplemented = MappingProxyType(
        {"generate_summary": ("auto", "concise", "detailed"), "context": ("auto",)}
    )

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Has no effect, because thinking is shown whole."""
    max_tokens: Annotated[int, Field(ge=0, le=2**20)] | None = None
    """A field of OpenRouter: the limit on thinking tokens."""


class TextFormat(Schema):
    """The form that the text must follow."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool = True
    """Ignored: every schema is followed strictly."""

    def form(self) -> StructuredOutput | None:
        """Return the form; None: any text. Raises InvalidArgumentError if the schema is missing."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutput(json_object=True)
        if not isinstance(self.schema_, dict):
            raise InvalidArgumentError(
                "text.format.schema", 'is not an object; with type "json_schema" it must be one'
            )
        return StructuredOutput(json_schema=self.schema_)


class TextOptions(Schema):
    """Options of the text."""

    unimplemented = MappingProxyType({"verbosity": ("medium",)})

    format: TextFormat = TextFormat.model_validate({})


class StreamOptions(Schema):
    """Options of the stream; none has an effect."""

    unimplemented = MappingProxyType({"include_obfuscation": (False,)})


class ResponseBody(ResponseTools):
    """POST /v1/responses."""

    unimplemented = MappingProxyType(
        {
            "access_programs": (),
            "background_options": (),
            "context_management": ([],),
            "conversation": (),
            "image": (),
            "max_tool_calls": (),
            "moderation": (),
            "prompt": (),
            "prompt_cache_options": (),
            "service_tier": ("auto", "default"),
        }
    )

    model: str = ""
    input: Annotated[list[SerializeAsAny[InstanceOf[Schema]]], BeforeValidator(parse_items)]
    instructions: str = ""
    previous_response_id: str | None = None
    store: bool | None = None
    """Whether to store the response; None: store it if the router stores responses."""
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    reasoning: ReasoningOptions = ReasoningOptions.model_validate({})
    text: TextOptions = TextOptions.model_validate({})
    truncation: Literal["auto", "disabled"] = "disabled"
    include: Annotated[
        Listed[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
        Field(default_factory=list),
    ]
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA), Field(default_factory=dict)]
    user: str = ""
    safety_identifier: str = ""
    client_metadata: Annotated[dict[str, Any], at_most(MAX_METADATA), Field(default_factory=dict)]
    """Labels that Codex sends; they have no effect."""
    prompt_cache_key: str = ""
    prompt_cache_retention: CacheRetention | None = None

    # These fields are vLLM's, not OpenAI's.
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    cache_salt: str = ""

    @property
    def items(self) -> Sequence[Item]:
        """The items of the field `input`."""
        return self.input  # type: ignore[return-value] # `parse_items` makes no others

    @property
    def has_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include

    @property
    def seals_thinking(self) -> bool:
        """Whether reasoning items have `encrypted_content`, which clients can send back."""
        return "reasoning.encrypted_content" in self.include

    def check(self) -> None:
        """Check fields against each other; may raise InvalidArgumentError."""
        self.check_tools()
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", "is set; it needs stream to be true")
        if self.top_logprobs and not self.has_logprobs:
            raise InvalidArgumentError(
                "top_logprobs",
                f'is {self.top_logprobs}; it needs "message.output_text.logprobs" in include',
            )
        if self.background and self.store is False:
            raise InvalidArgumentError("background", "is true; it needs store, which is false")

    def conversation(self, earlier: Sequence[Item] = ()) -> Conversation:
        """Return the chat: `earlier` items, then the input; may raise InvalidArgumentError."""
        return Conversation(
            model=self.model,
            messages=messages_of(self.instructions, [*earlier, *self.items], len(earlier)),
            tools=self.tool_fields(),
            form=self.text.format.form(),
            thinking_budget=self.reasoning.max_tokens,
            effort=self.reasoning.effort,
            words=ChatWords(
                forms=FIELD_TO_JSON,
                path=self.function_paths.__getitem__,
                thinking="reasoning.max_tokens",
            ),
        )

    def request(self, prompt: str, request_id: str) -> GenerateRequest:
        """Return the request for a prompt, without what `OutputPlan.applied_to` adds to it."""
        return GenerateRequest(
            prompt=prompt,
            model=self.model,
            request_id=request_id,
            sampling=SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=0 if self.top_k == -1 else self.top_k,  # -1 means all in vLLM
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                seed=self.seed,
                max_tokens=self.max_output_tokens,
                ignore_eos=self.ignore_eos,
                logprobs=self.top_logprobs if self.has_logprobs else None,
            ),
            add_special_tokens=False,  # the template has written the special tokens
            cache_salt=self.cache_salt,
            cache_pin_s=session_pin_s(
                is_session=bool(self.previous_response_id or self.prompt_cache_key),
                retention=self.prompt_cache_retention,
            ),
        )

    def shown(self, *, model: str, store: bool) -> Json:
        """Return the fields of the body that the response repeats."""
        form = self.text.format
        text: Json = {"type": form.type}
        if form.type == "json_schema":
            text |= {
                "name": form.name,
                "schema": form.schema_,
                "strict": True,
                "description": form.description or None,
            }
        return {
            "background": self.background,
            "instructions": self.instructions or None,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata,
            "model": model,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key or None,
            "reasoning": {
                "effort": self.reasoning.effort,
                "summary": self.reasoning.summary,
            },
            "safety_identifier": self.safety_identifier or None,
            "service_tier": "default",
            "store": store,
            "temperature": self.temperature,
            "text": {"format": text},
            "top_logprobs": self.top_logprobs,
            "top_p": self.top_p,
            "truncation": self.truncation,
            "user": self.user or None,
            **self.shown_tools(),
        }
