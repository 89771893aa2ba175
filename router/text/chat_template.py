"""Renders a chat into a prompt with the model's own Jinja template.

Templates are written for the environment of the `transformers` library. This module provides the
same environment: a sandbox, the same whitespace rules, and the names `raise_exception`,
`strftime_now`, `tojson` and `{% generation %}`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Never

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from contract.errors import InvalidArgumentError

_TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""Errors that a template may raise if messages have an unexpected shape."""


_END_OF_CONTENT = "\ue000end of content\ue000"
"""Marks the end of the last message's content while a prompt is rendered. The text has private-use
characters, so that messages are unlikely to contain it."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; in a prompt it has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One compiled template; rendering is thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps names that templates use, such as `bos_token`, to texts.

        May raise `jinja2.TemplateSyntaxError`.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,  # the result is a prompt, not HTML
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        tree = environment.parse(source)
        self.source = source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        """The names of the variables that the template reads."""
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    @property
    def takes_tools(self) -> bool:
        """Whether the template renders tools."""
        return "tools" in self.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render the prompt, with a generation prompt unless `add_generation_prompt` is False.

        If `continue_final_message` is true, the prompt ends with the last message's content.

        Other `kwargs`, such as `tools`, are passed to the template. Raises `InvalidArgumentError`
        if the template refuses the messages or fails on them.
        """
        if continue_final_message:
            *before, last = messages
            messages = [*before, {**last, "content": f"{last['content']}{_END_OF_CONTENT}"}]
        variables = {
            **self._special_tokens,
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            **kwargs,
            "messages": messages,
        }
        try:
            prompt = self._template.render(variables)
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            raise InvalidArgumentError(
                "messages", f"do not fit the model's chat template: {error}"
            ) from error
        if not continue_final_message:
            return prompt
        prompt, end, _ = prompt.rpartition(_END_OF_CONTENT)
        if not end:
            raise InvalidArgumentError(
                "continue_final_message",
                "is true; the model's chat template does not show the last message's content",
            )
        return prompt


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 -- templates may pass it by name
    return datetime.now().astimezone().strftime(format)
