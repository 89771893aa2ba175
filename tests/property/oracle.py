"""The expected output of each request, and the expected content of each KV slot.

A slot's content is the whole context up to its token, so KV from a block that was freed too early,
copied too late, shared wrongly or found by a wrong hash is always detected. The next token is
a function of the context alone, so a sequence's output does not depend on other sequences, and is
known in advance. The oracle knows no blocks, rows or steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np

from scheduler_svc.core.interface.events import Finished, StepEvents
from scheduler_svc.core.interface.request import FinishReason, OutputSoFar, Request
from tests.property.beams import Found, expected_search, judge_search

Context = tuple[object, ...]
END = 1  # the vocabulary is {0, 1}; 1 may end a sequence

Place = tuple[int, int]
"""A sequence's source and its key there."""


def slot_content(salt: str, tokens: Sequence[int], position: int) -> Context:
    """Return what the slot of the token at `position` must hold."""
    return (salt, *tokens[: position + 1])


def next_token(output_index: int, context: Context) -> int:
    """Return the token that the model draws after `context`; one in four is 1."""
    return int(crc32(repr(("next", (output_index, context))).encode()) % 4 == 0)


def stops(context: Context) -> bool:
    """Return whether the last token of `context` ends the sequence."""
    return context[-1] == END and crc32(repr(context).encode()) % 2 == 0


def expected_output(
    salt: str, output_index: int, prompt: Sequence[int], max_tokens: int
) -> list[int]:
    """Return the whole expected output of a sequence."""
    context: Context = (salt, *prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token(output_index, context))
        context = (*context, output[-1])
        if stops(context):
            break
    return output


@dataclass
class Expectation:
    """A live sequence: its expected output, and its output so far."""

    request: Request
    output: list[int]
    received: list[int] = field(default_factory=list)
    found: Found | None = None  # for a beam search, because its output comes at the end

    @property
    def is_complete(self) -> bool:
        return self.received == self.output


class Oracle:
    """Checks the events that the core sends to sources; fails at the first wrong token or end."""

    def __init__(self) -> None:
        self.live: dict[Place, Expectation] = {}

    def submit(self, request: Request) -> None:
        """Record that a request was accepted."""
        prompt, salt = request.prompt_token_ids.tolist(), request.cache_salt
        search: list[Found | None] = [None] * request.n
        if (beam := request.beam) is not None:
            lengths = request.max_tokens, request.min_tokens
            search = [*expected_search(salt, prompt, beam, *lengths), *search][: request.n]
        for index in range(request.n):
            place = request.source, request.first_seq_key + index
            assert place not in self.live
            output = [] if beam else expected_output(salt, index, prompt, request.max_tokens)
            self.live[place] = Expectation(request, output, found=search[index])

    def check(self, events: StepEvents) -> None:
        """Check new tokens, then ends."""
        for source, key, token in zip(
            events.sources, events.seq_keys, events.token_ids, strict=True
        ):
            seq = self.live[int(source), int(key)]
            assert not seq.is_complete, "a token after the last"
            assert token == seq.output[len(seq.received)], f"token {len(seq.received)} is wrong"
            seq.received.append(int(token))
        for finished in events.finished:
            seq = self.live.pop((finished.source, finished.seq_key))
            assert seq.is_complete
            if seq.request.beam is not None:
                judge_search(finished, seq.found)
            elif finished.reason is FinishReason.LENGTH:
                assert len(seq.output) == seq.request.max_tokens
            else:
                assert finished.reason is FinishReason.STOP
                assert finished.stop_token_id == seq.output[-1]

    def expire(self, ends: Iterable[Finished], now: float) -> None:
        """Check ends by deadline."""
        for finished in ends:
            assert finished.reason is FinishReason.DEADLINE
            seq = self.live.pop((finished.source, finished.seq_key))
            assert seq.request.deadline is not None
            assert seq.request.deadline <= now

    def cancel(self, place: Place, ends: Sequence[Finished]) -> None:
        """Check the ends after one live sequence was cancelled; a search ends as a whole."""
        request = self.live[place].request
        first, keys = request.first_seq_key, range(request.n)
        places = [(place[0], first + key) for key in keys] if request.beam else [place]
        assert [(end.source, end.seq_key) for end in ends] == places
        assert {end.reason for end in ends} == {FinishReason.CANCELLED}
        for each in places:
            del self.live[each]

    def resubmittable(self) -> list[Request]:
        """Return the live requests as their routers submit them again, with all received tokens."""
        by_request = {id(seq.request): seq.request for seq in self.live.values()}
        return [self._resubmittable(request) for request in by_request.values()]

    def without_ended(self, request: Request) -> Request | None:
        """Return a resubmitted request without ended outputs; None if it was cancelled."""
        keys = range(request.first_seq_key, request.first_seq_key + request.n)
        is_live = any((request.source, key) in self.live for key in keys)
        return self._resubmittable(request) if is_live else None

    def _resubmittable(self, request: Request) -> Request:
        outputs = []
        for index in range(request.n):
            seq = self.live.get((request.source, request.first_seq_key + index))
            received = np.array([] if seq is None else seq.received, np.int32)
            outputs.append(OutputSoFar(received, finished=seq is None))
        is_new = not any(len(output.token_ids) or output.finished for output in outputs)
        return replace(request, outputs=() if is_new else tuple(outputs))

    def lose(self, source: int) -> None:
        """Forget a lost source with its requests."""
        self.live = {place: seq for place, seq in self.live.items() if place[0] != source}
