"""Converts text and chats to token ids and back, in threads and with limits on size."""

import functools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from contract.errors import InvalidArgumentError, UnimplementedError
from contract.request import GenerateRequest, Model
from contract.sampling import StructuredOutput
from contract.value_checks import check_count, check_token_ids
from router.parsers.choosing import OutputParsers, choose_parsers
from router.schedulers.served_model import ServedModel
from router.text.chat_settings import ChatSettings
from router.text.chat_template import ChatTemplate
from router.text.detokenizer import Detokenizer
from router.text.fair_threads import TextThreads
from router.text.infill import infill
from router.text.size_limits import check_chat, check_text
from router.text.structured_output import to_grammar, without_words
from router.text.tokenizer import Tokenizer, Tokenizers

T = TypeVar("T")

MAX_QUESTIONS: Final = 16
"""Maximum number of pending calls of /tokenize and /detokenize."""


MAX_ANSWERED: Final = 2**17
"""Maximum number of tokens in an answer that lists tokens, unless the model's context is longer.
The event loop writes the answer, which takes 0.1 s for a million tokens."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request's prompt as token ids, and its structured output as a grammar."""

    prompt_token_ids: "array[int]"
    """An array of int32, which may be empty."""
    structured: StructuredOutput | None
    """A structured output whose `grammar` is set; None: no grammar restricts the output."""
    num_first_tokens: int = 0
    """See `Pooling.num_first_tokens`."""


class ModelText:
    """Tokenizes and detokenizes for the served model.

    Methods that take a `model` may raise the errors of `ServedModel.info`.
    """

    def __init__(
        self,
        tokenizers: Tokenizers,
        model: ServedModel,
        *,
        num_threads: int,
        max_pending_prompts: int,
        chats: ChatSettings = ChatSettings(),  # noqa: B008 - it never changes
    ) -> None:
        """Start `num_threads` threads that tokenize prompts.

        At most `max_pending_prompts` prompts wait for a thread or are being tokenized.
        """
        self._chats = chats
        self._tokenizers = tokenizers
        self._model = model
        self._prompts = TextThreads(
            "prompt", num_threads=num_threads, max_pending=max_pending_prompts
        )
        self._questions = TextThreads("tokenize", num_threads=1, max_pending=MAX_QUESTIONS)
        """A separate thread for calls of /tokenize and /detokenize, which must not delay
        prompts."""

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._tokenizers.current

    def close(self) -> None:
        self._prompts.close()
        self._questions.close()

    @property
    def max_token_bytes(self) -> int:
        """The length in bytes of the longest token's text, but at least 1."""
        return max(1, self._tokenizer.table.max_piece_bytes)

    def max_text_bytes(self, model: Model) -> int:
        """Return an upper bound on the bytes of a text that fits the context."""
        return model.max_model_len * self.max_token_bytes

    # --- to generate ----------------------------------------------------------------------------

    async def prepare(self, request: GenerateRequest) -> PreparedRequest:
        """Tokenize the prompt and convert the structured output to a grammar, in a thread.

        Raises `InvalidArgumentError` for a malformed structured output, and `TooBusyError` if
        `max_pending_prompts` prompts are pending.
        """
        return await self._prompts.run(lambda: self._prepare(request))

    def _prepare(self, request: GenerateRequest) -> PreparedRequest:
        if request.sampling.pooling is not None:
            return self._prepare_to_pool(request)
        prompt: Sequence[int]
        if isinstance(request.prompt, str):
            prompt = self._tokenizer.encode(
                request.prompt, add_special_tokens=request.add_special_tokens
            )
        else:
            prompt = request.prompt
        if (num_kept := request.truncate_prompt_tokens) is not None:
            if num_kept == -1:
                room = self._model.info(request.model).max_model_len
                num_kept = max(1, room - (request.sampling.max_tokens or 1))
            prompt = prompt[-num_kept:]
        structured = request.sampling.structured
        if request.bad_words:
            structured = without_words(request.bad_words, self._tokenizer.added_ids)
        return PreparedRequest(
            array("i", prompt),
            None if structured is None else to_grammar(structured, request.before_form),
        )

    def _prepare_to_pool(self, request: GenerateRequest) -> PreparedRequest:
        most = request.truncate_prompt_tokens
        if most == -1:
            most = self._model.info(request.model).max_prompt_len
        if not isinstance(request.prompt, str):
            return PreparedRequest(array("i", request.prompt[:most]), None)
        token_ids, num_first = self._tokenizer.encode_whole(
            request.prompt, request.pair, most, add_special_tokens=request.add_special_tokens
        )
        return PreparedRequest(array("i", token_ids), None, num_first)

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """Make a detokenizer for one output."""
        return Detokenizer(self._tokenizer.table, skip_special_tokens=skip_special_tokens)

    def chat_template(self, model: str, source: str | None = None) -> ChatTemplate:
        """Return the template with the text `source`; if `source` is None, the model's template.

        Raises `UnimplementedError` if the model has no chat template, and `InvalidArgumentError` if
        `source` is malformed or the router does not trust requests' templates.
        """
        self._model.check_name(model)
        if source is not None:
            return self._chats.template_of_request(source, self._tokenizer.special_tokens)
        template = self._tokenizer.chat_template
        if template is None:
            raise UnimplementedError(f"model {self._model.name!r} has no chat template")
        return template

    def parsers(self, template: ChatTemplate) -> OutputParsers:
        """Return the parsers for the outputs of chats that `template` renders."""
        tools, thinking = choose_parsers(
            template.source, self._chats.tool_parser, self._chats.reasoning_parser
        )
        return OutputParsers(tools, thinking, self._tokenizer.token_id, self._tokenizer.is_special)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result.

        Raises `TooBusyError` if `max_pending_prompts` calls are pending.
        """
        return await self._prompts.run(work)

    def infill(self, prefix: str, suffix: str) -> str:
        """Return the prompt that asks for the text between a prefix and a suffix.

        Raises `UnimplementedError` if the model has no tokens for infilling.
        """
        prompt = infill(prefix, suffix, self._tokenizer.token_id)
        if prompt is None:
            raise UnimplementedError(
                f"suffix is set; model {self._model.name!r} has no tokens to fill in the middle"
            )
        return prompt

    async def render_chat(
        self,
        model: str,
        messages: Iterable[Mapping[str, Any]],
        template: ChatTemplate | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Render a chat with `template`, or with the model's template if `template` is None.

        A thread iterates over the messages. The prompt contains its special tokens, so tokenize it
        with `add_special_tokens=False`.

        Raises `InvalidArgumentError` if the messages cannot fit the model's context or the template
        refuses them, `UnimplementedError` if the model has no template, and `TooBusyError` if
        `max_pending_prompts` are pending.
        """
        chosen = template or self.chat_template(model)
        return await self._prompts.run(self._rendering(model, messages, chosen, template_kwargs))

    def _rendering(
        self,
        name: str,
        messages: Iterable[Mapping[str, Any]],
        template: ChatTemplate,
        kwargs: Mapping[str, Any],
    ) -> Callable[[], str]:
        model = self._model.info(name)

        def render() -> str:
            listed = list(messages)
            check_chat(listed, model, self.max_text_bytes(model))
            return template.render(listed, **kwargs)

        return render

    # --- without generating ---------------------------------------------------------------------

    async def tokenize(
        self, model: str, text: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Turn text into the token ids that `generate` would use.

        Raises `InvalidArgumentError` for a text that cannot fit the context, or whose tokens exceed
        both the context and `MAX_ANSWERED`; raises `TooBusyError` if `MAX_QUESTIONS` calls are
        pending.
        """
        info = self._model.info(model)
        check_text("text", text, info, self.max_text_bytes(info))
        token_ids = await self._questions.run(
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )
        return _checked("text", token_ids, info)

    async def tokenize_chat(
        self,
        model: str,
        messages: Iterable[Mapping[str, Any]],
        template: ChatTemplate | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Convert a chat to token ids; raises the errors of `render_chat` and `tokenize`."""
        chosen = template or self.chat_template(model)
        render = self._rendering(model, messages, chosen, template_kwargs)
        token_ids = await self._questions.run(
            # The template has written the special tokens.
            lambda: self._tokenizer.encode(render(), add_special_tokens=False)
        )
        return _checked("messages", token_ids, self._model.info(model))

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Turn token ids into text.

        Raises `InvalidArgumentError` for more tokens than fit the context, and `TooBusyError` if
        `MAX_QUESTIONS` calls are pending.
        """
        info = self._model.info(model)
        check_count("token_ids", len(token_ids), info.max_model_len)
        check_token_ids("token_ids", token_ids, info.vocab_size)
        return await self._questions.run(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """Return a function that decodes the current model's token ids, with special tokens.

        Any thread may call it.
        """
        return functools.partial(self._tokenizer.decode, skip_special_tokens=False)

    # These methods take no model name, because adapters share the model's tokenizer, and outputs of
    # an adapter continue after the adapter was unloaded.

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, with U+FFFD for an incomplete character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to the text; for a special token its name."""
        pieces = self._tokenizer.table.pieces
        return pieces[token_id] if token_id < len(pieces) else b""


def _checked(field: str, token_ids: list[int], model: Model) -> list[int]:
    most = max(MAX_ANSWERED, model.max_model_len)
    if len(token_ids) > most:
        raise InvalidArgumentError(
            field, f"has {len(token_ids)} tokens; it must have at most {most}"
        )
    return token_ids
