"""Beam searches in the block space: the rows and blocks of each one's beams, step by step.

A search has one sequence for each beam that it may have. The first of them, the leader, stands for
all in the queue. Once it has computed the prompt, the others fork from it. From then on each beam
that computes its last token reports candidates; when all have, the search chooses the next beams,
and these are, for the next step:

    the first child of a beam    goes on in its parent's place: same row, same blocks
    a further child              forks into the place of a beam that has no child: it shares the
                                 parent's full blocks, and starts with a copy of the partial one
    no child                     the place is spare; a row is kept for it

To the worker each step of a beam is a sequence of its own, that may have one token more than it
brings. So a beam never decodes, and no step in flight names it while its next step is prepared.

A search runs as a whole or waits as a whole. When it is preempted its beams' tokens stay, and no
KV: most of it is in blocks that beams share, and the prefix cache has those. It resumes as it
began: the leader, with the tokens of the best beam, computes what is not found; then the others
start from what they have in common with it.
"""

from collections.abc import Iterator
from itertools import chain

from contract.step import Result
from scheduler_svc.core.beams.group import BeamGroup
from scheduler_svc.core.beams.search import Candidates
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefix import KvLookup
from scheduler_svc.core.request import SeqId
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import SeqStatus, Sequence

_NO_ROWS: frozenset[int] = frozenset()


class BeamGroups:
    """The searches that run: starts and stops them, begins steps, applies candidates."""

    def __init__(
        self,
        config: SchedulerConfig,
        rows: Rows,
        running: RunningSet,
        lookup: KvLookup,
        policy: Policy,
    ) -> None:
        self._block_size = config.block_size
        self._rows = rows
        self._running = running
        self._lookup = lookup
        self._policy = policy
        self._groups: dict[SeqId, BeamGroup] = {}  # by leader
        self.num_recomputed_tokens = 0
        """Tokens that beams other than the best had to compute again after a preemption."""

    def __iter__(self) -> Iterator[BeamGroup]:
        return iter(self._groups.values())

    @property
    def rows(self) -> frozenset[int]:
        """The rows whose candidates `apply_candidates` needs."""
        if not self._groups:  # as in almost every step
            return _NO_ROWS
        places = chain.from_iterable(group.places for group in self)
        return frozenset(seq.row for seq in places if seq.row is not None)

    @property
    def num_spares(self) -> int:
        """Rows that are kept for beams."""
        return sum(len(group.spares) for group in self)

    @property
    def num_blocks_due(self) -> int:
        """Blocks that `advance` takes, at most."""
        if not self._groups:
            return 0
        return sum(group.num_blocks_due(self._block_size) for group in self)

    def on_started(self, seq: Sequence) -> None:
        """Keep rows for the other beams if the sequence that was started leads a search."""
        if (group := seq.group) is None:
            return
        self._groups[group.leader.seq_id] = group
        group.places = [group.leader]
        self._rows.num_reserved += len(group.seqs) - 1

    def stop(self, group: BeamGroup) -> None:
        """Take rows and blocks from a running search; its beams' tokens stay."""
        del self._groups[group.leader.seq_id]
        self._rows.num_reserved -= len(group.spares)
        for seq in group.places:
            self._running.stop(seq)
            seq.move(SeqStatus.SPARE)
        group.places, group.parents, group.reports = [], None, {}

    def preempt(self, group: BeamGroup) -> Sequence:
        """Take rows and blocks from a running search; return its leader, which must be queued."""
        leader = group.leader
        has_begun = group.places != [leader]
        self.stop(group)
        leader.move(SeqStatus.WAITING)
        group.queue_leader()
        num_computed = len(leader.token_ids) - 1
        leader.num_computed_tokens = (
            num_computed if has_begun else min(leader.num_computed_tokens, num_computed)
        )
        return leader

    def advance(self, draft: PlanBuilder) -> None:
        """Begin the next step of each search that is ready; `num_blocks_due` blocks are free."""
        for group in self:
            if group.parents is not None:
                self._begin_step(group, group.parents, draft)
            elif group.can_spread:
                self._spread(group)

    def apply_candidates(self, outcome: Result) -> list[BeamGroup]:
        """Take the candidates in a step's result; return the searches that are over."""
        over: list[BeamGroup] = []
        if not self._groups:
            return over
        for row, candidates in _by_row(outcome):
            seq = self._rows.owner(row)
            if seq is None or seq.group is None:
                continue
            group = seq.group
            group.reports[seq.seq_id] = candidates
            if len(group.reports) == len(group.search.beams):
                self._search(group)
                if group.is_over:
                    over.append(group)
        return over

    def _search(self, group: BeamGroup) -> None:
        """Choose the next beams; all have reported."""
        group.parents = group.search.advance([group.reports[seq.seq_id] for seq in group.places])
        group.reports = {}
        if self._policy.has_accounts:
            self._policy.charge(group.leader.rank.account, 0, len(group.places))

    def _begin_step(self, group: BeamGroup, parents: tuple[int, ...], draft: PlanBuilder) -> None:
        """Make places for the new beams, and compute the last token of each."""
        places = group.places
        childless = set(range(len(places))).difference(parents)
        for index in childless:
            self._running.stop(places[index], is_idle=True)
            places[index].move(SeqStatus.SPARE)
        self._rows.num_reserved += len(childless)
        spares, group.places, group.parents = group.spares, [], None
        for parent, beam in zip(parents, group.search.beams, strict=True):
            if places[parent] in group.places:
                child = spares.pop()
                child.token_ids, child.max_total_tokens = beam.token_ids, len(beam.token_ids) + 1
                self._rows.num_reserved -= 1
                self._running.fork(places[parent], child)
            else:
                child = places[parent]
                self._running.go_on(child, beam.token_ids)
            group.places.append(child)
        for seq in group.places:
            # One token each: there is room, because a step has room for one of every row.
            self._running.compute_chunk(seq, draft)

    def _spread(self, group: BeamGroup) -> None:
        """Start the other beams of a search that resumes, beside the best."""
        best, num_tokens = group.leader, group.search.num_tokens
        num_blocks = -(-num_tokens // self._block_size)
        for index, seq in zip(range(1, len(group.search.beams)), group.spares, strict=False):
            seq.token_ids = group.search.beams[index].token_ids
            seq.max_total_tokens = num_tokens + 1
            seq.block_hashes = []
            num_shared = group.num_shared_blocks(index, self._block_size)
            found = self._lookup.find_beyond(seq, best.block_ids[:num_shared])
            num_new = num_blocks - len(found.ready) - len(found.loading)
            self._rows.num_reserved -= 1
            self._running.start(seq, found, num_new)
            self.num_recomputed_tokens += num_tokens - 1 - found.num_tokens
            group.places.append(seq)


def _by_row(outcome: Result) -> Iterator[tuple[int, Candidates]]:
    """Yield the candidates of each row that has some."""
    start = 0
    rows, counts = outcome.candidate_rows.tolist(), outcome.candidate_counts.tolist()
    for row, count in zip(rows, counts, strict=True):
        end = start + count
        yield (
            row,
            Candidates(
                outcome.candidate_token_ids[start:end], outcome.candidate_logprobs[start:end]
            ),
        )
        start = end
