"""Ids of a stream's events. To resume the stream, a client sends an event's id as `Last-Event-ID`.

An id states how much of each output the client has after the event, and names the request::

    0.12.57,1.9.40e/3f0c...     output 0: 12 tokens, 57 bytes of text; output 1 has ended
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import quote, unquote

from contract.errors import InvalidArgumentError
from contract.outputs import OutputDelta, OutputFinished
from contract.request import OutputReceived
from router.http.strict_json import excerpt

LAST_EVENT_ID_HEADER: Final = "Last-Event-ID"

_MAX_CHARS: Final = 4096
_PART: Final = r"\d{1,9}\.\d{1,9}\.\d{1,9}e?"
_PATTERN: Final = re.compile(rf"{_PART}(?:,{_PART})*/[!-~]{{1,1024}}", re.ASCII)


class StreamPosition:
    """Counts how much of each output a client has, and makes the ids of its stream's events."""

    def __init__(self, request_id: str, received: Mapping[int, OutputReceived]) -> None:
        """`received` is what the client has of each output at the start."""
        self._suffix = "/" + quote(request_id, safe="")
        self._received = dict(received)

    @property
    def num_tokens(self) -> int:
        """How many tokens the client has, of all outputs together."""
        return sum(part.num_tokens for part in self._received.values())

    def advance(self, event: OutputDelta | OutputFinished) -> str:
        """Count an event, and return its id."""
        part = self._received.get(event.output_index, OutputReceived())
        if isinstance(event, OutputFinished):
            part = replace(part, finished=True)
        else:
            part = replace(
                part,
                num_tokens=part.num_tokens + len(event.token_ids),
                num_text_bytes=part.num_text_bytes + len(event.text.encode()),
            )
        self._received[event.output_index] = part
        parts = (
            f"{index}.{part.num_tokens}.{part.num_text_bytes}{'e' * part.finished}"
            for index, part in sorted(self._received.items())
        )
        return ",".join(parts) + self._suffix


def parse_event_id(event_id: str) -> tuple[str, dict[int, OutputReceived]]:
    """Return the request's id, and what the client has of each output.

    May raise InvalidArgumentError.
    """
    if len(event_id) > _MAX_CHARS or not _PATTERN.fullmatch(event_id):
        raise InvalidArgumentError(
            LAST_EVENT_ID_HEADER, f"is {excerpt(event_id)}; it must be the id of an event"
        )
    positions, _, request_id = event_id.partition("/")
    received = {}
    for part in positions.split(","):
        index, num_tokens, num_text_bytes = map(int, part.rstrip("e").split("."))
        received[index] = OutputReceived(num_tokens, num_text_bytes, part.endswith("e"))
    return unquote(request_id), received
