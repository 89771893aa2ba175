"""Decides, for one worker, what each step computes, and keeps the block space true to it.

The caller is one task. It asks for plans (`schedule`) while fewer than `MAX_STEPS_IN_FLIGHT` are
unanswered, has them executed in order, and reports each result (`update`) in that order. A plan may
be made before the result of the one before it is known, because a decode step needs only *that*
there is a next token, not which.

A step costs what changed in it. A decoding sequence is touched when it starts, when it crosses a
block border and when it ends; in between it is one element of an array.

`Scheduler` is made of parts, each of which owns what its class says. Every call that changes the
core is a method here, so that a recording sees every input in one place; reads may go to a part.
"""

from collections.abc import Collection, Iterable
from typing import Final

from contract.info import MemoryLevel
from contract.state import Holdings
from contract.step import Plan, Result, StepId
from scheduler_svc.core.beams.live_searches import BeamGroups
from scheduler_svc.core.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.budget import TokenBudget
from scheduler_svc.core.cache.pins import Pins
from scheduler_svc.core.compact.defragment import DefragmentationReport, Defragmenter
from scheduler_svc.core.compact.resize import Resizing
from scheduler_svc.core.config import SchedulerConfig, SchedulerLoad
from scheduler_svc.core.events import Finished, StepEvents
from scheduler_svc.core.handover.labels import NewLabels
from scheduler_svc.core.handover.moved_request import (
    Export,
    ExportId,
    Import,
    ImportId,
    MovedRequest,
)
from scheduler_svc.core.handover.moves import Moves
from scheduler_svc.core.handover.takeover import Takeover
from scheduler_svc.core.limits import (
    Rates,
    check_deadline,
    check_length,
    check_pin,
    check_queue,
    max_request_len,
)
from scheduler_svc.core.live_sequences import LiveSequences
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.policies.loading import make_policy
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.prefix import FoundKv, KvLookup
from scheduler_svc.core.pressure import Pressure
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.reports.load import read_load
from scheduler_svc.core.request import FinishReason, Request, SeqKey, SourceId
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import QUEUED, RUNNING, SeqStatus, Sequence
from scheduler_svc.core.steps_in_flight import StepsInFlight
from scheduler_svc.core.tiers.fetching import Fetching, FetchStatus
from scheduler_svc.core.tiers.host_room import HostRoom
from scheduler_svc.core.tiers.host_tier import HostTier

MAX_STEPS_IN_FLIGHT = 2


class Scheduler:
    """The sequences and blocks of one worker."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config: Final = config
        # Blocks, tier by tier, and where to find KV in them.
        self.tier: Final = HostTier(config)
        on_evict = self.tier.demote if config.num_host_blocks else None
        self.labels: Final = NewLabels()
        self.pool: Final = BlockPool(
            config.num_blocks, DeviceBlockId, on_evict, config.eviction, self.labels
        )
        self.pins: Final = Pins(config, self.pool)
        self.lookup: Final = KvLookup(config, self.pool, self.tier)
        # What runs.
        longest = max_request_len(config.max_num_blocks or config.num_blocks, config)
        self.rows: Final = Rows(
            config.max_num_seqs, longest, config.block_size, config.num_draft_tokens
        )
        self.steps: Final = StepsInFlight(self.pool, self.rows)
        self.pressure: Final = Pressure()
        self.budget: Final = TokenBudget(config, self.pressure)
        self.policy: Final = make_policy(config.policy, config.policy_args)
        self.running: Final = RunningSet(
            config,
            pool=self.pool,
            tier=self.tier,
            rows=self.rows,
            steps=self.steps,
            labels=self.labels,
            budget=self.budget,
            policy=self.policy,
        )
        self.beams: Final = BeamGroups(config, self.rows, self.running, self.lookup, self.policy)
        # What waits.
        self.live: Final = LiveSequences()
        self.queue: Final = WaitingQueue(self.policy, self.budget.long_threshold)
        self.host_room: Final = HostRoom(config, self.tier, self.queue, self.live)
        self.fetching: Final = Fetching(config, self.lookup, self.tier, self.host_room, self.queue)
        self.preemption: Final = Preemption(
            config,
            pool=self.pool,
            pins=self.pins,
            rows=self.rows,
            steps=self.steps,
            running=self.running,
            beams=self.beams,
            host_room=self.host_room,
            queue=self.queue,
            pressure=self.pressure,
        )
        # What happens now and then.
        self.defragmenter: Final = Defragmenter(
            config, self.pool, self.tier, self.running, self.pins
        )
        self.moves: Final = Moves(
            config,
            pool=self.pool,
            tier=self.tier,
            rows=self.rows,
            steps=self.steps,
            live=self.live,
            queue=self.queue,
            host_room=self.host_room,
            preemption=self.preemption,
            policy=self.policy,
        )
        self.resizing: Final = Resizing(
            config,
            pool=self.pool,
            pins=self.pins,
            steps=self.steps,
            labels=self.labels,
            defragmenter=self.defragmenter,
            live=self.live,
            moves=self.moves,
        )
        self.takeover: Final = Takeover(
            config,
            pool=self.pool,
            pins=self.pins,
            tier=self.tier,
            rows=self.rows,
            running=self.running,
            live=self.live,
            queue=self.queue,
            host_room=self.host_room,
            finish=self._finish,
        )
        self._expired: list[Finished] = []  # their sources have not heard of it yet
        self.num_recomputed_tokens = 0
        """Known tokens that admission found neither in the prefix cache nor swapped out, though
        they had been computed."""
        self.prefix_cache_queries = 0
        """Tokens looked up."""
        self.prefix_cache_hits = 0
        """Tokens found."""

    # --- requests -------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queue the sequences of a request, or let them go on with what the worker holds of them.

        Raises:
            RequestTooLongError: No sequence of it could ever finish.
            NoPrefixCacheError: It wants its prompt pinned, and there is no prefix cache.
            TooManySequencesError: It has more sequences than may ever wait.
            QueueFullError: Too many sequences wait. No resubmitted request is refused for that.
        """
        request = self.takeover.with_separate_outputs(request)
        check_length(request, self.pool.num_usable, self.config)
        check_pin(request, has_prefix_cache=self.config.enable_prefix_caching)
        check_queue(request, self.num_waiting, self.config.max_waiting)
        for seq in self.live.add(request, self.policy.rank(request, now), now):
            if not self.takeover.adopt(seq):
                self.fetching.enqueue(seq)  # to the queue, or to the disk for its prefix first
        keys = range(request.first_seq_key, request.first_seq_key + request.n)
        for seq in self.live.find(request.source, keys):
            if seq in self.queue and seq.status is SeqStatus.WAITING:
                self.queue.discount_cached(seq, self.lookup.find(seq).num_tokens)

    def cancel(self, source: SourceId, seq_keys: Iterable[int]) -> tuple[Finished, ...]:
        """End sequences early; keys that are not live are ignored. A search ends as a whole.

        Returns:
            The end of each that was live. No later result mentions them.
        """
        seqs = self.live.find(source, seq_keys)
        return tuple(end for seq in seqs for end in self._finish(seq, FinishReason.CANCELLED))

    def cancel_source(self, source: SourceId) -> None:
        """End all sequences of a source that is gone."""
        for seq in self.live.of_source(source):
            self._finish(seq, FinishReason.CANCELLED)

    def check_deadline(self, request: Request, now: float, rates: Rates) -> None:
        """Check that a new request could meet its deadline here; changes nothing.

        Raises:
            DeadlineError: It could not, even if nothing else ran.
        """
        check_deadline(request, now, rates, self.config, self.lookup.num_cached_tokens)

    def drain(self) -> tuple[Request, ...]:
        """When the worker is lost, return every live request in a form that another core can take.

        Each has the known tokens of its sequences as `outputs`. This core is of no use afterwards.
        """
        return self.live.requests(self.rows.known_tokens)

    # --- steps ----------------------------------------------------------------------------------

    def schedule(
        self,
        now: float,
        max_paced_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> Plan | None:
        """Plan the next step; end the waiting sequences whose deadline has passed.

        There is neither a prefill phase nor a decode phase. A running sequence has known tokens,
        and some of them are computed. One that lacks exactly its last token *decodes*: every step
        computes that token and samples the next. Decoding sequences are not looked at here; they
        are counted, and the few that need a block for their next token get one. The others
        *prefill*: each step computes a chunk of their known tokens, in order, as far as the token
        budget goes, and once none is left they decode. This one rule covers prompts in one piece
        and in chunks, prefixes found in the cache, preempted sequences that compute their tokens
        again, and beams. Prefills that run come first, then sequences are admitted from the queue
        in the policy's order, as long as tokens, rows and blocks are left. If the decoding
        sequences lack blocks, the last in order are preempted, and nothing is admitted in that
        step. Last of all, when all that must move for the step is known, blocks are defragmented.

        Args:
            now: The time, in the caller's seconds.
            max_paced_tokens: Most tokens of prompts that the step computes if sequences decode in
                it, which each of them delays; None: no bound.
            max_prompt_tokens: Most tokens of prompts in any case; None: no bound.

        Returns:
            The plan, which must be executed; or None if there is nothing to do, or nothing before
            a step in flight is answered.
        """
        if now >= self.takeover.expires_at:
            self.takeover.expire()
        if self.pressure.max_running is not None:
            self.pressure.lower_bound(now, self._num_taken_rows)
        if len(self.steps) >= MAX_STEPS_IN_FLIGHT:
            return None
        self._expire(now)
        self.pins.expire(now)
        plan = self._plan(now, max_paced_tokens, max_prompt_tokens)
        # Nothing can run while rows that wait for their claimants hold the blocks: free one.
        while plan is None and self.queue and not self.steps and self.takeover.give_up_one(now):
            plan = self._plan(now, max_paced_tokens, max_prompt_tokens)
        return plan

    def update(self, outcome: Result) -> StepEvents:
        """Apply the result of the oldest step in flight.

        Raises:
            BrokenInvariantError: It is the result of another step.
        """
        self.steps.answer(outcome.step_id)
        if self.config.num_host_blocks:
            self._end_moves(outcome)
        sources, seq_keys, token_ids, index = self.rows.append(
            outcome.sampled_rows, outcome.sampled_token_ids
        )
        if self.policy.has_accounts:
            for account, num_tokens in self.rows.accounts.count(outcome.sampled_rows[index]):
                self.policy.charge(account, 0, num_tokens)
        finished: list[Finished] = []
        for seq in filter(None, map(self.rows.owner, outcome.stopped_rows)):
            stop_token_id = int(self.rows.known_tokens(seq)[-1])
            finished += self._finish(seq, FinishReason.STOP, stop_token_id=stop_token_id)
        for seq in filter(None, map(self.rows.owner, outcome.failed_rows)):
            self.pins.forget(seq.block_ids)
            self.running.distrust(seq)
            position = len(self.rows.known_tokens(seq))
            error = f"the model's logits for position {position} are not finite"
            finished += self._finish(seq, FinishReason.ERROR, error=error)
        for seq in filter(None, map(self.rows.owner, outcome.stuck_rows)):
            error = "the form that the output must have cannot be followed any further"
            finished += self._finish(seq, FinishReason.ERROR, error=error)
        for group in self.beams.apply_candidates(outcome):
            self._finish(group.leader, FinishReason.STOP)
            finished += group.results()
        for seq in self.running.pop_ended(outcome.step_id):
            if seq.group is None:
                finished += self._finish(seq, FinishReason.LENGTH)
        admitted, pinned = self.live.take_admitted(), self.pins.take_pinned()
        return StepEvents(sources, seq_keys, token_ids, index, admitted, tuple(finished), pinned)

    def take_expired(self) -> tuple[Finished, ...]:
        """Return the sequences that `schedule` ended since the last call."""
        expired, self._expired = tuple(self._expired), []
        return expired

    # --- now and then ---------------------------------------------------------------------------

    def set_memory_level(self, level: MemoryLevel) -> None:
        """Take the level of the worker's memory; the next step is planned by it."""
        self.pressure.set_level(level, self._num_taken_rows)

    def defragment(self) -> None:
        """Move the held blocks together, from the next step on; `take_reports` has the result."""
        self.defragmenter.request_pass()

    def take_reports(self) -> tuple[DefragmentationReport, ...]:
        """Return the reports of defragmentation since the last call."""
        return self.defragmenter.take_reports()

    def shrink(self, num_blocks: int) -> None:
        """Begin to take blocks out of use; see `Resizing.shrink`."""
        self.resizing.shrink(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Take the number of device blocks that the worker has now; see `Resizing.resize`."""
        self.resizing.resize(num_blocks)

    def begin_export(self, source: SourceId, first_seq_key: SeqKey) -> Export:
        """Prepare a live request to leave; see `Moves.begin_export`."""
        return self.moves.begin_export(source, first_seq_key)

    def end_export(self, export_id: ExportId, *, leaves: bool) -> tuple[int, ...]:
        """Let a request go, or keep it; see `Moves.end_export`."""
        return self.moves.end_export(export_id, leaves=leaves)

    def begin_import(self, moved: MovedRequest) -> Import:
        """Set host blocks aside for a request that comes; see `Moves.begin_import`."""
        return self.moves.begin_import(moved)

    def end_import(self, import_id: ImportId, output_indices: Collection[int]) -> None:
        """Queue the sequences that have come; see `Moves.end_import`."""
        self.moves.end_import(import_id, output_indices)

    def inherit(self, holdings: Holdings, now: float) -> None:
        """Take over what the worker holds; once, before anything else. See `Takeover`."""
        self.takeover.inherit(holdings, now)

    def take_adopted(self) -> StepEvents | None:
        """Return the events of sequences adopted since the last call, if any."""
        return self.takeover.take_adopted()

    # --- questions ------------------------------------------------------------------------------

    @property
    def num_steps_in_flight(self) -> int:
        """Plans whose results have not been reported."""
        return len(self.steps)

    @property
    def beam_rows(self) -> frozenset[int]:
        """The rows for which the next outcome must have candidates, if they sample in it."""
        return self.beams.rows

    @property
    def num_waiting(self) -> int:
        """Sequences that wait: in the queue, for the disk, or for their leader."""
        return len(self.queue) + len(self.fetching) + self.live.num_siblings

    @property
    def num_queued_tokens(self) -> int:
        """Known tokens that the worker has to compute before those of a new request."""
        prefilling = sum(seq.num_tokens_left for seq in self.running.prefilling)
        return self.queue.num_tokens + prefilling

    @property
    def max_request_len(self) -> int:
        """Most tokens of one sequence: so many that it can always finish when it runs alone."""
        return max_request_len(self.pool.num_usable, self.config)

    def owner(self, row: int) -> tuple[SourceId, SeqKey] | None:
        """Return the name of the sequence that has a row; None: it is gone."""
        seq = self.rows.owner(row)
        return None if seq is None else (seq.request.source, seq.seq_key)

    def load(self) -> SchedulerLoad:
        """Return a snapshot."""
        return read_load(self)

    # --- parts of a step ------------------------------------------------------------------------

    def _plan(
        self, now: float, max_paced_tokens: int | None, max_prompt_tokens: int | None
    ) -> Plan | None:
        """Plan a step, as `schedule` tells."""
        step = StepId(self.steps.last + 1)
        num_preemptions = self.preemption.num_preemptions
        self.tier.begin_step()
        if not self.preemption.make_room(step):
            return None
        num_decodes = self.running.num_decoding
        draft, budget = PlanBuilder(step, now, num_decodes), self.budget
        budget.begin_step(num_decodes, max_paced_tokens, max_prompt_tokens)
        self.running.grow_tables(draft)
        self.beams.advance(draft)
        for seq in self.running.prefilling:
            if not budget.num_tokens:
                break
            self._compute(seq, draft)
        if self.preemption.num_preemptions == num_preemptions:  # else there is no room, or barely
            self._admit(draft)
        for seq in budget.long_prefills:  # what the others have left
            if budget.num_tokens and seq.status is SeqStatus.PREFILL:
                self._compute(seq, draft)
        self.running.evict_ahead(step)
        if now >= self.defragmenter.due:  # after all that swaps out, which a step does first
            self.defragmenter.plan(draft, len(self.steps))
        plan = None
        if num_decodes or draft.chunk_lens or draft.copy_src or self.running.must_send:
            draft.pins = self.pins.take_unsent(now)
            plan = self.running.send(draft)
        if self.resizing.is_shrinking:
            self.resizing.on_planned()
        return plan

    def _expire(self, now: float) -> None:
        """End the waiting sequences whose deadline has passed."""
        while seq := self.queue.first_expired(now) or self.fetching.first_expired(now):
            self._expired += self._finish(seq, FinishReason.DEADLINE)

    def _admit(self, draft: PlanBuilder) -> None:
        """Start waiting sequences, in order, as long as there are tokens, rows and blocks.

        A long prompt that may not start yet is overtaken, by short ones only. What becomes of a
        sequence's known tokens, block by block; the ranges are half-open, `[start, end)`. Up to
        `found` they are those of `FoundKv`; `step` is the end of this step's chunk:

        start  0              ready           found            disk            step
        end    ready          found           disk             step            all known
               | on the       | on the        | on the         | computed      | computed in   |
               | device       | host          | disk           | in this step  | later steps   |
        owner  | shared: one  | own blocks,   | the sequence   | own blocks    | own blocks,   |
               | more holder  | or shared     | holds the host |               | taken now: it |
               |              | with another  | blocks loaded  |               | can finish    |
               |              | that swaps in | for it         |               | its prompt    |
        fate   | read in      | swapped in    | loaded first,  | published     | published     |
               | place        | by this step; | while FETCHING | as soon as    | when computed |
               |              | it computes   | and out of the | planned       |               |
               |              | in the next   | queue; then    |               |               |
               |              |               | on the host    |               |               |

        Blocks that the disk cannot deliver, or that the host has no room for, are computed. A
        SWAPPED sequence has its KV in host blocks of its own, the last of which may be partial. It
        shares the blocks that are still in the device's prefix cache. At least the last known
        token is computed: the step samples from its logits.
        """
        block_size = self.config.block_size
        may_be_long = True
        while self.budget.num_tokens and self.rows.num_free:
            if (seq := self.queue.first(may_be_long=may_be_long)) is None:
                return
            if not self.budget.num_prompt_tokens and seq.status is not SeqStatus.SWAPPED:
                return  # it would hold blocks, and compute nothing
            num_tokens = len(seq.token_ids)
            has_room = self._has_room(-(-num_tokens // block_size))
            match self.fetching.at_turn(seq, has_room=has_room):
                case FetchStatus.FETCHING:
                    continue
                case FetchStatus.LATER:
                    return
            found = self.lookup.find(seq)
            num_left = num_tokens - found.num_tokens
            if not self.budget.may_start(num_left, self.running.prefilling):
                may_be_long = False
                continue
            num_new = -(-num_tokens // block_size) - len(found.ready) - len(found.loading)
            num_rows, num_taken = (1, 0) if seq.group is None else seq.group.demand(block_size)
            num_taken += num_new + sum(self.pool.ref_count(block) == 0 for block in found.ready)
            if not self._has_room(num_taken, num_rows):
                num_short = num_taken - self.pool.num_available
                if self.running or self.steps.hold_blocks:
                    return  # what runs will free some
                if num_short <= 0:
                    return  # rows are short, and pins hold none
                if not self.pins.give_up(num_short):
                    return
                continue
            if self.tier.loses_evicted and num_new > self.pool.num_free:
                return  # one step later nothing is lost
            self._start(seq, found, num_new, draft)

    def _start(self, seq: Sequence, found: FoundKv, num_new: int, draft: PlanBuilder) -> None:
        """Take a sequence out of the queue and let it run."""
        self.queue.remove(seq)
        self.num_recomputed_tokens += max(0, seq.num_computed_tokens - found.num_tokens)
        if seq.status is SeqStatus.WAITING:
            self.tier.num_promoted += len(found.sources)
            self.prefix_cache_queries += len(seq.token_ids)
            self.prefix_cache_hits += found.num_tokens
        self.running.start(seq, found, num_new)
        self.beams.on_started(seq)
        self.live.record_admitted(seq, found.num_tokens, draft.now)
        self._compute(seq, draft)

    def _compute(self, seq: Sequence, draft: PlanBuilder) -> None:
        """Compute a chunk of a sequence's known tokens; after the last, its siblings fork."""
        if seq.loading_block_ids and not self.running.is_loaded(seq):
            return
        if self.running.compute_chunk(seq, draft):
            self._fork_siblings(seq, draft.now)

    def _has_room(self, num_blocks: int, num_rows: int = 1) -> bool:
        """Whether so many may be taken to start something; what runs keeps some to grow into.

        If nothing runs, the bound of memory pressure does not apply.
        """
        if not self.running:
            return num_rows <= self.rows.num_free and num_blocks <= self.pool.num_available
        most = self.pressure.max_running
        if most is not None and self._num_taken_rows + num_rows > most:
            return False
        reserve = int(self.config.watermark * self.pool.num_usable)
        return num_rows <= self.rows.num_free and num_blocks + reserve <= self.pool.num_available

    @property
    def _num_taken_rows(self) -> int:
        """Rows of running sequences, of beams that are to run, and those that may be claimed."""
        return len(self.running) + self.rows.num_reserved

    def _fork_siblings(self, leader: Sequence, now: float) -> None:
        """Let the siblings fork; one that finds no row or block waits, like any other sequence."""
        self.pins.on_prompt_computed(leader, now)
        for seq in self.live.take_siblings(leader):
            if self._has_room(1):
                self.running.fork(leader, seq)
                self.live.record_admitted(seq, 0, now)
            else:
                seq.move(SeqStatus.WAITING)
                self.queue.push(seq)

    def _end_moves(self, outcome: Result) -> None:
        """End swap-ins and disk moves; a sequence that needs one that failed computes again."""
        self.fetching.answer(outcome)
        self.tier.answer(outcome.step_id, outcome.failed_swap_in_block_ids)
        for seq in self.running.confirm_loads(outcome.failed_swap_in_block_ids):
            if seq.row is not None:  # else its search was preempted with another of its beams
                self.preemption.preempt(seq, can_swap=False)
        self.pins.on_loads_confirmed()

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
            self.queue.remove(leader)
        elif leader.status is SeqStatus.FETCHING:
            self.fetching.stop(leader)
        elif seq.group is not None:
            self.beams.stop(seq.group)
        elif seq.status in RUNNING:
            self.running.stop(seq)
        self.host_room.release(leader)
        for each in seq.outputs:
            if (next_leader := self.live.remove(each)) is not None:
                self.queue.push(next_leader)
        return [
            Finished(each.request.source, each.seq_key, reason, stop_token_id, error)
            for each in seq.outputs
        ]
