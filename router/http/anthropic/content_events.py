"""The events of a message's content blocks, and the content that results from them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from pydantic_core import from_json

from contract.outputs import FinishReason, OutputFinished, Usage
from router.http.answers.chat_shape import last_pieces
from router.http.answers.objects import Json
from router.parsers.pieces import CallPiece, Piece, Reader, Text, Thought

SIGNATURE: Final = "cXVpcmU="
"""A placeholder. Anthropic signs thinking to verify it later; Quire accepts any signature."""

_TEXT, _THINKING, _CALL = "text", "thinking", "tool_use"


class ContentEvents:
    """Makes the events of an output's content blocks.

    In the events, `index` is a block's index in the content. Blocks do not overlap; each has these
    events::

        content_block_start, content_block_delta ..., content_block_stop
    """

    def __init__(
        self,
        new_reader: Callable[[], Reader] | None,
        stop: Sequence[str],
        *,
        shows_thinking: bool = True,
    ) -> None:
        """`new_reader` and `stop` are those of the output's `OutputPlan`.

        If `shows_thinking` is false, thinking blocks are empty.
        """
        self._reader = None if new_reader is None else new_reader()
        self._stop = stop
        self._shows_thinking = shows_thinking
        self._num_blocks = 0
        self._open = ""
        self._has_called = False

    def push(self, text: str) -> Iterator[Json]:
        """Read more of the output's text; yield its events."""
        yield from self._read([Text(text)] if self._reader is None else self._reader.push(text))

    def finish(self, finished: OutputFinished) -> Iterator[Json]:
        """Read the text that was held back, and close the last block; yield the events."""
        if self._reader is not None:
            yield from self._read(last_pieces(self._reader, finished, self._stop))
        yield from self._close()

    def stop_reason(self, finished: OutputFinished, *, is_context_full: bool) -> Json:
        """Return the reason why the output ended, and the stop sequence if there is one."""
        reason, sequence = "end_turn", None
        if finished.finish_reason is FinishReason.LENGTH:
            reason = "model_context_window_exceeded" if is_context_full else "max_tokens"
        elif finished.stop_string is not None and finished.stop_string not in self._stop:
            reason, sequence = "stop_sequence", finished.stop_string
        elif self._has_called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _read(self, pieces: Iterable[Piece]) -> Iterator[Json]:
        for piece in pieces:
            match piece:
                case Text(text):
                    if not text:
                        continue
                    yield from self._continue(_TEXT, {"text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Thought(text):
                    yield from self._continue(_THINKING, {"thinking": "", "signature": ""})
                    if self._shows_thinking:
                        yield self._delta({"type": "thinking_delta", "thinking": text})
                case CallPiece():
                    if piece.call_id is not None:
                        self._has_called = True
                        yield from self._close()
                        call: Json = {"id": piece.call_id, "name": piece.name, "input": {}}
                        yield from self._continue(_CALL, call)
                    if piece.arguments:
                        yield self._delta(
                            {"type": "input_json_delta", "partial_json": piece.arguments}
                        )

    def _continue(self, kind: str, block: Json) -> Iterator[Json]:
        """Close the open block and begin `block`; do neither if the open block is of this kind."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        yield {
            "type": "content_block_start",
            "index": self._num_blocks,
            "content_block": {"type": kind, **block},
        }

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if not self._open:
            return
        if self._open == _THINKING:
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": self._num_blocks}
        self._open = ""
        self._num_blocks += 1


def collected(events: Iterable[Json]) -> list[Json]:
    """Return the content blocks that Anthropic's clients would compute from the events."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in events:
        match event:
            case {"content_block": dict(block)}:
                blocks.append(dict(block))
                arguments = ""
            case {"delta": {"partial_json": str(part)}}:
                arguments += part
            case {"delta": {"text": str(part)}}:
                blocks[-1]["text"] += part
            case {"delta": {"thinking": str(part)}}:
                blocks[-1]["thinking"] += part
            case {"delta": {"signature": str(signature)}}:
                blocks[-1]["signature"] = signature
            case {"type": "content_block_stop"} if arguments:
                blocks[-1]["input"] = _parsed(arguments)
    return blocks


def _parsed(arguments: str) -> object:
    """Parse the JSON of a tool call's input; if it was cut short, parse its complete part."""
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def usage_json(usage: Usage) -> Json:
    """Return the usage as Anthropic counts it: each prompt token in exactly one field."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
