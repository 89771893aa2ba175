"""Finds function calls in an output's text as it arrives."""

import uuid
from dataclasses import dataclass, field
from typing import Final, Protocol

from pydantic_core import from_json

from router.http.strict_json import json_bytes


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call; its first has an id and a name."""

    position: int
    """Which of the output's calls, from 0."""
    arguments: str
    call_id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Reading:
    """What was read from some text: content and calls."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class CallReader(Protocol):
    """Reads one output; text that is no call is content."""

    def push(self, text: str) -> Reading:
        """Read more text; what may become a call is held back."""

    def flush(self) -> Reading:
        """Read what was held back, at the output's end."""


class ForcedCall:
    """The whole text is one function's arguments, as the output's form demands."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def push(self, text: str) -> Reading:
        """Return the arguments as they arrive."""
        if self._started:
            return Reading(calls=[CallPiece(0, text)] if text else [])
        self._started = True
        return Reading(calls=[CallPiece(0, text, _new_id(), self._name)])

    def flush(self) -> Reading:
        """Nothing is held back."""
        return Reading()


class ChosenCall:
    """The whole text is one object with a function's name and arguments."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> Reading:
        """Wait for the object's end."""
        self._text += text
        return Reading()

    def flush(self) -> Reading:
        """Read the object; one that was cut short is content."""
        call = _parse_call(self._text, 0)
        return Reading(self._text) if call is None else Reading(calls=[call])


class TaggedCalls:
    """Calls are written `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

    Qwen, Nous (Hermes) and others write so. White space before a call, and after the last one,
    belongs to the syntax. The last end tag may be missing: it may be a stop string.
    """

    BEGIN: Final = "<tool_call>"
    END: Final = "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._within = False
        self._num_calls = 0

    def push(self, text: str) -> Reading:
        """Return text that is certainly content, and each call at its end."""
        self._held += text
        reading = Reading()
        while (tag := self.END if self._within else self.BEGIN) in self._held:
            before, _, self._held = self._held.partition(tag)
            if self._within:
                self._end_call(reading, before, self.END)
            else:
                reading.content += before.rstrip()
            self._within = not self._within
        if not self._within:
            num_certain = _num_before(self._held, self.BEGIN)
            reading.content += self._held[:num_certain]
            self._held = self._held[num_certain:]
        return reading

    def flush(self) -> Reading:
        """Return the last call if only its end tag is missing; else the rest as content."""
        reading = Reading()
        if self._within:
            self._end_call(reading, self._held, "")
        else:
            reading.content = self._held.rstrip() if self._num_calls else self._held
        self._held = ""
        return reading

    def _end_call(self, reading: Reading, text: str, end: str) -> None:
        call = _parse_call(text, self._num_calls)
        if call is None:
            reading.content += f"{self.BEGIN}{text}{end}"
        else:
            reading.calls.append(call)
            self._num_calls += 1


def _parse_call(text: str, position: int) -> CallPiece | None:
    try:
        call = from_json(text.strip())
    except ValueError:
        return None
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return CallPiece(position, json_bytes(arguments).decode(), _new_id(), name)


def _num_before(text: str, tag: str) -> int:
    """Count the characters before a possible beginning of the tag and white space before that."""
    num = len(text)
    for num_chars in range(min(num, len(tag) - 1), 0, -1):
        if text.endswith(tag[:num_chars]):
            num -= num_chars
            break
    return len(text[:num].rstrip())


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"
