"""Chooses the parsers for a model's outputs, by the model's chat template or by the settings."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

from contract.request import ThinkingMarkers
from router.parsers.call_grammar import TokenId
from router.parsers.families import THINKING_FAMILIES, TOOL_FAMILIES, ToolFamily
from router.parsers.harmony import THOUGHT_MESSAGES
from router.parsers.pieces import Pieces, Reader
from router.parsers.reader import OutputReader, Part, TwoReaders, plain_text, read_by
from router.parsers.source import Reading, Source
from router.parsers.thinking import Thinking
from router.parsers.tool_calls import Calls, Tools

BY_TEMPLATE = ""
NONE = "none"

ReaderClass: TypeAlias = Callable[[Tools], Reader]
"""A user's class that reads calls. The router makes an object of this class for each output. The
constructor gets the schemas of the offered functions."""
ThinkingReaderClass: TypeAlias = Callable[[str], Reader]
"""A user's class that reads thinking. The router makes an object of this class for each output. The
constructor gets the end of the prompt, because thinking may begin there. The text pieces that the
object returns are then searched for calls."""

T = TypeVar("T")


class ParserError(ValueError):
    """A parser's name is unknown, or its class cannot be loaded."""


@dataclass(frozen=True, slots=True)
class OutputParsers:
    """The parsers for a model's thinking and tool calls."""

    tools: ToolFamily | ReaderClass | None
    """None: the syntax of calls is unknown."""
    thinking: Thinking | ThinkingReaderClass | None
    token_id: TokenId
    is_special: Callable[[str], bool]
    """Returns whether a text is a special token, which outputs do not show."""

    @property
    def family(self) -> ToolFamily | None:
        """The model's family in `TOOL_FAMILIES`.

        None: no parser reads calls, or a user's class does.
        """
        return self.tools if isinstance(self.tools, ToolFamily) else None

    @property
    def thinking_family(self) -> Thinking | None:
        """The model's family in `THINKING_FAMILIES`.

        None: no parser reads thinking, or a user's class does.
        """
        return self.thinking if isinstance(self.thinking, Thinking) else None

    @property
    def reads_messages(self) -> bool:
        """Whether outputs consist of harmony's messages instead of plain text."""
        return self.family is not None and self.family.is_harmony

    def new_reader(self, tools: Tools | None, *, has_begun: bool, prompt_end: str = "") -> Reader:
        """Make the reader of one output.

        Args:
            tools: The offered functions' schemas; None: calls count as plain text.
            has_begun: Whether the prompt ends within thinking.
            prompt_end: The end of the prompt, for a user's class that reads thinking; else unused.
        """
        parts: list[Part] = []
        if (thinking := self.thinking_family) is not None:
            parts.append(functools.partial(thinking.read, has_begun=has_begun))
        reader = OutputReader([*parts, self._part(tools)])
        if self.thinking is None or isinstance(self.thinking, Thinking):
            return reader
        return TwoReaders(self.thinking(prompt_end), reader)

    def _part(self, tools: Tools | None) -> Part:
        if self.tools is None or (tools is None and not self.reads_messages):
            return plain_text
        if not isinstance(self.tools, ToolFamily):
            return read_by(self.tools(tools or {}))
        syntax = self.tools.syntax

        def part(source: Source, pieces: Pieces) -> Reading[None]:
            return syntax.read(Calls(source, pieces, tools))

        return part

    def markers(self, *, has_begun: bool) -> ThinkingMarkers | None:
        """Return the markers of thinking; None if the model has none or they are unknown."""
        if (thinking := self.thinking_family) is not None:
            return ThinkingMarkers(thinking.begin, (thinking.end, *thinking.other_ends), has_begun)
        return THOUGHT_MESSAGES if self.reads_messages else None

    def hides_markers(self) -> bool:
        """Whether a marker of thinking or of calls is a special token.

        If so, the parsers need text with special tokens.
        """
        markers: Sequence[str] = ()
        if (thinking := self.thinking_family) is not None:
            markers = (thinking.begin, thinking.end)
        if self.family is not None:
            markers = (*markers, *self.family.syntax.openers)
        return any(map(self.is_special, markers))


def choose_parsers(
    template: str, tool_parser: str, reasoning_parser: str
) -> tuple[ToolFamily | ReaderClass | None, Thinking | ThinkingReaderClass | None]:
    """Return the parsers for tool calls and for thinking.

    Each parser is the one that its setting names. If the setting is empty, the parser is chosen by
    the markers in the model's chat template.

    Raises:
        ParserError: A setting names neither a family nor a class that can be loaded.
    """
    tools: ToolFamily | ReaderClass | None
    if tool_parser == BY_TEMPLATE:
        tools = _tools_of(template)
    else:
        tools = _named(tool_parser, TOOL_FAMILIES, "tool_parser", (ToolFamily, type))
    if reasoning_parser != BY_TEMPLATE:
        wanted = (Thinking, type)
        return tools, _named(reasoning_parser, THINKING_FAMILIES, "reasoning_parser", wanted)
    if isinstance(tools, ToolFamily) and tools.is_harmony:
        return tools, None  # thinking is in messages of its own
    return tools, _thinking_of(template)


@functools.lru_cache
def _tools_of(template: str) -> ToolFamily | None:
    for family in TOOL_FAMILIES.values():
        is_without = not family.without or family.without not in template
        if is_without and all(mark in template for mark in family.marks):
            return family
    return None


@functools.lru_cache
def _thinking_of(template: str) -> Thinking | None:
    for thinking in THINKING_FAMILIES.values():
        if thinking.end in template and all(mark in template for mark in thinking.other_ends):
            return thinking
    return None


def _named(name: str, families: Any, setting: str, wanted: tuple[type, ...]) -> Any:
    if name == NONE:
        return None
    if name in families:
        return families[name]
    module_name, _, attribute = name.partition(":")
    if not attribute:
        known = ", ".join(families)
        raise ParserError(
            f"{setting} is {name!r}; it must be {NONE}, one of {known}, or your own as"
            " package.module:Name"
        )
    try:
        found = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ParserError(f"{setting} is {name!r}, which cannot be imported: {error}") from error
    if not isinstance(found, wanted):
        kinds = " or ".join(kind.__name__ for kind in wanted)
        raise ParserError(f"{setting} is {name!r}; it must be a {kinds}")
    return found
