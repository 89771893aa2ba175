"""Runs beam searches: manages the rows and blocks of their beams, step by step.

A search has as many sequences as it may have beams. A sequence that is not a beam now is a *spare*.
The first sequence, the leader, represents the search in the queue. When the leader has computed the
prompt, the other beams fork from it. When a beam has computed its newest token, the worker reports
the beam's *candidates*, its likeliest next tokens. When the candidates of all beams have arrived,
the search chooses the next beams. In the next step:

    the first child of a beam    continues in the row and blocks of its parent
    a further child              forks into a spare: it shares the parent's full blocks, and
                                 starts with a copy of the parent's partial block
    a beam without a child       ends: its sequence becomes a spare with a reserved row

To the worker, each step of a beam is a new sequence that gets exactly one more token. So no plan
counts a beam as a decode, although a beam has the status DECODE between its steps. While the next
step of a beam is prepared, no step in flight refers to the beam.

A search runs as a whole or waits as a whole. A preempted search keeps its beams' tokens but no KV;
most of the KV is in shared blocks, which the prefix cache may still have. When the search resumes,
the leader gets the tokens of the best beam, and computes those that are not cached. Then the other
beams start from the blocks that they have in common with the leader.
"""

from collections.abc import Iterator
from itertools import chain

from contract.step import Result
from scheduler_svc.core.beams.group import BeamGroup
from scheduler_svc.core.beams.search import BeamCandidates
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.request import SeqId
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefix import KvLookup
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.space.kv_groups import KvGroups

_NO_ROWS: frozenset[int] = frozenset()


class BeamGroups:
    """Starts and stops the running searches, begins their steps, and applies their candidates."""

    def __init__(
        self,
        config: SchedulerConfig,
        groups: KvGroups,
        rows: Rows,
        running: RunningSet,
        lookup: KvLookup,
        policy: Policy,
    ) -> None:
        self._block_size = config.block_size
        self._kv_groups = groups
        self._rows = rows
        self._running = running
        self._lookup = lookup
        self._policy = policy
        self._groups: dict[SeqId, BeamGroup] = {}  # by leader
        self.num_recomputed_tokens = 0
        """Number of tokens that resumed searches computed again for beams other than the best."""

    def __iter__(self) -> Iterator[BeamGroup]:
        return iter(self._groups.values())

    @property
    def rows(self) -> frozenset[int]:
        """The rows of all running beams.

        A result that the core gets must have the candidates of these rows.
        """
        if not self._groups:  # true in almost every step
            return _NO_ROWS
        places = chain.from_iterable(group.places for group in self)
        return frozenset(seq.row for seq in places if seq.row is not None)

    @property
    def num_spares(self) -> int:
        """Number of rows reserved for beams."""
        return sum(len(group.spares) for group in self)

    @property
    def num_blocks_due(self) -> int:
        """An upper bound on the number of blocks that `advance` allocates."""
        if not self._groups:
            return 0
        return sum(map(self._num_blocks_due, self))

    def demand(self, group: BeamGroup) -> tuple[int, int]:
        """Return how many rows and how many blocks, of all KV groups, a queued search needs.

        The rows include the leader's. The blocks come on top of those with which the leader starts.
        """
        num_rows, num_blocks = group.demand(self._block_size)
        if self._kv_groups.is_plain or len(group.search.beams) == 1:
            return num_rows, num_blocks * self._kv_groups.num
        return num_rows, self._most_blocks_of_others(group)

    def _num_blocks_due(self, group: BeamGroup) -> int:
        if group.can_spread and not self._kv_groups.is_plain:
            return self._most_blocks_of_others(group)
        return group.num_blocks_due(self._block_size) * self._kv_groups.num

    def _most_blocks_of_others(self, group: BeamGroup) -> int:
        """Return how many blocks the other beams need if they share none with the best beam.

        The other beams may need blocks that the best beam has already given back, because these
        blocks are behind its window.
        """
        num_others = len(group.search.beams) - 1
        return num_others * self._kv_groups.num_needed(group.search.num_tokens)

    def on_started(self, seq: Sequence) -> None:
        """If the started sequence leads a search, reserve rows for the search's other sequences."""
        if (group := seq.group) is None:
            return
        self._groups[group.leader.seq_id] = group
        group.places = [group.leader]
        self._rows.num_reserved += len(group.seqs) - 1

    def stop(self, group: BeamGroup) -> None:
        """Take the rows and blocks away from a running search; the search keeps its tokens."""
        del self._groups[group.leader.seq_id]
        self._rows.num_reserved -= len(group.spares)
        for seq in group.places:
            self._running.stop(seq)
            seq.set_status(SeqStatus.SPARE)
        group.places, group.parents, group.reports = [], None, {}

    def preempt(self, group: BeamGroup) -> Sequence:
        """Stop a running search and return its leader; the caller must queue the leader."""
        leader = group.leader
        has_begun = group.places != [leader]
        self.stop(group)
        leader.set_status(SeqStatus.WAITING)
        group.queue_leader()
        num_computed = len(leader.token_ids) - 1
        leader.num_computed_tokens = (
            num_computed if has_begun else min(leader.num_computed_tokens, num_computed)
        )
        return leader

    def advance(self, builder: PlanBuilder) -> None:
        """Begin the next step of each search that has chosen new beams.

        Also start the other beams of each resumed search whose best beam has all its KV. The caller
        has checked that `num_blocks_due` blocks are available.
        """
        for group in self:
            if group.parents is not None:
                self._begin_step(group, group.parents, builder)
            elif group.can_spread:
                self._spread(group)

    def apply_candidates(self, result: Result) -> list[BeamGroup]:
        """Apply the candidates of a step's result; return the searches that have ended."""
        over: list[BeamGroup] = []
        if not self._groups:
            return over
        for row, candidates in _by_row(result):
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
        """Choose the next beams, after the candidates of all beams have arrived."""
        group.parents = group.search.advance([group.reports[seq.seq_id] for seq in group.places])
        group.reports = {}
        if self._policy.has_accounts:
            self._policy.charge(group.leader.rank.account, 0, len(group.places))

    def _begin_step(self, group: BeamGroup, parents: tuple[int, ...], builder: PlanBuilder) -> None:
        """Give each new beam a sequence, and plan to compute the beam's newest token."""
        places = group.places
        childless = set(range(len(places))).difference(parents)
        for index in childless:
            self._running.stop(places[index], is_idle=True)
            places[index].set_status(SeqStatus.SPARE)
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
                self._running.extend(child, beam.token_ids)
            group.places.append(child)
        for seq in group.places:
            # Each beam computes one token, and a step always has room for one token per row.
            self._running.compute_chunk(seq, builder)

    def _spread(self, group: BeamGroup) -> None:
        """Start the beams of a resumed search, except the best one."""
        best, num_tokens = group.leader, group.search.num_tokens
        for index, seq in zip(range(1, len(group.search.beams)), group.spares, strict=False):
            seq.token_ids = group.search.beams[index].token_ids
            seq.max_total_tokens = num_tokens + 1
            seq.block_hashes = []
            num_shared = group.num_shared_blocks(index, self._block_size)
            shared = best.block_ids[: num_shared * self._kv_groups.num]
            found = self._lookup.find_beyond(seq, shared)
            self._rows.num_reserved -= 1
            self._running.start(seq, found)
            self.num_recomputed_tokens += num_tokens - 1 - found.num_tokens
            group.places.append(seq)


def _by_row(result: Result) -> Iterator[tuple[int, BeamCandidates]]:
    """Yield each row that has candidates, together with the candidates."""
    start = 0
    rows, counts = result.candidate_rows.tolist(), result.candidate_counts.tolist()
    for row, count in zip(rows, counts, strict=True):
        end = start + count
        yield (
            row,
            BeamCandidates(
                result.candidate_token_ids[start:end], result.candidate_logprobs[start:end]
            ),
        )
        start = end
