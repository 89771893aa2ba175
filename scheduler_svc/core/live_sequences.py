"""The live sequences by the names that their sources know, and which of them share a request."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from contract.arrays import Int32Array
from scheduler_svc.core.beams.group import BeamGroup
from scheduler_svc.core.events import Admitted
from scheduler_svc.core.policies.policy import Rank
from scheduler_svc.core.request import OutputSoFar, Request, SeqId, SourceId
from scheduler_svc.core.sequence import SeqStatus, Sequence


class LiveSequences:
    """Every sequence from its request's arrival to its end; the owner of the siblings' lists.

    The first sequence of a new request leads: it computes the prompt, and the others, its siblings,
    fork from it. Resubmitted sequences have diverged; what they share, the prefix cache finds. A
    beam search has a sequence for each beam; the first `n` have the names of its outputs.
    """

    def __init__(self) -> None:
        self._by_source: dict[SourceId, dict[int, Sequence]] = {}
        self._num_created = 0
        self.num_siblings = 0
        """Sequences that wait for their leader."""
        self._admitted: list[Admitted] = []  # their sources have not heard of it yet

    def __iter__(self) -> Iterator[Sequence]:
        for by_key in self._by_source.values():
            for seq in by_key.values():
                yield seq
                if seq.group is not None and seq is seq.group.leader:
                    yield from seq.group.seqs[seq.request.n :]

    def add(self, request: Request, rank: Rank, now: float) -> list[Sequence]:
        """Create the sequences of a request that are not finished.

        Returns:
            Those that can be queued; the others are siblings of the first.
        """
        if request.beam is not None:
            return [self._add_search(request, request.beam.width, rank, now)]
        seqs = [
            self._create(request, index, rank, now)
            for index in range(request.n)
            if not (request.outputs and request.outputs[index].finished)
        ]
        by_key = self._by_source.setdefault(request.source, {})
        by_key.update((seq.seq_key, seq) for seq in seqs)
        if request.outputs:
            return seqs
        leader, *siblings = seqs
        for sibling in siblings:
            sibling.move(SeqStatus.SIBLING)
        leader.siblings = siblings
        self.num_siblings += len(siblings)
        return [leader]

    def find(self, source: SourceId, seq_keys: Iterable[int]) -> list[Sequence]:
        """Return those of a source's sequences that are live; of a search its leader."""
        by_key = self._by_source.get(source, {})
        return _leaders(by_key[key] for key in seq_keys if key in by_key)

    def of_source(self, source: SourceId) -> list[Sequence]:
        """Return all sequences of a source; of a search its leader."""
        return _leaders(self._by_source.get(source, {}).values())

    def take_siblings(self, leader: Sequence) -> list[Sequence]:
        """Return the siblings, which no longer wait for `leader`; the caller moves them on."""
        siblings, leader.siblings = leader.siblings, []
        self.num_siblings -= len(siblings)
        return siblings

    def record_admitted(self, seq: Sequence, num_cached_tokens: int, now: float) -> None:
        """Record that a sequence left the queue, if it is for the first time; for its source."""
        if not seq.was_admitted:
            seq.was_admitted = True
            seq.num_cached_tokens = num_cached_tokens
            self._admitted += (
                Admitted(seq.request.source, each.seq_key, num_cached_tokens, now - seq.arrived)
                for each in seq.outputs
            )

    def take_admitted(self) -> tuple[Admitted, ...]:
        """Return what was recorded since the last call."""
        admitted, self._admitted = tuple(self._admitted), []
        return admitted

    def remove(self, seq: Sequence) -> Sequence | None:
        """Forget a sequence that ends, and mark it as finished.

        Returns:
            The sibling that leads from now on, and must be queued; None: there is none.
        """
        if seq.status is SeqStatus.SIBLING:
            leader = next(
                other for other in self.of_source(seq.request.source) if seq in other.siblings
            )
            leader.siblings.remove(seq)
            self.num_siblings -= 1
        seq.move(SeqStatus.FINISHED)
        by_key = self._by_source[seq.request.source]
        del by_key[seq.seq_key]
        if not by_key:
            del self._by_source[seq.request.source]
        if not seq.siblings:
            return None
        first, *first.siblings = seq.siblings
        seq.siblings = []
        self.num_siblings -= 1
        first.move(SeqStatus.WAITING)
        return first

    def requests(self, known_tokens: Callable[[Sequence], Int32Array]) -> tuple[Request, ...]:
        """Return every live request as it can be submitted again, oldest first.

        Args:
            known_tokens: int32[N], a copy of a sequence's prompt and output so far.
        """
        by_request: dict[int, list[Sequence]] = {}
        for seq in chain.from_iterable(by_key.values() for by_key in self._by_source.values()):
            by_request.setdefault(id(seq.request), []).append(seq)
        groups = sorted(by_request.values(), key=lambda seqs: min(seq.seq_id for seq in seqs))
        return tuple(resubmittable(seqs, known_tokens) for seqs in groups)

    def _add_search(self, request: Request, width: int, rank: Rank, now: float) -> Sequence:
        """Create the sequences of a beam search; return the one that can be queued."""
        bare = replace(request, outputs=())  # they are empty
        seqs = tuple(self._create(bare, index, rank, now) for index in range(width))
        group = BeamGroup(bare, seqs)
        for seq in seqs:
            seq.group = group
            seq.max_total_tokens = len(bare.prompt_token_ids) + 1
        for seq in seqs[1:]:
            seq.move(SeqStatus.SPARE)
            seq.num_charged_tokens = len(bare.prompt_token_ids)  # to the first
        by_key = self._by_source.setdefault(request.source, {})
        by_key.update((seq.seq_key, seq) for seq in group.outputs)
        return group.leader

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
    """Return what ends on its own: sequences that are no beams, and each search's leader, once."""
    return list(dict.fromkeys(s if s.group is None else s.group.leader for s in seqs))


def resubmittable(seqs: list[Sequence], known_tokens: Callable[[Sequence], Int32Array]) -> Request:
    """Return a request as it can be submitted again.

    Args:
        seqs: Its live sequences; at least one.
        known_tokens: int32[N], a copy of a sequence's prompt and output so far.
    """
    request = seqs[0].request
    outputs = [OutputSoFar(np.empty(0, np.int32), finished=True)] * request.n
    for seq in seqs:
        if request.beam is not None:  # what its beams have is no output yet
            new = np.empty(0, np.int32)
        else:
            new = known_tokens(seq)[len(request.prompt_token_ids) :]
        outputs[seq.output_index] = OutputSoFar(new, finished=False)
    return replace(request, outputs=tuple(outputs))
