"""The live sequences, by their source (a router's stream) and key, and each request's siblings."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from contract.arrays import Int32Array
from scheduler_svc.core.beams.group import BeamGroup
from scheduler_svc.core.interface.events import Admitted
from scheduler_svc.core.interface.request import OutputSoFar, Request, SeqId, SourceId
from scheduler_svc.core.policies.policy import Rank
from scheduler_svc.core.sequence import SeqStatus, Sequence


class LiveSequences:
    """Holds each sequence from the arrival of its request until the sequence ends.

    The first sequence of a new request is the leader, which computes the prompt. The other
    sequences, its siblings, fork from the leader. The sequences of a resubmitted request have
    diverged and do not fork; the prefix cache finds the blocks that they share. A beam search has a
    sequence for each beam; the first `n` have the keys under which the search reports its outputs.
    """

    def __init__(self) -> None:
        self._by_source: dict[SourceId, dict[int, Sequence]] = {}
        self._num_created = 0
        self.num_siblings = 0
        """Number of sequences that wait for their leader."""
        self.num_foreground = 0
        """Number of outputs of requests above the lowest priority."""
        self._admitted: list[Admitted] = []  # not reported to the sources yet

    def __iter__(self) -> Iterator[Sequence]:
        for by_key in self._by_source.values():
            for seq in by_key.values():
                yield seq
                if seq.group is not None and seq is seq.group.leader:
                    yield from seq.group.seqs[seq.request.n :]

    def add(self, request: Request, rank: Rank, now: float) -> list[Sequence]:
        """Create the unfinished sequences of a request.

        Returns:
            The sequences to queue: only the leader if the request is new or a beam search,
            otherwise all that were created.
        """
        if request.beam is not None:
            return [self._add_search(request, request.beam.width, rank, now)]
        seqs = [
            self._create(request, index, rank, now)
            for index in range(request.n)
            if not (request.outputs and request.outputs[index].finished)
        ]
        self._file(request, seqs)
        if request.outputs:
            return seqs
        leader, *siblings = seqs
        for sibling in siblings:
            sibling.set_status(SeqStatus.SIBLING)
        leader.siblings = siblings
        self.num_siblings += len(siblings)
        return [leader]

    def find(self, source: SourceId, seq_keys: Iterable[int]) -> list[Sequence]:
        """Return the live sequences with these keys; a search is represented by its leader."""
        by_key = self._by_source.get(source, {})
        return _leaders(by_key[key] for key in seq_keys if key in by_key)

    def of_source(self, source: SourceId) -> list[Sequence]:
        """Return all live sequences of a source; a search is represented by its leader."""
        return _leaders(self._by_source.get(source, {}).values())

    def take_siblings(self, leader: Sequence) -> list[Sequence]:
        """Remove and return the siblings of `leader`; the caller changes their status."""
        siblings, leader.siblings = leader.siblings, []
        self.num_siblings -= len(siblings)
        return siblings

    def record_admitted(self, seq: Sequence, num_cached_tokens: int, now: float) -> None:
        """Record an `Admitted` event if a sequence leaves the queue for the first time."""
        if not seq.was_admitted:
            seq.was_admitted = True
            seq.num_cached_tokens = num_cached_tokens
            self._admitted += (
                Admitted(seq.request.source, each.seq_key, num_cached_tokens, now - seq.arrived)
                for each in seq.outputs
            )

    def take_admitted(self) -> tuple[Admitted, ...]:
        """Return the `Admitted` events recorded since the last call."""
        admitted, self._admitted = tuple(self._admitted), []
        return admitted

    def remove(self, seq: Sequence) -> Sequence | None:
        """Remove a sequence that ends, and mark it as finished.

        Returns:
            The sibling that becomes the leader, which the caller must queue; None: no siblings.
        """
        if seq.status is SeqStatus.SIBLING:
            leader = next(
                other for other in self.of_source(seq.request.source) if seq in other.siblings
            )
            leader.siblings.remove(seq)
            self.num_siblings -= 1
        seq.set_status(SeqStatus.FINISHED)
        by_key = self._by_source[seq.request.source]
        del by_key[seq.seq_key]
        self.num_foreground -= not seq.request.is_background
        if not by_key:
            del self._by_source[seq.request.source]
        if not seq.siblings:
            return None
        first, *first.siblings = seq.siblings
        self.num_siblings -= 1
        first.set_status(SeqStatus.WAITING)
        return first

    def requests(self, known_tokens: Callable[[Sequence], Int32Array]) -> tuple[Request, ...]:
        """Return every live request in a form that can be submitted again, oldest first.

        Args:
            known_tokens: Returns int32[N], a copy of a sequence's prompt and output so far.
        """
        by_request: dict[int, list[Sequence]] = {}
        for seq in chain.from_iterable(by_key.values() for by_key in self._by_source.values()):
            by_request.setdefault(id(seq.request), []).append(seq)
        groups = sorted(by_request.values(), key=lambda seqs: min(seq.seq_id for seq in seqs))
        return tuple(resubmittable(seqs, known_tokens) for seqs in groups)

    def _add_search(self, request: Request, width: int, rank: Rank, now: float) -> Sequence:
        """Create the sequences of a beam search; return the leader, which is the one to queue."""
        bare = replace(request, outputs=())  # searches have empty outputs
        seqs = tuple(self._create(bare, index, rank, now) for index in range(width))
        group = BeamGroup(bare, seqs)
        for seq in seqs:
            seq.group = group
            seq.max_total_tokens = len(bare.prompt_token_ids) + 1
        for seq in seqs[1:]:
            seq.set_status(SeqStatus.SPARE)
            # The leader is charged for the prompt
            seq.num_charged_tokens = len(bare.prompt_token_ids)
        self._file(request, group.outputs)
        return group.leader

    def _file(self, request: Request, seqs: Iterable[Sequence]) -> None:
        by_key = self._by_source.setdefault(request.source, {})
        for seq in seqs:
            by_key[seq.seq_key] = seq
            self.num_foreground += not request.is_background

    def _create(self, request: Request, index: int, rank: Rank, now: float) -> Sequence:
        self._num_created += 1
        known = request.prompt_token_ids
        if request.outputs:
            known = np.concatenate([known, request.outputs[index].token_ids])
        return Sequence(
            seq_id=SeqId(self._num_created),
            request=request,
            output_index=index,
            arrived=now,
            rank=rank,
            token_ids=known,
            max_total_tokens=len(request.prompt_token_ids) + request.max_tokens,
            was_admitted=len(known) > len(request.prompt_token_ids),
            num_computed_tokens=len(known) - 1 if len(known) > len(request.prompt_token_ids) else 0,
        )


def _leaders(seqs: Iterable[Sequence]) -> list[Sequence]:
    """Replace the beams of each search by its leader, which occurs once in the result."""
    return list(dict.fromkeys(s if s.group is None else s.group.leader for s in seqs))


def resubmittable(seqs: list[Sequence], known_tokens: Callable[[Sequence], Int32Array]) -> Request:
    """Return a request in a form that can be submitted again.

    Args:
        seqs: The live sequences of the request; at least one.
        known_tokens: Returns int32[N], a copy of a sequence's prompt and output so far.
    """
    request = seqs[0].request
    outputs = [OutputSoFar(np.empty(0, np.int32), finished=True)] * request.n
    for seq in seqs:
        if request.beam is not None:  # beams are not outputs yet
            new = np.empty(0, np.int32)
        else:
            new = known_tokens(seq)[len(request.prompt_token_ids) :]
        outputs[seq.output_index] = OutputSoFar(new, finished=False)
    return replace(request, outputs=tuple(outputs))
