"""The JSON of a chat's choices: messages, deltas, tool calls."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from contract.outputs import FinishReason, OutputDelta, OutputFinished, PromptScores, TokenLogprob
from router.http.responses.objects import CollectedOutput, Json, TokenText, end_json, finite
from router.http.responses.tool_calls import CallPiece, CallReader, Reading

TokenBytes: TypeAlias = Callable[[int], bytes]
"""The bytes that a token id adds to the text; perhaps part of a character."""


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
        new_reader: Callable[[], CallReader] | None = None,
    ) -> None:
        """`new_reader` makes the reader of calls in one output; None: there are no calls."""
        self._token_text = token_text
        self._token_bytes = token_bytes
        self._has_logprobs = has_logprobs
        self._introduced: set[int] = set()
        self._index_to_reader: defaultdict[int, CallReader] | None
        self._index_to_reader = None if new_reader is None else defaultdict(new_reader)
        self._has_called: set[int] = set()

    def score(self, index: int, scores: PromptScores) -> None:
        """Nothing: chats do not show prompt log-probabilities, and no body asks for them."""

    def delta(self, index: int, delta: OutputDelta) -> Json:
        """Return a chunk's choice: new text, and the role the first time."""
        if self._index_to_reader is None:
            said: Json = {"content": delta.text}
        else:
            said = self._read(index, self._index_to_reader[index].push(delta.text))
        return {
            "index": index,
            "delta": {**self._role_once(index), **said},
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": None,
        }

    def finish(self, index: int, finished: OutputFinished) -> Json:
        """Return a chunk's choice: the end."""
        delta = self._role_once(index)
        if self._index_to_reader is not None:
            delta |= self._read(index, self._index_to_reader[index].flush())
        return {"index": index, "delta": delta, "logprobs": None, **self._end(index, finished)}

    def whole(self, index: int, output: CollectedOutput, finished: OutputFinished) -> Json:
        """Return the choice of a whole answer."""
        text = "".join(output.texts)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._index_to_reader is not None:
            reader = self._index_to_reader[index]
            read, rest = reader.push(text), reader.flush()
            calls = [*read.calls, *rest.calls]
            message["content"] = read.content + rest.content
            if calls:
                self._has_called.add(index)
                message["content"] = message["content"] or None
                message["tool_calls"] = [_call_json(piece) for piece in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output.token_ids, output.logprobs),
            **self._end(index, finished),
        }

    def _role_once(self, index: int) -> Json:
        if index in self._introduced:
            return {}
        self._introduced.add(index)
        return {"role": "assistant"}

    def _read(self, index: int, reading: Reading) -> Json:
        said: Json = {"content": reading.content} if reading.content else {}
        if reading.calls:
            self._has_called.add(index)
            said["tool_calls"] = [
                {"index": piece.position, **_call_json(piece)} for piece in reading.calls
            ]
        return said

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


def _call_json(piece: CallPiece) -> Json:
    if piece.call_id is None:
        return {"function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": piece.call_id, "type": "function", "function": function}
