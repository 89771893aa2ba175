"""The events of one response, as a function of its tokens alone.

`ResponseEvents` converts one token at a time to text and events, so it does not matter how the
tokens are divided into deltas. A client that reads a stream again, at another router or after all
processes have restarted, gets the same events with the same numbers.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from contract.errors import QuireError
from contract.outputs import (
    Event,
    FinishReason,
    OutputDelta,
    OutputFinished,
    TokenLogprob,
    Usage,
)
from router.http.answers.chat_shape import last_pieces
from router.http.answers.objects import Json, finite
from router.http.errors import error_from_finished
from router.http.openai_responses.items import sealed
from router.live.stop_strings import StopMatcher
from router.parsers.pieces import CallPiece, Piece, Reader, Text, Thought
from router.text.detokenizer import Detokenizer

_OUR_CALL_ID: Final = re.compile(r"call_[0-9a-f]{32}")
"""Matches the call ids that Quire's parsers generate; all other call ids come from the model."""

_NO_GROUPS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType({})

_COMPLETED: Final = "completed"
_INCOMPLETE: Final = "incomplete"


class OutputText:
    """Converts the tokens of an output to text, up to the first stop string."""

    def __init__(
        self, detokenizer: Detokenizer, stop: StopMatcher, end_token_ids: Container[int]
    ) -> None:
        """The tokens `end_token_ids` end the output; their text is not part of it."""
        self._detokenizer = detokenizer
        self._stop = stop
        self._end_token_ids = end_token_ids

    def push(self, token_id: int) -> str:
        if token_id in self._end_token_ids or self._stop.found is not None:
            return ""
        return self._stop.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """Return the text that `push` has held back; "" if a stop string has ended the output."""
        if self._stop.found is not None:
            return ""
        return self._stop.flush() + self._detokenizer.flush()


class ResponseEvents:
    """Makes the events of one response, and the response's current JSON."""

    def __init__(
        self,
        head: Json,
        text: OutputText,
        reader: Reader | None,
        *,
        call_stop: Sequence[str] = (),
        token_text: Callable[[int], str] = str,
        token_bytes: Callable[[int], bytes] | None = None,
        has_logprobs: bool = False,
        seals_thinking: bool = False,
        name_to_group: Mapping[str, tuple[str, str]] = _NO_GROUPS,
    ) -> None:
        """Start a response.

        Args:
            head: The fields that do not depend on the output, such as `id` and `background`.
            text: Converts the output's tokens to text.
            reader: Splits the output into text, thinking and calls; None: the whole output is text.
            call_stop: Stop strings that end a tool call; if one of them ends the output, the reader
                reads it, too.
            token_text: Returns the text that stands for a token in log-probabilities.
            token_bytes: Returns the bytes of a token.
            has_logprobs: Whether to show log-probabilities.
            seals_thinking: Whether reasoning items have `encrypted_content`.
            name_to_group: Maps a name that the model sees, such as "git__log", to the group and the
                function, such as ("git", "log").
        """
        self._head = head
        self._text = text
        self._reader = reader
        self._call_stop = call_stop
        self._token_text = token_text
        self._token_bytes = token_bytes or (lambda token_id: token_text(token_id).encode())
        self._has_logprobs = has_logprobs
        self._seals_thinking = seals_thinking
        self._name_to_group = name_to_group
        self._name = str(head["id"]).partition("_")[2]
        self._status = "in_progress"
        self._finished: OutputFinished | None = None
        self._end: Json = {}
        self._output: list[Json] = []
        self._open: Json | None = None
        """The item that is being written, which is the last of `_output`; None: there is none."""
        self._written: list[str] = []
        """The text of the open item, in pieces."""
        self._logprobs: list[Json] = []
        """Log-probabilities of the open item."""
        self._new_logprobs: list[Json] = []
        """Log-probabilities of tokens whose text is not complete yet."""
        self._space = ""
        """White space outside a message; dropped unless the next item is a message."""
        self._num_calls = 0
        self._events: list[Json] = []
        self._num_events = 0

    @property
    def response(self) -> Json:
        """The response as it is now."""
        return {
            **self._head,
            "object": "response",
            "status": self._status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output),
            "usage": None,
            **self._end,
        }

    def begin(self) -> list[Json]:
        """Return the events before the first token."""
        if self._head["background"]:
            self._status = "queued"
            self._add("response.created", response=self.response)
            self._add("response.queued", response=self.response)
            self._status = "in_progress"
        else:
            self._add("response.created", response=self.response)
        self._add("response.in_progress", response=self.response)
        return self._take()

    def take(self, event: Event, now: Callable[[], float]) -> list[Json]:
        """Return the response's events for one event of the output.

        `now` returns the Unix time; at the output's end, this method calls it for `completed_at`.
        """
        match event:
            case OutputDelta():
                return self.push(event)
            case OutputFinished():
                self._finished = event
            case Usage():
                assert self._finished is not None, "the usage follows the end"
                return self.finish(self._finished, event, now())
        return []

    def push(self, delta: OutputDelta) -> list[Json]:
        """Return the events for more tokens."""
        logprobs: Sequence[TokenLogprob | None] = delta.logprobs or [None] * len(delta.token_ids)
        for token_id, logprob in zip(delta.token_ids, logprobs, strict=True):
            if logprob is not None and self._has_logprobs:
                self._new_logprobs.append(self._logprob(token_id, logprob))
            text = self._text.push(token_id)
            self._say(self._read(text) if text else ())
        return self._take()

    def finish(self, finished: OutputFinished, usage: Usage, at: float) -> list[Json]:
        """Return the last events; the output ended at the Unix time `at`."""
        pieces = list(self._read(self._text.flush()))
        if self._reader is not None:
            pieces += last_pieces(self._reader, finished, self._call_stop)
        self._say(pieces)
        if (space := self._space) and not self._output:
            self._open_message()
            self._write("response.output_text.delta", space, logprobs=[])
        is_complete = finished.finish_reason is FinishReason.STOP
        self._close(_COMPLETED if is_complete else _INCOMPLETE)
        self._end["usage"] = self._usage(usage)
        match finished.finish_reason:
            case FinishReason.STOP:
                self._status = _COMPLETED
                self._end["completed_at"] = int(at)
            case FinishReason.LENGTH:
                self._status = _INCOMPLETE
                self._end["incomplete_details"] = {"reason": "max_output_tokens"}
            case FinishReason.CANCELLED:
                self._status = "cancelled"
            case _:
                return self.fail(error_from_finished(finished) or QuireError("the request failed"))
        name = _COMPLETED if self._status == _COMPLETED else _INCOMPLETE
        self._add(f"response.{name}", response=self.response)
        return self._take()

    def fail(self, error: QuireError) -> list[Json]:
        """Return the last events of a response that cannot be completed."""
        self._close(_INCOMPLETE)
        self._status = "failed"
        is_limit = error.http_status == 429  # noqa: PLR2004 - HTTP's Too Many Requests
        code = "rate_limit_exceeded" if is_limit else "server_error"
        self._end["error"] = {"code": code, "message": str(error)}
        self._add("response.failed", response=self.response)
        return self._take()

    # --- pieces ---------------------------------------------------------------------------------

    def _read(self, text: str) -> Sequence[Piece]:
        if self._reader is None:
            return [Text(text)] if text else ()
        return self._reader.push(text)

    def _say(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Thought():
                    if self._open is None or self._open["type"] != "reasoning":
                        self._open_reasoning()
                    self._write("response.reasoning_text.delta", piece.text)
                case Text():
                    self._say_text(piece.text)
                case CallPiece():
                    if piece.call_id is not None:
                        self._open_call(piece.name or "", piece.call_id)
                    if piece.arguments:
                        self._write("response.function_call_arguments.delta", piece.arguments)
        if pieces:
            self._new_logprobs.clear()

    def _say_text(self, text: str) -> None:
        if self._open is None or self._open["type"] != "message":
            if not text.strip():  # space between two items belongs to neither item
                self._space += text
                return
            text, self._space = self._space + text, ""
            self._open_message()
        logprobs = list(self._new_logprobs)
        self._logprobs += logprobs
        self._new_logprobs.clear()
        self._write("response.output_text.delta", text, logprobs=logprobs)

    def _write(self, event: str, text: str, **more: object) -> None:
        self._written.append(text)
        self._add(event, **self._where(), delta=text, **more)

    # --- items ----------------------------------------------------------------------------------

    def _open_message(self) -> None:
        self._open_item({"type": "message", "role": "assistant", "content": []}, "msg_")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._add("response.content_part.added", **self._where(), part=part)

    def _open_reasoning(self) -> None:
        self._open_item({"type": "reasoning", "summary": [], "content": []}, "rs_")
        part = {"type": "reasoning_text", "text": ""}
        self._add("response.content_part.added", **self._where(), part=part)

    def _open_call(self, name: str, call_id: str) -> None:
        if _OUR_CALL_ID.fullmatch(call_id):  # use an id that stays the same in later readings
            call_id = f"call_{self._name}{self._num_calls}"
        self._num_calls += 1
        call: Json = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
        if (grouped := self._name_to_group.get(name)) is not None:
            call["namespace"], call["name"] = grouped
        self._open_item(call, "fc_")

    def _open_item(self, item: Json, prefix: str) -> None:
        self._close(_COMPLETED)
        position = len(self._output)
        self._open = {"id": f"{prefix}{self._name}{position}", **item, "status": "in_progress"}
        self._output.append(self._open)
        self._add("response.output_item.added", output_index=position, item=self._open)

    def _close(self, status: str) -> None:
        """Complete the open item, if there is one."""
        self._space = ""
        item = self._open
        if item is None:
            return
        text, where = "".join(self._written), self._where()
        done = {**item, "status": status}
        match item["type"]:
            case "message":
                part: Json = {
                    "type": "output_text",
                    "text": text,
                    "annotations": [],
                    "logprobs": self._logprobs,
                }
                self._add("response.output_text.done", **where, text=text, logprobs=self._logprobs)
                self._add("response.content_part.done", **where, part=part)
                done["content"] = [part]
            case "reasoning":
                part = {"type": "reasoning_text", "text": text}
                self._add("response.reasoning_text.done", **where, text=text)
                self._add("response.content_part.done", **where, part=part)
                done["content"] = [part]
                if self._seals_thinking:
                    done["encrypted_content"] = sealed(text)
            case _:
                self._add("response.function_call_arguments.done", **where, arguments=text)
                done["arguments"] = text
        self._open, self._output[-1] = None, done
        self._written, self._logprobs = [], []
        self._add("response.output_item.done", output_index=len(self._output) - 1, item=done)

    def _where(self) -> Json:
        """Return the fields that tell to which part of the response an event belongs."""
        assert self._open is not None, "an item is being written"
        where: Json = {"item_id": self._open["id"], "output_index": len(self._output) - 1}
        return where if self._open["type"] == "function_call" else {**where, "content_index": 0}

    # --- log-probabilities and usage ------------------------------------------------------------

    def _logprob(self, token_id: int, entry: TokenLogprob) -> Json:
        return {
            **self._token(token_id, entry.logprob),
            "top_logprobs": [self._token(top_id, logprob) for top_id, logprob in entry.top],
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._token_bytes(token_id)),
        }

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.cache_write_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    # --- events ---------------------------------------------------------------------------------

    def _add(self, kind: str, **fields: object) -> None:
        self._events.append({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def _take(self) -> list[Json]:
        events, self._events = self._events, []
        return events
