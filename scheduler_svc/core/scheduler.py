"""Decides, for one worker, what each step computes, and keeps the block space true to it.

The caller is one task. It asks for plans (`schedule`) while fewer than `MAX_STEPS_IN_FLIGHT` are
unanswered, has them executed in order, and reports each result (`update`) in that order. A plan may
be made before the result of the one before it is known, because a decode step needs only *that*
there is a next token, not which.

A step costs what changed in it. A decoding sequence is touched when it starts, when it crosses a
block border and when it ends; in between it is one element of an array.
"""

from collections.abc import Iterable

from contract.step import Plan, Result, StepId
from scheduler_svc.core.beams.live_searches import BeamGroups
from scheduler_svc.core.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.cache.pins import Pins
from scheduler_svc.core.compact.defragment import DefragmentationReport, Defragmenter
from scheduler_svc.core.config import SchedulerConfig, SchedulerLoad
from scheduler_svc.core.events import Admitted, Finished, News
from scheduler_svc.core.handover.labels import NewLabels
from scheduler_svc.core.limits import check_length, check_pin, check_queue, max_request_len
from scheduler_svc.core.live_sequences import LiveSequences
from scheduler_svc.core.long_prefills import LongPrefillLimit
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.policies.loading import make_policy
from scheduler_svc.core.policies.policy import Rank, rank
from scheduler_svc.core.preemption import Preempting
from scheduler_svc.core.prefills import Prefills
from scheduler_svc.core.prefix import KvLookup
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.reports.load import read_load
from scheduler_svc.core.request import FinishReason, Request, SeqKey, SourceId
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import QUEUED, RUNNING, SeqStatus, Sequence
from scheduler_svc.core.steps_in_flight import StepsInFlight
from scheduler_svc.core.tiers.fetching import Fetching, Turn
from scheduler_svc.core.tiers.host_room import HostRoom
from scheduler_svc.core.tiers.host_tier import HostTier

MAX_STEPS_IN_FLIGHT = 2


class Scheduler:
    """The sequences and blocks of one worker."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._tier = HostTier(config)
        on_evict = self._tier.demote if config.num_host_blocks else None
        labels = self._labels = NewLabels()
        self._pool = BlockPool(config.num_blocks, DeviceBlockId, on_evict, config.eviction, labels)
        self._pins = Pins(config, self._pool)
        self._lookup = KvLookup(config, self._pool, self._tier)
        longest = max_request_len(config.max_num_blocks or config.num_blocks, config)
        self._rows = Rows(config.max_num_seqs, longest, config.block_size, config.num_draft_tokens)
        self._steps = StepsInFlight(self._pool, self._rows)
        self._running = RunningSet(config, self._pool, self._tier, self._rows, self._steps, labels)
        self._defragmenter = Defragmenter(config, self._pool, self._tier, self._running, self._pins)
        self._policy = make_policy(config.policy, config.policy_args)
        self._beams = BeamGroups(config, self._rows, self._running, self._lookup, self._policy)
        self._long_prefills = LongPrefillLimit(config)
        self._prefills = Prefills(self._running, self._long_prefills, self._policy)
        self._waiting = WaitingQueue(self._policy, self._long_prefills.threshold)
        self._expired: list[Finished] = []  # their sources have not heard of it yet
        self._live = LiveSequences()
        self._host_room = HostRoom(config, self._tier, self._waiting, self._live, self._rank)
        self._fetching = Fetching(config, self._lookup, self._tier, self._host_room, self._waiting)
        self._preempting = Preempting(
            config, self._rows, self._running, self._beams, self._host_room, self._waiting
        )
        self._admitted: list[Admitted] = []  # their sources have not heard of it yet
        self._num_recomputed_tokens = 0
        self._num_adopted_tokens = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0

    # --- requests -------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queue the sequences of a request.

        Raises:
            RequestTooLongError: No sequence of it could ever finish.
            NoPrefixCacheError: It wants its prompt pinned, and there is no prefix cache.
            QueueFullError: Too many sequences wait. No resubmitted request is refused for that.
        """
        check_length(request, self._pool.num_usable, self.config)
        check_pin(request, has_prefix_cache=self.config.enable_prefix_caching)
        num_waiting = len(self._waiting) + len(self._fetching) + self._live.num_siblings
        check_queue(request, num_waiting, self.config.max_waiting)
        for seq in self._live.add(request, self._policy.place(request, now), now):
            self._enqueue(seq)

    def cancel(self, source: SourceId, seq_keys: Iterable[int]) -> tuple[Finished, ...]:
        """End sequences early; keys that are not live are ignored. A search ends as a whole.

        Returns:
            The end of each that was live. Nothing more is heard of them.
        """
        seqs = self._live.find(source, seq_keys)
        return tuple(end for seq in seqs for end in self._finish(seq, FinishReason.CANCELLED))

    def cancel_source(self, source: SourceId) -> None:
        """End all sequences of a source that is no longer there to hear of it."""
        for seq in self._live.of_source(source):
            self._finish(seq, FinishReason.CANCELLED)

    def defragment(self) -> None:
        """Move the held blocks together, from the next step on; `take_reports` has the result."""
        self._defragmenter.want()

    def take_reports(self) -> tuple[DefragmentationReport, ...]:
        """Return what defragmentation has to say since the last call."""
        return self._defragmenter.take_reports()

    # --- steps ----------------------------------------------------------------------------------

    @property
    def num_steps_in_flight(self) -> int:
        """Plans whose results have not been reported."""
        return len(self._steps)

    @property
    def beam_rows(self) -> frozenset[int]:
        """The rows for which the next outcome must have candidates, if they sample in it."""
        return self._beams.rows

    def schedule(
        self,
        now: float,
        max_paced_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> Plan | None:
        """Plan the next step; end the waiting sequences whose deadline has passed.

        Args:
            now: The time, in the caller's seconds.
            max_paced_tokens: Most tokens of prompts that the step computes if sequences decode in
                it, who feel each of them; None: no bound.
            max_prompt_tokens: Most that it computes of prompts in any case; None: no bound.

        Returns:
            The plan, which must be executed; or None if there is nothing to do, or if only the
            result of a step in flight can tell.
        """
        step = StepId(self._steps.last + 1)
        if len(self._steps) >= MAX_STEPS_IN_FLIGHT:
            return None
        self._expire(now)
        self._pins.expire(now)
        num_preemptions = self._preempting.num_preemptions
        self._tier.begin_step()
        if not self._make_room(step):
            return None
        num_decodes = self._running.num_decoding
        draft = PlanBuilder(
            step, now, num_decodes, self.config.max_num_batched_tokens - num_decodes
        )
        bounds = (max_paced_tokens if num_decodes else None, max_prompt_tokens)
        draft.paced_budget = min((bound for bound in bounds if bound is not None), default=None)
        self._running.grow_tables(draft)
        self._beams.advance(draft)
        for seq in self._running.prefilling:
            if draft.budget == 0:
                break
            if self._prefills.compute(seq, draft):
                self._prompt_computed(seq, draft.now)
        if self._preempting.num_preemptions == num_preemptions:  # else there is no room, or barely
            self._admit(draft)
        for seq in draft.long_prefills:
            if self._prefills.compute_rest(seq, draft):
                self._prompt_computed(seq, draft.now)
        self._running.evict_ahead(step)
        if now >= self._defragmenter.due:  # after all that swaps out, which a step does first
            self._defragmenter.plan(draft, len(self._steps))
        plan = None
        if draft.num_decodes or draft.chunk_lens or draft.copy_src or self._running.must_send:
            draft.pins = self._pins.take_untold(now)
            plan = self._running.send(draft)
        self._step_planned()
        return plan

    def take_expired(self) -> tuple[Finished, ...]:
        """Return the ends that `schedule` has brought about since the last call."""
        expired, self._expired = tuple(self._expired), []
        return expired

    def update(self, outcome: Result) -> News:
        """Apply the result of the oldest step in flight.

        Raises:
            BrokenInvariantError: It is the result of another step.
        """
        self._steps.answer(outcome.step_id)
        if self.config.num_host_blocks:
            self._take_moves(outcome)
        sources, seq_keys, token_ids, index = self._rows.append(
            outcome.sampled_rows, outcome.sampled_token_ids
        )
        if self._policy.has_accounts:
            for account, num_tokens in self._rows.accounts.count(outcome.sampled_rows[index]):
                self._policy.served(account, 0, num_tokens)
        finished: list[Finished] = []
        for seq in filter(None, map(self._rows.owner, outcome.stopped_rows)):
            stop_token_id = int(self._rows.known_tokens(seq)[-1])
            finished += self._finish(seq, FinishReason.STOP, stop_token_id=stop_token_id)
        for seq in filter(None, map(self._rows.owner, outcome.failed_rows)):
            self._pins.forget(seq.block_ids)
            self._running.distrust(seq)
            position = len(self._rows.known_tokens(seq))
            error = f"the model's logits for position {position} are not finite"
            finished += self._finish(seq, FinishReason.ERROR, error=error)
        for seq in filter(None, map(self._rows.owner, outcome.stuck_rows)):
            error = "the form that the output must have cannot be followed any further"
            finished += self._finish(seq, FinishReason.ERROR, error=error)
        for group in self._beams.take(outcome):
            self._finish(group.leader, FinishReason.STOP)
            finished += group.results()
        for seq in self._running.pop_ended(outcome.step_id):
            if seq.group is None:
                finished += self._finish(seq, FinishReason.LENGTH)
        admitted, self._admitted = tuple(self._admitted), []
        pinned = self._pins.take_news()
        return News(sources, seq_keys, token_ids, index, admitted, tuple(finished), pinned)

    def owner(self, row: int) -> tuple[SourceId, SeqKey] | None:
        """Return whose row it is; None: its sequence is gone."""
        seq = self._rows.owner(row)
        return None if seq is None else (seq.request.source, seq.seq_key)

    def load(self) -> SchedulerLoad:
        """Return a snapshot."""
        return read_load(self)

    # --- parts of a step ------------------------------------------------------------------------

    def _make_room(self, step: StepId) -> bool:
        """Preempt until every decoding sequence can have the block it needs at `step`.

        And until the pool has room for what is held, if it is about to shrink.

        Returns:
            False if blocks are on their way to being free, and must be waited for.
        """
        while self._running.num_blocks_due(step) + self._beams.num_blocks_due > self._pool.num_free:
            if self._steps.hold_blocks:
                return False
            if not self._running:  # held by pins, or by rows that nobody has claimed yet
                if not self._pins.give_up(1):
                    break
            elif not self._running.is_alone or not self._pins.give_up(1):
                self._preempt(self._running.last(self._rank))
        return True

    def _step_planned(self) -> None:
        """Do what must wait until all that there was to tell has been sent: nothing, here."""

    def _expire(self, now: float) -> None:
        """End the waiting sequences whose deadline has passed."""
        while seq := self._waiting.first_expired(now) or self._fetching.first_expired(now):
            self._expired += self._finish(seq, FinishReason.DEADLINE)

    def _rank(self, seq: Sequence) -> Rank:
        return rank(self._policy, seq.place, seq.seq_id)

    def _admit(self, draft: PlanBuilder) -> None:
        """Let waiting sequences run, in order, as long as there are tokens, rows and blocks.

        Only a long one that finds enough of its like at work is overtaken, and by short ones only.
        """
        block_size = self.config.block_size
        may_be_long = True
        while draft.budget and self._rows.num_free:
            if (seq := self._waiting.first(may_be_long=may_be_long)) is None:
                return
            if not draft.prompt_budget and seq.status is not SeqStatus.SWAPPED:
                return  # it would hold blocks, and compute nothing
            num_tokens = len(seq.token_ids)
            has_room = self._has_room(-(-num_tokens // block_size))
            match self._fetching.at_turn(seq, has_room=has_room):
                case Turn.FETCHING:
                    continue
                case Turn.LATER:
                    return
            found = self._lookup.find(seq)
            num_left = num_tokens - found.num_tokens
            if not self._long_prefills.may_start(num_left, self._running.prefilling):
                may_be_long = False
                continue
            num_new = -(-num_tokens // block_size) - len(found.ready) - len(found.loading)
            num_rows, num_taken = (1, 0) if seq.group is None else seq.group.demand(block_size)
            num_taken += num_new + sum(self._pool.ref_count(block) == 0 for block in found.ready)
            if not self._has_room(num_taken, num_rows):
                num_short = num_taken - self._pool.num_free
                is_waited_for = self._running or self._steps.hold_blocks
                if is_waited_for or num_short <= 0 or not self._pins.give_up(num_short):
                    return  # in the second case rows are short, which pins have none of
                continue
            if self._tier.loses_evicted and num_new > self._pool.num_blank:
                return  # one step later nothing is lost
            self._waiting.remove(seq)
            self._num_recomputed_tokens += max(0, seq.num_computed_tokens - found.num_tokens)
            if seq.status is SeqStatus.WAITING:
                self._tier.num_promoted += len(found.sources)
                self._prefix_cache_queries += num_tokens
                self._prefix_cache_hits += found.num_tokens
            self._running.start(seq, found, num_new)
            self._beams.started(seq)
            self._tell_admitted(seq, found.num_tokens, draft.now)
            if self._prefills.compute(seq, draft):
                self._prompt_computed(seq, draft.now)

    def _has_room(self, num_blocks: int, num_rows: int = 1) -> bool:
        """Whether so many may be taken to start something; what runs keeps some to grow into."""
        reserve = int(self.config.watermark * self._pool.num_usable) if self._running else 0
        return num_rows <= self._rows.num_free and num_blocks + reserve <= self._pool.num_free

    def _prompt_computed(self, leader: Sequence, now: float) -> None:
        """Let the siblings fork; one that finds no row or block waits, like any other sequence."""
        self._pins.prompt_computed(leader, now)
        for seq in self._live.take_siblings(leader):
            if self._has_room(1):
                self._running.fork(leader, seq)
                self._tell_admitted(seq, 0, now)
            else:
                seq.move(SeqStatus.WAITING)
                self._waiting.push(seq)

    def _tell_admitted(self, seq: Sequence, num_cached_tokens: int, now: float) -> None:
        """Let the source know, the first time, that a sequence runs."""
        if not seq.was_admitted:
            seq.was_admitted = True
            seq.num_cached_tokens = num_cached_tokens
            self._admitted += (
                Admitted(seq.request.source, each.seq_key, num_cached_tokens, now - seq.arrived)
                for each in seq.outputs
            )

    # --- lives of sequences ---------------------------------------------------------------------

    def _enqueue(self, seq: Sequence) -> None:
        """Let a new sequence wait."""
        self._fetching.enqueue(seq)

    def _preempt(self, seq: Sequence, *, can_swap: bool = True, must_swap: bool = False) -> None:
        """See `Preempting`."""
        self._preempting.preempt(seq, can_swap=can_swap, must_swap=must_swap)

    def _take_moves(self, outcome: Result) -> None:
        """Take the ends of swap-ins and disk moves; who needs one that failed computes again."""
        self._fetching.answer(outcome)
        self._tier.answer(outcome.step_id, outcome.failed_swap_in_block_ids)
        for seq in self._running.confirm_loads(outcome.failed_swap_in_block_ids):
            if seq.row is not None:  # else its search was preempted with another of its beams
                self._preempt(seq, can_swap=False)
        self._pins.loads_confirmed()

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> list[Finished]:
        """End a sequence, or the search that it is of, whatever it is doing."""
        leader = seq if seq.group is None else seq.group.leader
        if leader.status in QUEUED:
            self._waiting.remove(leader)
        elif leader.status is SeqStatus.FETCHING:
            self._fetching.stop(leader)
        elif seq.group is not None:
            self._beams.stop(seq.group)
        elif seq.status in RUNNING:
            self._running.stop(seq)
        self._host_room.release(leader)
        for each in seq.outputs:
            if (next_leader := self._live.remove(each)) is not None:
                self._waiting.push(next_leader)
        return [
            Finished(each.request.source, each.seq_key, reason, stop_token_id, error)
            for each in seq.outputs
        ]
