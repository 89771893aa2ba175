"""The JSON objects that clients get: of completions, and of what every kind of call has.

Completions and chats differ only in the shape of a choice; `Shape` is that difference, and
everything that streams or collects is written once, in `answer.py`. A shape belongs to one call: it
remembers, for each choice, what its stream has carried so far.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from contract.outputs import OutputDelta, OutputFinished, PromptScores, TokenLogprob, Usage
from contract.request import Model

Json: TypeAlias = dict[str, object]

TokenText: TypeAlias = Callable[[int], str]
"""The text of one token id alone."""

LOWEST_LOGPROB = -9999.0
"""Stands for the logarithm of zero, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt, to be shown before its output."""

    text: str
    token_ids: Sequence[int]


@dataclass(slots=True)
class CollectedOutput:
    """One output, as its events arrive."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: OutputFinished | None = None

    def add(self, delta: OutputDelta) -> None:
        """Append what came."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs


class Shape(Protocol):
    """How one kind of call shows its choices."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def score(self, index: int, scores: PromptScores) -> None:
        """Take what the model makes of a choice's prompt, before the choice's first delta."""

    def delta(self, index: int, delta: OutputDelta) -> Json:
        """The choice of a stream's chunk: new text."""

    def finish(self, index: int, finished: OutputFinished) -> Json:
        """The choice of a stream's chunk: the end."""

    def whole(self, index: int, output: CollectedOutput, finished: OutputFinished) -> Json:
        """The choice of an answer in one piece."""


class CompletionShape:
    """Choices of /v1/completions.

    The legacy log-probabilities give each token's offset in the text: here the sum of the lengths
    of the tokens before it, which is that as long as no token ends within a character.
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
        has_prompt_logprobs: bool = False,
    ) -> None:
        """`prompt` tells the prompt of a choice that has begun."""
        self._token_text = token_text
        self._has_logprobs = has_logprobs
        self._prompt = prompt
        self._echo = echo
        self._has_prompt_logprobs = has_prompt_logprobs
        self._index_to_offset: defaultdict[int, int] = defaultdict(int)
        self._scores: dict[int, PromptScores] = {}
        self._started: set[int] = set()

    def score(self, index: int, scores: PromptScores) -> None:
        """Take what the model makes of a choice's prompt."""
        self._scores[index] = scores

    def delta(self, index: int, delta: OutputDelta) -> Json:
        """The choice of a stream's chunk: new text, the first time with the prompt."""
        return {
            "index": index,
            **self._shown(index, delta.text, delta.token_ids, delta.logprobs),
            "finish_reason": None,
        }

    def finish(self, index: int, finished: OutputFinished) -> Json:
        """The choice of a stream's chunk: the end."""
        return {"index": index, "text": "", "logprobs": None, **end_json(finished)}

    def whole(self, index: int, output: CollectedOutput, finished: OutputFinished) -> Json:
        """The choice of an answer in one piece."""
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
        """Text and log-probabilities, the first time with the prompt if it is asked for."""
        if index in self._started:
            return {"text": text, "logprobs": self._logprobs(index, token_ids, logprobs)}
        self._started.add(index)
        scores = self._scores.get(index)
        shown: Json = {}
        if self._has_prompt_logprobs and scores is not None:
            scored = self._prompt(index).token_ids[1:]
            shown["prompt_logprobs"] = [None, *map(self._prompt_logprob, scored, scores.logprobs)]
        if self._echo:
            prompt = self._prompt(index)
            text = prompt.text + text
            token_ids = [*prompt.token_ids, *token_ids]
            logprobs = [None, *(() if scores is None else scores.logprobs), *logprobs]
        return {"text": text, "logprobs": self._logprobs(index, token_ids, logprobs), **shown}

    def _prompt_logprob(self, token_id: int, entry: TokenLogprob) -> Json:
        """As vLLM shows it: the likeliest and the prompt's own, by token id."""
        scores = {token_id: entry.logprob} | dict(entry.top)
        return {
            str(shown_id): {
                "logprob": finite(logprob),
                "decoded_token": self._token_text(shown_id),
            }
            for shown_id, logprob in scores.items()
        }

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
            # Ids of the same text collide in this shape: the likeliest, which comes first, stays.
            top.setdefault(self._token_text(token_id), finite(logprob))
        top.setdefault(token, finite(entry.logprob))  # OpenAI adds the one that was drawn
        return top


def usage_json(usages: Sequence[Usage]) -> Json:
    """What the prompts of one call cost together."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "pinned_tokens": sum(usage.pinned_tokens for usage in usages),
        },
    }


def model_json(model: Model, created: int) -> Json:
    """One model; `root`, `max_model_len` and an adapter's `parent` are vLLM's, not OpenAI's."""
    described: Json = {
        "id": model.id,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": model.id,
        "max_model_len": model.max_model_len,
    }
    return described | {"parent": model.parent} if model.parent else described


def end_json(finished: OutputFinished) -> Json:
    """What a choice says of its end."""
    # `stop_reason` is vLLM's: which stop string or stop token it was.
    stopped_by = finished.stop_token_id if finished.stop_string is None else finished.stop_string
    end: Json = {"finish_reason": finished.finish_reason.value, "stop_reason": stopped_by}
    if finished.cumulative_logprob is not None:  # nobody's; vLLM has it in Python only
        end["cumulative_logprob"] = finished.cumulative_logprob
    return end


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, LOWEST_LOGPROB)
