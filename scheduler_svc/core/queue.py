"""The sequences that wait for admission, in the policy's order and by deadline.

Sequences that have few tokens to compute are *short*, all others are *long*. Short sequences wait
in one lane, long ones in another. The policy gives each sequence a level and an account
(`policies/policy.py`). A lane has one *line* for each level and account. Within a line the order is
fixed. So the first sequence of a lane is the first in one of the lines of the lane's lowest level,
and finding this sequence costs O(accounts).
"""

from bisect import bisect_left, insort
from collections.abc import Mapping

from scheduler_svc.core.interface.request import SeqId
from scheduler_svc.core.policies.policy import Key, Policy, SortKey, sort_key
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.space.marked_heap import MarkedHeap


class WaitingQueue:
    """A queue with two lanes, for short and long sequences.

    The number of long sequences that prefill at the same time is limited (`TokenBudget.may_start`).
    While a long sequence waits because of this limit, short sequences overtake it.
    """

    def __init__(self, policy: Policy, long_prefill_threshold: int) -> None:
        """Make an empty queue.

        Args:
            policy: Gives the order of the sequences.
            long_prefill_threshold: A sequence is long if it has more tokens to compute than this;
                0: no sequence is long.
        """
        self._policy = policy
        self._threshold = long_prefill_threshold
        self._short = _Lane(policy)
        self._long = _Lane(policy)
        self._seq_id_to_lane: dict[SeqId, _Lane] = {}
        self.num_swapped = 0
        """Number of SWAPPED sequences in the queue."""
        self._seq_id_to_tokens: dict[SeqId, int] = {}
        self.num_tokens = 0
        """Number of tokens that the queued sequences must compute, less the cached tokens that
        `discount_cached` has subtracted."""
        self.num_short_tokens = 0
        """The part of `num_tokens` that belongs to short sequences."""
        self.num_short = 0
        """Number of short sequences in the queue."""
        self._num_waiting: dict[str, int] = {}  # by account
        self._deadlines: MarkedHeap[Sequence] = MarkedHeap()

    def __len__(self) -> int:
        return len(self._seq_id_to_lane)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._seq_id_to_lane

    def push(self, seq: Sequence) -> None:
        num_computed = seq.num_computed_tokens if seq.status is SeqStatus.SWAPPED else 0
        num_tokens = len(seq.token_ids) - num_computed
        self._seq_id_to_tokens[seq.seq_id] = num_tokens
        is_long = 0 < self._threshold < num_tokens
        lane = self._long if is_long else self._short
        self._count(lane, num_tokens)
        self.num_short += not is_long
        self.num_swapped += seq.status is SeqStatus.SWAPPED
        self._seq_id_to_lane[seq.seq_id] = lane
        account = seq.rank.account
        count = self._num_waiting.get(account, 0)
        self._num_waiting[account] = count + 1
        if count == 0:
            self._policy.began_waiting(account)
        lane.push(seq)
        if seq.request.deadline is not None:
            self._deadlines.push((seq.request.deadline,), seq, seq.seq_id)

    def discount_cached(self, seq: Sequence, num_cached_tokens: int) -> None:
        """Subtract `num_cached_tokens` from the number of tokens that `seq` must compute.

        The prefix cache has the KV of these tokens.
        """
        self._seq_id_to_tokens[seq.seq_id] -= num_cached_tokens
        self._count(self._seq_id_to_lane[seq.seq_id], -num_cached_tokens)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence, which must still have the status that it had in the queue."""
        self.num_swapped -= seq.status is SeqStatus.SWAPPED
        lane = self._seq_id_to_lane.pop(seq.seq_id)
        lane.remove(seq)
        self.num_short -= lane is self._short
        self._count(lane, -self._seq_id_to_tokens.pop(seq.seq_id))
        self._deadlines.discard(seq)
        account = seq.rank.account
        self._num_waiting[account] -= 1
        if self._num_waiting[account] == 0:
            del self._num_waiting[account]
            self._policy.stopped_waiting(account)

    def first(self, *, may_be_long: bool = True) -> Sequence | None:
        """Return the first sequence in order without removing it.

        If not `may_be_long`, only short sequences are considered.
        """
        if not self._seq_id_to_lane:
            return None
        lanes = (self._short, self._long) if may_be_long else (self._short,)
        heads = [head for lane in lanes if (head := lane.first()) is not None]
        return min(heads, key=_head_key)[1] if heads else None

    @property
    def num_waiting_by_account(self) -> Mapping[str, int]:
        """Number of waiting sequences of each account."""
        return self._num_waiting

    def sort_key(self, seq: Sequence) -> SortKey:
        """Return a sequence's current sort key, whether it waits or not; smaller goes first."""
        return sort_key(self._policy, seq.rank, seq.seq_id)

    def first_expired(self, now: float) -> Sequence | None:
        """Return the sequence whose deadline passed first, if any, without removing it."""
        head = self._deadlines.first()
        return head[1] if head is not None and head[0][0] <= now else None

    def _count(self, lane: "_Lane", num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.num_short_tokens += num_tokens if lane is self._short else 0


class _Lane:
    """The waiting lines of one kind of sequences: short or long."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._levels: list[Key] = []  # the levels that have lines, sorted
        self._lines: dict[Key, dict[str, MarkedHeap[Sequence]]] = {}

    def push(self, seq: Sequence) -> None:
        rank = seq.rank
        if rank.level not in self._lines:
            insort(self._levels, rank.level)
            self._lines[rank.level] = {}
        line = self._lines[rank.level].setdefault(rank.account, MarkedHeap())
        line.push(rank.key, seq, seq.seq_id)

    def remove(self, seq: Sequence) -> None:
        rank = seq.rank
        lines = self._lines[rank.level]
        lines[rank.account].discard(seq)
        if not lines[rank.account]:
            del lines[rank.account]
        if not lines:
            del self._lines[rank.level]
            del self._levels[bisect_left(self._levels, rank.level)]

    def first(self) -> tuple[SortKey, Sequence] | None:
        """Return the first sequence in order, with its sort key."""
        if not self._levels:
            return None
        seqs = [head[1] for line in self._lines[self._levels[0]].values() if (head := line.first())]
        return min(((sort_key(self._policy, s.rank, s.seq_id), s) for s in seqs), key=_head_key)


def _head_key(head: tuple[SortKey, Sequence]) -> SortKey:
    return head[0]
