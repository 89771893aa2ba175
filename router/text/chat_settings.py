"""The settings of chats: the parsers of outputs, and whether requests may set a template."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jinja2

from contract.errors import InvalidArgumentError
from router.parsers.choosing import BY_TEMPLATE
from router.text.chat_template import ChatTemplate

MAX_TEMPLATE_CHARS = 2**16


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of chats; the router's flags have the same names."""

    tool_parser: str = BY_TEMPLATE
    reasoning_parser: str = BY_TEMPLATE
    trust_request_chat_template: bool = False

    def template_of_request(self, source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Compile a request's template, which runs in a sandbox, but without a time limit.

        Raises:
            InvalidArgumentError: The service does not trust requests' templates, or the template
                `source` is malformed or too long.
        """
        if not self.trust_request_chat_template:
            raise InvalidArgumentError(
                "chat_template",
                "is set; this service does not accept templates from requests"
                " (--trust-request-chat-template)",
            )
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidArgumentError(
                "chat_template",
                f"has {len(source)} characters; it must have at most {MAX_TEMPLATE_CHARS}",
            )
        try:
            return _compiled(source, tuple(sorted(special_tokens.items())))
        except jinja2.TemplateError as error:
            raise InvalidArgumentError("chat_template", f"is malformed: {error}") from error


@functools.lru_cache(16)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))
