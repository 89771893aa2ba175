"""Requests that wait for a worker to be attached: new ones, and those of a worker that was lost."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from scheduler_svc.core.events import Finished
from scheduler_svc.core.request import FinishReason, OutputSoFar, Request, SeqKey, SourceId
from scheduler_svc.domain import SubmitRequest
from scheduler_svc.workers.request_ends import live_outputs, num_live_seqs

_NOTHING_YET = OutputSoFar(token_ids=np.empty(0, dtype=np.int32), finished=False)


class UnplacedRequests:
    """Requests in the order in which they came."""

    def __init__(self) -> None:
        self._commands: list[SubmitRequest] = []

    @property
    def num_seqs(self) -> int:
        """Sequences that wait and have not ended."""
        return sum(num_live_seqs(command.request) for command in self._commands)

    def has_with(self, salt: str) -> bool:
        """Whether one of them has a cache salt that begins so."""
        return any(command.request.cache_salt.startswith(salt) for command in self._commands)

    def add(self, command: SubmitRequest) -> None:
        """Keep one more."""
        self._commands.append(command)

    def take_all(self) -> list[SubmitRequest]:
        """Keep none any more, and return those that were."""
        commands, self._commands = self._commands, []
        return commands

    def cancel(self, source: SourceId, seq_keys: Sequence[SeqKey]) -> tuple[Finished, ...]:
        """End those of `seq_keys` that wait and live; unknown ones are ignored."""
        keys = frozenset(seq_keys)
        finished: list[Finished] = []
        for command in self.take_all():
            request = command.request
            first = request.first_seq_key
            ended = [i for i in live_outputs(request) if first + i in keys]
            if ended and request.beam is not None:
                ended = live_outputs(request)  # a search ends as a whole
            if request.source != source or not ended:
                self.add(command)
                continue
            finished += (Finished(source, SeqKey(first + i), FinishReason.CANCELLED) for i in ended)
            rest = _without(request, ended)
            if num_live_seqs(rest):
                self.add(replace(command, request=rest))
        return tuple(finished)

    def drop_source(self, source: SourceId) -> None:
        """Forget everything of `source`."""
        self._commands = [c for c in self._commands if c.request.source != source]


def _without(request: Request, output_indices: Iterable[int]) -> Request:
    outputs = list(request.outputs) or [_NOTHING_YET] * request.n
    for index in output_indices:
        outputs[index] = replace(outputs[index], finished=True)
    return replace(request, outputs=tuple(outputs))
