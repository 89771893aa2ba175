"""The JSON of a chat's choices: messages, deltas, tool calls."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from contract.outputs import FinishReason, OutputDelta, OutputFinished, PromptScores, TokenLogprob
from router.http.answers.objects import (
    CollectedOutput,
    Json,
    TokenText,
    end_json,
    finite,
    prompt_logprobs_json,
)
from router.parsers.pieces import CallPiece, Piece, Reader, Text, Thought

TokenBytes: TypeAlias = Callable[[int], bytes]
"""Returns the bytes that a token id adds to the text; they may be part of a character."""

_TEXT_ONLY = {"content"}


class ChatShape:
    """Choices of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        token_text: TokenText,
        token_bytes: TokenBytes,
        *,
        has_logprobs: bool,
        has_prompt_logprobs: bool = False,
        has_token_ids: bool = False,
        prompt_token_ids: Callable[[], Sequence[int]] = tuple,
        new_reader: Callable[[], Reader] | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        """Make the shape of one call.

        Args:
            token_text: Returns the text that stands for a token in log-probabilities.
            token_bytes: Returns the bytes of a token.
            has_logprobs: Whether to show log-probabilities of outputs.
            has_prompt_logprobs: Whether to show log-probabilities of the prompt.
            has_token_ids: Whether to show token ids.
            prompt_token_ids: Returns the prompt's token ids; called only by `once`.
            new_reader: Makes the `Reader` that finds thinking and calls in one output; None: the
                whole output is text.
            stop: Stop strings that end a tool call. If such a string ended an output, the reader of
                the output also gets the string, because it marks the end of the call.
        """
        self._token_text = token_text
        self._token_bytes = token_bytes
        self._has_logprobs = has_logprobs
        self._has_prompt_logprobs = has_prompt_logprobs
        self._has_token_ids = has_token_ids
        self._is_plain = not (has_logprobs or has_token_ids)
        """Whether chunks have neither log-probabilities nor token ids."""
        self._prompt_token_ids = prompt_token_ids
        self.is_text_only = self._is_plain and new_reader is None
        self._stop = stop
        self._scores: list[TokenLogprob] | None = None
        self._introduced: set[int] = set()
        self._index_to_reader: defaultdict[int, Reader] | None
        self._index_to_reader = None if new_reader is None else defaultdict(new_reader)
        self._has_called: set[int] = set()
        self._has_said_once = False

    def score(self, index: int, scores: PromptScores) -> None:
        """Add more of the prompt's log-probabilities.

        They are the same for each choice, so only those of choice 0 are kept.
        """
        if index == 0:
            self._scores = [*(self._scores or ()), *scores.logprobs]

    def once(self) -> Json:
        """Return the requested fields about the prompt; after the first call, return no fields."""
        said: Json = {}
        if self._has_said_once:
            return said
        self._has_said_once = True
        if self._has_token_ids:
            said["prompt_token_ids"] = list(self._prompt_token_ids())
        if self._has_prompt_logprobs and self._scores is not None:
            said["prompt_logprobs"] = prompt_logprobs_json(
                self._token_text, self._prompt_token_ids(), self._scores
            )
        return said

    def delta(self, index: int, delta: OutputDelta) -> Json | str:
        """Return a chunk's choice with the new text; the first chunk also has the role."""
        if self._index_to_reader is None:
            said: Json = {"content": delta.text}
        else:
            said = self._chunk(index, self._index_to_reader[index].push(delta.text))
        if self._is_plain and index in self._introduced and said.keys() == _TEXT_ONLY:
            return str(said["content"])
        return {
            "index": index,
            "delta": {**self._role_once(index), **said},
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": None,
            **self._token_ids(delta.token_ids),
        }

    def choice_of_text(self, index: int, text: str) -> Json:
        """Return a chunk's choice that has only a text."""
        delta = {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def finish(self, index: int, finished: OutputFinished) -> Json:
        """Return the last chunk's choice."""
        delta = self._role_once(index)
        if self._index_to_reader is not None:
            reader = self._index_to_reader[index]
            delta |= self._chunk(index, last_pieces(reader, finished, self._stop))
        return {"index": index, "delta": delta, "logprobs": None, **self._end(index, finished)}

    def whole(self, index: int, output: CollectedOutput, finished: OutputFinished) -> Json:
        """Return the choice of a whole answer."""
        text = "".join(output.texts)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._index_to_reader is not None:
            reader = self._index_to_reader[index]
            pieces = [*reader.push(text), *last_pieces(reader, finished, self._stop)]
            message |= self._message(index, pieces)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output.token_ids, output.logprobs),
            **self._token_ids(output.token_ids),
            **self._end(index, finished),
        }

    def _role_once(self, index: int) -> Json:
        if index in self._introduced:
            return {}
        self._introduced.add(index)
        return {"role": "assistant"}

    def _chunk(self, index: int, pieces: Sequence[Piece]) -> Json:
        """Return the fields of a delta with these pieces."""
        content, thought, calls = _sorted(pieces)
        said: Json = _thought_json(thought)
        if content:
            said["content"] = content
        if calls:
            self._has_called.add(index)
            said["tool_calls"] = [{"index": call.position, **_call_json(call)} for call in calls]
        return said

    def _message(self, index: int, pieces: Sequence[Piece]) -> Json:
        """Return the fields of a message for an output's pieces."""
        content, thought, parts = _sorted(pieces)
        said: Json = {"content": content, **_thought_json(thought)}
        calls: list[CallPiece] = []
        for part in parts:
            if part.call_id is not None:
                calls.append(part)
            else:
                last = calls[part.position]
                calls[part.position] = replace(last, arguments=last.arguments + part.arguments)
        if calls:
            self._has_called.add(index)
            said["tool_calls"] = [_call_json(call) for call in calls]
        if calls or thought:
            said["content"] = content or None
        return said

    def _token_ids(self, token_ids: Sequence[int]) -> Json:
        return {"token_ids": list(token_ids)} if self._has_token_ids else {}

    def _end(self, index: int, finished: OutputFinished) -> Json:
        end = end_json(finished)
        if finished.finish_reason is FinishReason.STOP and index in self._has_called:
            end["finish_reason"] = "tool_calls"
        return end

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json | None:
        if not self._has_logprobs:
            return None
        content = [
            {
                **self._token(token_id, entry.logprob),
                "top_logprobs": [self._token(top_id, logprob) for top_id, logprob in entry.top],
            }
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._token_bytes(token_id)),
        }


def last_pieces(reader: Reader, finished: OutputFinished, stop: Sequence[str]) -> list[Piece]:
    """Return the pieces that `reader` has held back when an output ends.

    If a stop string in `stop` ended the output, the reader reads this string first.
    """
    pieces: list[Piece] = []
    if finished.stop_string is not None and finished.stop_string in stop:
        pieces += reader.push(finished.stop_string)
    return [*pieces, *reader.flush()]


def _sorted(pieces: Sequence[Piece]) -> tuple[str, str, list[CallPiece]]:
    """Sort pieces into content, thinking and calls."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return content, thought, [piece for piece in pieces if isinstance(piece, CallPiece)]


def _thought_json(thought: str) -> Json:
    """Return thinking under the older and the newer name of the field."""
    return {"reasoning_content": thought, "reasoning": thought} if thought else {}


def _call_json(piece: CallPiece) -> Json:
    if piece.call_id is None:
        return {"function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": piece.call_id, "type": "function", "function": function}
