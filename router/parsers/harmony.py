"""Reads gpt-oss's messages: each has a channel, and perhaps a recipient, before its text.

For example, thinking and then a tool call (the line breaks are not in the output)::

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add
    <|constrain|>json<|message|>{"a": 1}<|call|>
"""

import re
from dataclasses import dataclass
from typing import Final

from contract.request import ThinkingMarkers
from router.parsers.source import MalformedError, Reading
from router.parsers.tool_calls import Calls

_WORD: Final = re.compile(r"[\w.:-]*")
_MAX_CHARS: Final = 256
_STARTS: Final = ("<|start|>", "<|channel|>")
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
THOUGHT_MESSAGES: Final = ThinkingMarkers(
    "<|channel|>analysis<|message|>", (*_ENDS, *_STARTS), recurs=True
)


def begun_channel(prompt: str) -> str:
    """Return the channel of the message in whose text `prompt` ends.

    Returns "" if `prompt` ends before a message's text.
    """
    header, begun, _ = prompt[prompt.rfind("<|start|>") + 1 :].rpartition("<|message|>")
    if not begun:
        return ""
    found = _WORD.match(header.rpartition("<|channel|>")[2])
    return (found and found[0]) or "final"


@dataclass(frozen=True, slots=True)
class HarmonySyntax:
    """Reads the messages of one output as thinking, calls and text.

    A message to a function is a call. Of the other messages, those in the channel "analysis" are
    thinking, and the rest are text for the user.
    """

    openers = _STARTS
    """The markers that begin a message."""

    def read(self, calls: Calls) -> Reading[None]:
        """Read an output to its end."""
        source, show = calls.source, calls.pieces.text
        while (yield from source.peek()):
            source.mark()
            try:
                yield from self._read_message(calls)
            except MalformedError:
                show(source.take_back())
                if not (yield from source.until(_STARTS, show)):
                    show(source.take_back())
                source.rewind()

    def _read_message(self, calls: Calls) -> Reading[None]:
        source, pieces = calls.source, calls.pieces
        channel, recipient = yield from self._read_header(calls)
        if recipient and calls.are_wanted:
            yield from source.skip_space()
            if (yield from source.peek()) != "{":
                raise MalformedError
            calls.begin(recipient.removeprefix("functions."))
            yield from calls.object()
            yield from source.skip_space()
            yield from source.has_any(_ENDS)
            return
        if recipient:
            raise MalformedError
        source.mark()
        show = pieces.thought if channel == "analysis" else pieces.text
        found = yield from source.until((*_ENDS, *_STARTS), show)
        if not found:
            show(source.take_back())
        elif found in _STARTS:
            source.rewind()

    def _read_header(self, calls: Calls) -> Reading[tuple[str, str]]:
        source, recipient = calls.source, ""
        if (yield from source.has("<|start|>")) and not (yield from source.has("assistant")):
            raise MalformedError
        yield from source.skip_space()
        if (yield from source.has("to=")):
            recipient = yield from source.word(_WORD, _MAX_CHARS)
        if not (yield from source.has("<|channel|>")):
            raise MalformedError
        channel = yield from source.word(_WORD, _MAX_CHARS)
        yield from source.skip_space()
        if (yield from source.has("to=")):
            recipient = yield from source.word(_WORD, _MAX_CHARS)
            yield from source.skip_space()
        yield from source.has("<|constrain|>")
        if not (yield from source.has("<|message|>")):
            for kind in ("json", "code"):
                yield from source.has(kind)
            yield from source.skip_space()
            if not (yield from source.has("<|message|>")):
                raise MalformedError
        if channel not in ("analysis", "commentary", "final"):
            raise MalformedError
        return channel, recipient
