"""The JSON of completions, and the JSON that all calls share: usage, models, ends of choices.

Completions and chats share the code of `answer.py`, which streams or collects them. Only the
`ChoiceShape`, which makes the JSON of their choices, differs. A shape belongs to one call and
tracks what has been sent of each choice.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from contract.outputs import OutputDelta, OutputFinished, PromptScores, TokenLogprob, Usage
from contract.request import Model

Json: TypeAlias = dict[str, object]

TokenText: TypeAlias = Callable[[int], str]
"""Returns the text of one token id alone."""

LOWEST_LOGPROB = -9999.0
"""The value that replaces -inf, which JSON cannot represent."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is shown before its output."""

    text: str
    token_ids: Sequence[int]


@dataclass(slots=True)
class CollectedOutput:
    """One output, collected from its events."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: OutputFinished | None = None

    def add(self, delta: OutputDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs


class ChoiceShape(Protocol):
    """Makes the JSON of choices, for one kind of call."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    is_text_only: bool
    """Whether `delta` returns a string, the new text, for all deltas of a choice but the first."""

    def score(self, index: int, scores: PromptScores) -> None:
        """Add more prompt log-probabilities of a choice; called before its first delta."""

    def once(self) -> Json:
        """Return the extra fields that a whole answer or a stream's first event has."""

    def delta(self, index: int, delta: OutputDelta) -> Json | str:
        """Return a chunk's choice, or only its text, as `is_text_only` says.

        A returned `text` stands for the choice `choice_of_text(index, text)`.
        """

    def choice_of_text(self, index: int, text: str) -> Json:
        """Return a chunk's choice that has only a text."""

    def finish(self, index: int, finished: OutputFinished) -> Json:
        """Return the last chunk's choice."""

    def whole(self, index: int, output: CollectedOutput, finished: OutputFinished) -> Json:
        """Return the choice of a whole answer."""


class CompletionShape:
    """Choices of /v1/completions.

    Log-probabilities of completions have each token's offset in the text: the total length of the
    preceding tokens. The offset is wrong if a preceding token ends within a character.
    """

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self,
        token_text: TokenText,
        *,
        has_logprobs: bool,
        prompt: Callable[[int], Echo],
        echo: bool = False,
        is_echo_only: bool = False,
        has_prompt_logprobs: bool = False,
        has_token_ids: bool = False,
    ) -> None:
        """`prompt` returns a choice's prompt; it is called with the choice's index.

        `is_echo_only`: whether the client wants only the prompt back, and no output.
        """
        self._is_echo_only = is_echo_only
        self._has_token_ids = has_token_ids
        self._token_text = token_text
        self._has_logprobs = has_logprobs
        self._prompt = prompt
        self._echo = echo
        self._has_prompt_logprobs = has_prompt_logprobs
        self.is_text_only = not (has_logprobs or has_token_ids or is_echo_only)
        self._index_to_offset: defaultdict[int, int] = defaultdict(int)
        self._scores: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        self._started: set[int] = set()

    def score(self, index: int, scores: PromptScores) -> None:
        """Add more prompt log-probabilities of a choice."""
        self._scores[index] += scores.logprobs

    def once(self) -> Json:
        """Return no fields."""
        return {}

    def delta(self, index: int, delta: OutputDelta) -> Json | str:
        """Return a chunk's choice with new text.

        If the call asks for `echo`, the text of a choice's first chunk begins with the prompt.
        """
        if self.is_text_only and index in self._started:
            return delta.text
        return {
            "index": index,
            **self._shown(index, delta.text, delta.token_ids, delta.logprobs),
            "finish_reason": None,
        }

    def choice_of_text(self, index: int, text: str) -> Json:
        """Return a chunk's choice that has only a text."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def finish(self, index: int, finished: OutputFinished) -> Json:
        """Return the last chunk's choice."""
        return {"index": index, "text": "", "logprobs": None, **end_json(finished)}

    def whole(self, index: int, output: CollectedOutput, finished: OutputFinished) -> Json:
        """Return the choice of a whole answer."""
        return {
            "index": index,
            **self._shown(index, "".join(output.texts), output.token_ids, output.logprobs),
            **end_json(finished),
        }

    def _shown(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
    ) -> Json:
        """Return a choice's fields for new text.

        For a choice's first text, the fields also show the prompt's text, token ids and
        log-probabilities, as far as the call asks for them.
        """
        if self._is_echo_only:
            text, token_ids, logprobs = "", (), ()
        shown: Json = {"token_ids": list(token_ids)} if self._has_token_ids else {}
        if index in self._started:
            return {"text": text, "logprobs": self._logprobs(index, token_ids, logprobs), **shown}
        self._started.add(index)
        scores = self._scores.get(index)
        if self._has_token_ids:
            shown["prompt_token_ids"] = list(self._prompt(index).token_ids)
        if self._has_prompt_logprobs and scores is not None:
            shown["prompt_logprobs"] = prompt_logprobs_json(
                self._token_text, self._prompt(index).token_ids, scores
            )
        if self._echo:
            prompt = self._prompt(index)
            text = prompt.text + text
            token_ids = [*prompt.token_ids, *token_ids]
            logprobs = [None, *(scores or ()), *logprobs]
        return {"text": text, "logprobs": self._logprobs(index, token_ids, logprobs), **shown}

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> Json | None:
        if not self._has_logprobs:
            return None
        tokens = [self._token_text(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._index_to_offset[index])
            self._index_to_offset[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if entry is None else finite(entry.logprob) for entry in logprobs
            ],
            "top_logprobs": [
                None if entry is None else self._top(token, entry)
                for token, entry in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token: str, entry: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            # Tokens with the same text have the same key here: keep the likeliest, which comes
            # first.
            top.setdefault(self._token_text(token_id), finite(logprob))
        top.setdefault(token, finite(entry.logprob))  # like OpenAI, add the token that was drawn
        return top


def prompt_logprobs_json(
    token_text: TokenText, prompt: Sequence[int], scores: Sequence[TokenLogprob]
) -> list[Json | None]:
    """Return the log-probabilities of a prompt's tokens in vLLM's form: an entry per token.

    The entry of the first token is None. Each further entry maps token ids to log-probabilities:
    the id of the prompt's token, and the ids of the likeliest tokens at its position.
    """

    def scored(token_id: int, entry: TokenLogprob) -> Json:
        logprobs = {token_id: entry.logprob} | dict(entry.top)
        return {
            str(shown_id): {"logprob": finite(logprob), "decoded_token": token_text(shown_id)}
            for shown_id, logprob in logprobs.items()
        }

    return [None, *map(scored, prompt[1:], scores)]


def usage_json(usages: Sequence[Usage]) -> Json:
    """Return the sum of `usages` as JSON; a call has one usage for each of its requests."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    reasoning_tokens = sum(usage.reasoning_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "pinned_tokens": sum(usage.pinned_tokens for usage in usages),
        },
    }


def model_json(model: Model, created: int) -> Json:
    """Return a model's JSON, with the fields `root`, `max_model_len` and `parent` as in vLLM."""
    described: Json = {
        "id": model.id,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": model.id,
    }
    if model.max_model_len:
        described["max_model_len"] = model.max_model_len
    if model.parent:
        described["parent"] = model.parent
    return described


def end_json(finished: OutputFinished) -> Json:
    """Return the fields that end a choice."""
    # `stop_reason` is vLLM's: the stop string or stop token.
    stopped_by = finished.stop_token_id if finished.stop_string is None else finished.stop_string
    end: Json = {"finish_reason": finished.finish_reason.value, "stop_reason": stopped_by}
    if finished.cumulative_logprob is not None:  # Quire extension; vLLM has it in Python only
        end["cumulative_logprob"] = finished.cumulative_logprob
    return end


def finite(logprob: float) -> float:
    """Return a log-probability, with `LOWEST_LOGPROB` instead of -inf."""
    return max(logprob, LOWEST_LOGPROB)
