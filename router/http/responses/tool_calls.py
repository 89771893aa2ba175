"""Finds the function calls in an output's text, as it comes."""

import uuid
from dataclasses import dataclass, field
from typing import Final, Protocol

from pydantic_core import from_json

from router.http.json_text import json_bytes


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
    """What some text of an output comes to: what it says, and what it calls."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class CallReader(Protocol):
    """Reads one output. What it cannot read as a call is content."""

    def push(self, text: str) -> Reading:
        """Read on; what may yet become a call is held back."""

    def flush(self) -> Reading:
        """Read what was held back, at the output's end."""


class ForcedCall:
    """All of the text is the arguments of one function, as the output's form has it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def push(self, text: str) -> Reading:
        """Pass on the arguments as they come."""
        if self._started:
            return Reading(calls=[CallPiece(0, text)] if text else [])
        self._started = True
        return Reading(calls=[CallPiece(0, text, _new_id(), self._name)])

    def flush(self) -> Reading:
        """Nothing is held back."""
        return Reading()


class ChosenCall:
    """All of the text is one object with the name of a function and its arguments."""

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

    So do the models of Qwen, of Nous (Hermes) and others. White space that nothing but a call
    follows, or the end behind a call, is the syntax's. The last end tag may be missing: it may be a
    stop string.
    """

    BEGIN: Final = "<tool_call>"
    END: Final = "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._within = False
        self._num_calls = 0

    def push(self, text: str) -> Reading:
        """Pass on what is certain to be content, and each call at its end."""
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
        """Read the last call if its end tag is missing; else the rest is content."""
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
    """How much of a text without the tag comes before what may be white space and its beginning."""
    num = len(text)
    for num_chars in range(min(num, len(tag) - 1), 0, -1):
        if text.endswith(tag[:num_chars]):
            num -= num_chars
            break
    return len(text[:num].rstrip())


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"
