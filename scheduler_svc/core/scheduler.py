"""Decides what each step of one worker computes, and allocates the blocks for it.

The caller is a single task. It asks for plans (`schedule`) while fewer than `MAX_STEPS_IN_FLIGHT`
steps have no result, executes the plans in order, and applies the results (`update`) in the same
order. A plan can be made before the previous result is known, because planning a decode does not
depend on which token the previous step samples.

The cost of a step grows with its changes, not with the number of sequences. A decoding sequence
needs work when it starts, when it crosses a block boundary and when it ends; in between it is one
element of an array.

The core uses these words. A *source* is the stream of a router. A request with n > 1 has a
*leader*, the sequence that computes the prompt, and *siblings*, which fork from the leader. The
beams of one search are a *group* (`BeamGroup`); a *KV group* is something else: a set of layers. A
sequence's *rank* (`Rank`) says where the policy's order places the sequence; the policy decides the
rank once, when the request arrives. *Unclaimed* rows are left from an earlier scheduler: no router
has submitted the requests of their sequences again yet. The states of sequences are in
`sequence.py`; the states of blocks are in `space/blocks.py`.

`Scheduler` consists of parts, each with one duty. Callers may read values of the parts, and may
call methods that only return reports, such as `Defragmenter.take_reports`. Only the methods of
`Scheduler` marked `core_input` affect what the core decides, so a recording of the calls of these
methods is enough for a replay.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from typing import Final

from contract.hashing import BlockHash
from contract.info import MemoryLevel
from contract.state import Holdings
from contract.step import Plan, Result, StepId
from scheduler_svc.core.beams.live_searches import BeamGroups
from scheduler_svc.core.budget import TokenBudget
from scheduler_svc.core.compact.defragment import Defragmenter
from scheduler_svc.core.compact.resize import Resizing
from scheduler_svc.core.handover.copies import Copies, Loan, LoanId, Room, RoomId
from scheduler_svc.core.handover.moved_request import (
    Export,
    ExportId,
    Import,
    ImportId,
    MovedRequest,
)
from scheduler_svc.core.handover.moves import Moves
from scheduler_svc.core.handover.takeover import Takeover
from scheduler_svc.core.interface.config import SchedulerConfig, SchedulerLoad
from scheduler_svc.core.interface.events import Finished, StepEvents
from scheduler_svc.core.interface.inputs import Recorder, core_input
from scheduler_svc.core.interface.request import FinishReason, Request, SeqKey, SourceId
from scheduler_svc.core.limits.acceptance import (
    WorkerRates,
    check_deadline,
    check_length,
    check_queue,
    max_request_len,
)
from scheduler_svc.core.limits.memory_pressure import Pressure
from scheduler_svc.core.live_sequences import LiveSequences
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.policies.make_policy import make_policy
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.prefix import FoundKv, KvLookup
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.reports.load import read_load
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import QUEUED, RUNNING, SeqStatus, Sequence
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.space.cache_watcher import CacheTier, CacheWatch
from scheduler_svc.core.space.kv_groups import KvGroups
from scheduler_svc.core.space.labels import NewLabels
from scheduler_svc.core.space.pins import Pins
from scheduler_svc.core.steps_in_flight import StepsInFlight
from scheduler_svc.core.tiers.fetching import Fetching, FetchStatus
from scheduler_svc.core.tiers.host_room import HostRoom
from scheduler_svc.core.tiers.host_tier import HostTier

MAX_STEPS_IN_FLIGHT = 2


class Scheduler:
    """The sequences and blocks of one worker."""

    def __init__(self, config: SchedulerConfig, recorder: Recorder | None = None) -> None:
        """Make a core without sequences.

        If there is a `recorder`, all calls of `core_input` methods go through it.
        """
        self.config: Final = config
        self.recorder: Final = recorder
        # Blocks of each tier, and lookup of KV in them.
        self.tier: Final = HostTier(config)
        on_evict = self.tier.demote if config.num_host_blocks else None
        self.labels: Final = NewLabels()
        self.pool: Final = BlockPool(
            config.num_blocks, DeviceBlockId, on_evict, config.eviction, self.labels
        )
        self.groups: Final = KvGroups(config)
        if not self.groups.is_plain:
            self.pool.allocate(1)  # the null block
        self.pins: Final = Pins(config, self.groups, self.pool)
        self.lookup: Final = KvLookup(config, self.groups, self.pool, self.tier)
        # Running sequences.
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
            groups=self.groups,
            pool=self.pool,
            tier=self.tier,
            rows=self.rows,
            steps=self.steps,
            labels=self.labels,
            budget=self.budget,
            policy=self.policy,
        )
        self.beams: Final = BeamGroups(
            config, self.groups, self.rows, self.running, self.lookup, self.policy
        )
        # Waiting sequences.
        self.live: Final = LiveSequences()
        self.queue: Final = WaitingQueue(self.policy, self.budget.long_threshold)
        self.host_room: Final = HostRoom(config, self.groups, self.tier, self.queue, self.live)
        self.fetching: Final = Fetching(config, self.lookup, self.tier, self.host_room, self.queue)
        self.preemption: Final = Preemption(
            config,
            groups=self.groups,
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
        # Operations that are not part of every step.
        self.defragmenter: Final = Defragmenter(
            config, self.pool, self.tier, self.running, self.pins
        )
        self.moves: Final = Moves(
            config,
            groups=self.groups,
            pool=self.pool,
            tier=self.tier,
            rows=self.rows,
            steps=self.steps,
            live=self.live,
            queue=self.queue,
            host_room=self.host_room,
            running=self.running,
            preemption=self.preemption,
            policy=self.policy,
        )
        self.copies: Final = Copies(config, pool=self.pool, tier=self.tier, steps=self.steps)
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
            groups=self.groups,
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
        self._expired: list[Finished] = []  # not reported to the sources yet
        self.num_recomputed_tokens = 0
        """Number of tokens that were computed again, because no tier had their KV any longer."""
        self.prefix_cache_queries = 0
        """Number of tokens that admission looked up in the prefix cache."""
        self.prefix_cache_hits = 0
        """Number of tokens that admission found in the prefix cache."""

    def watch_cache(self, watch: CacheWatch) -> None:
        """Let `watch` follow which blocks can be found by hash.

        Call this before all other methods.
        """
        self.pool.find_in(watch.table(CacheTier.DEVICE))
        self.tier.pool.find_in(watch.table(CacheTier.HOST))
        self.tier.disk.pool.find_in(watch.table(CacheTier.DISK))
        self.running.publisher.watch = watch

    @core_input
    def restore_accounts(self, accounts: Iterable[tuple[str, float]]) -> None:
        """Restore the policy's accounts, as `Policy.accounts` of an earlier core returned them.

        Call this before other methods.
        """
        self.policy.restore(dict(accounts))

    # --- requests -------------------------------------------------------------------------------

    @core_input
    def submit(self, request: Request, now: float) -> None:
        """Queue the sequences of a request.

        After a takeover (`inherit`), a sequence continues from the KV that the worker still holds
        for it, if any.

        Raises:
            RequestTooLongError: A sequence of the request could not finish even if it ran alone.
            TooManySequencesError: The request has more sequences than an empty queue can hold.
            QueueFullError: Too many sequences wait; never raised for a resubmitted request.
        """
        request = self.takeover.with_separate_outputs(request)
        check_length(request, self.pool.num_usable, self.config)
        check_queue(request, self.num_waiting, self.config.max_waiting)
        for seq in self.live.add(request, self.policy.rank(request, now), now):
            if not self.takeover.adopt(seq):
                self.fetching.enqueue(seq)  # queues the sequence, perhaps after loads from the disk
        keys = range(request.first_seq_key, request.first_seq_key + request.n)
        for seq in self.live.find(request.source, keys):
            if seq.status is SeqStatus.WAITING:
                self.queue.discount_cached(seq, self.lookup.find(seq).num_tokens)

    @core_input
    def cancel(self, source: SourceId, seq_keys: Iterable[int]) -> tuple[Finished, ...]:
        """Cancel sequences, and beam searches as a whole; ignore keys that are not live.

        Returns:
            The last event of each cancelled sequence. No later `StepEvents` names these sequences.
        """
        seqs = self.live.find(source, seq_keys)
        return tuple(end for seq in seqs for end in self._finish(seq, FinishReason.CANCELLED))

    @core_input
    def cancel_source(self, source: SourceId) -> None:
        """Cancel all sequences of a source that is gone."""
        for seq in self.live.of_source(source):
            self._finish(seq, FinishReason.CANCELLED)

    @core_input
    def unpin(self, tenant: str, request_id: str) -> None:
        """Drop the pins of a request, except pins that another request asked for, too."""
        self.pins.unpin(tenant, request_id)

    def check_deadline(self, request: Request, now: float, rates: WorkerRates) -> None:
        """Check that a new request could meet its deadline at this worker; change nothing.

        Raises:
            DeadlineError: The request would miss its deadline even if it ran alone.
        """
        check_deadline(request, now, rates, self.config, self.lookup.num_cached_tokens)

    def drain(self) -> tuple[Request, ...]:
        """Return all live requests, so that another core continues them; the worker was lost.

        The `outputs` of each request are the tokens that the request's sequences have produced.
        This core must not be used afterwards.
        """
        return self.live.requests(self.rows.known_tokens)

    # --- steps ----------------------------------------------------------------------------------

    @core_input
    def schedule(
        self,
        now: float,
        max_paced_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> Plan | None:
        """Plan the next step; end the waiting sequences whose deadline has passed.

        One step may have prefills and decodes. A running sequence has known tokens, some of which
        are computed. It *prefills* until a step has computed all of them: each step computes a
        chunk, in order, within the token budget. The last of these steps samples the next token.
        From then on the sequence *decodes*: every step computes the newest token and samples the
        next. These two phases cover whole and chunked prompts, prefixes found in the cache,
        preempted sequences that compute their tokens again, and beams.

        This method does not visit decoding sequences; it counts them, and gives a block to each of
        the few that need one.

        A step is planned in this order. (1) While running sequences lack blocks, or more sequences
        run than the worker's memory allows, the running sequence that is last in the policy's order
        is preempted. (2) Each decode takes one token of the budget, and tables without room for the
        step's tokens get blocks. If a beam search has chosen new beams, each of them computes its
        newest token (`BeamGroups.advance`). (3) Running prefills get chunks. (4) Unless (1)
        preempted a sequence, sequences are admitted from the queue in the policy's order, as long
        as tokens, rows and blocks are left. (5) In (3) and (4), a long prefill
        (`TokenBudget.is_long`) gets at most half of the tokens that are left; if tokens are left
        after (4), it gets a second chunk. (6) Cached blocks that decodes would evict in the next
        two steps are evicted and demoted now, because a step that swaps blocks in cannot demote any
        (`RunningSet.evict_ahead`). (7) The defragmenter adds its block copies, after all other
        copies are known.

        Args:
            now: The time, in the caller's seconds.
            max_paced_tokens: The limit on the step's prompt tokens if sequences decode in the
                step, since prompts delay decodes; None: no limit.
            max_prompt_tokens: The limit on the step's prompt tokens, whether sequences decode in
                the step or not; None: no limit.

        Returns:
            The plan, which must be executed. None if no step is needed, or if no step can be
            planned before the result of a step in flight is applied.
        """
        if now >= self.takeover.expires_at:
            self.takeover.expire()
        if self.pressure.max_running is not None:
            self.pressure.halve_max_running(now, self._num_taken_rows)  # if memory is still short
        if len(self.steps) >= MAX_STEPS_IN_FLIGHT:
            return None
        self._expire(now)
        self.pins.expire(now)
        plan = self._plan(now, max_paced_tokens, max_prompt_tokens)
        # If unclaimed rows hold the blocks and nothing can run, free one row after another.
        while plan is None and self.queue and not self.steps and self.takeover.give_up_one(now):
            plan = self._plan(now, max_paced_tokens, max_prompt_tokens)
        return plan

    @core_input
    def update(self, result: Result) -> StepEvents:
        """Apply the result of the oldest step in flight.

        Raises:
            BrokenInvariantError: The result belongs to another step.
        """
        self.steps.answer(result.step_id)
        if self.config.num_host_blocks:
            self._end_transfers(result)
        sources, seq_keys, token_ids, index = self.rows.append(
            result.sampled_rows, result.sampled_token_ids
        )
        if self.policy.has_accounts:
            for account, num_tokens in self.rows.accounts.count(result.sampled_rows[index]):
                self.policy.charge(account, 0, num_tokens)
        finished: list[Finished] = []
        for seq in filter(None, map(self.rows.owner, result.stopped_rows)):
            stop_token_id = int(self.rows.known_tokens(seq)[-1])
            finished += self._finish(seq, FinishReason.STOP, stop_token_id=stop_token_id)
        for seq in filter(None, map(self.rows.owner, result.failed_rows)):
            self.pins.forget(seq.block_ids)
            self.running.distrust(seq)
            position = len(self.rows.known_tokens(seq))
            error = f"the model's logits for position {position} are not finite"
            finished += self._finish(seq, FinishReason.ERROR, error=error)
        for seq in filter(None, map(self.rows.owner, result.stuck_rows)):
            error = "the required form allows no further token"
            finished += self._finish(seq, FinishReason.ERROR, error=error)
        for group in self.beams.apply_candidates(result):
            self._finish(group.leader, FinishReason.STOP)  # its events lack the search's results
            finished += group.results()
        for seq in self.running.pop_ended(result.step_id):
            if seq.group is None:  # a beam reaches its maximum length in each step of its search
                finished += self._finish(seq, FinishReason.LENGTH)
        admitted, pinned = self.live.take_admitted(), self.pins.take_pinned()
        return StepEvents(sources, seq_keys, token_ids, index, admitted, tuple(finished), pinned)

    def take_expired(self) -> tuple[Finished, ...]:
        """Return `Finished` for each sequence that `schedule` has ended since the previous call."""
        expired, self._expired = tuple(self._expired), []
        return expired

    # --- operations -----------------------------------------------------------------------------

    @core_input
    def set_memory_level(self, level: MemoryLevel) -> None:
        """Set the memory level of the worker, which limits how many sequences run from now on."""
        self.pressure.set_level(level, self._num_taken_rows)

    @core_input
    def defragment(self) -> None:
        """Start a defragmentation pass with the next step; see `Defragmenter.take_reports`."""
        self.defragmenter.request_pass()

    @core_input
    def shrink(self, num_blocks: int) -> None:
        """Start to shrink the device pool to `num_blocks` blocks; see `Resizing.shrink`."""
        self.resizing.shrink(num_blocks)

    @core_input
    def resize(self, num_blocks: int) -> None:
        """Set the number of device blocks that the worker has now; see `Resizing.resize`."""
        self.resizing.resize(num_blocks)

    @core_input
    def begin_export(
        self, source: SourceId, first_seq_key: SeqKey, *, keeps_kv: bool = True
    ) -> Export:
        """Prepare a live request to move to another core; see `Moves.begin_export`."""
        return self.moves.begin_export(source, first_seq_key, keeps_kv=keeps_kv)

    @core_input
    def end_export(self, export_id: ExportId, *, leaves: bool) -> tuple[int, ...]:
        """Remove an exported request if it `leaves`, else queue it here (`Moves.end_export`)."""
        return self.moves.end_export(export_id, leaves=leaves)

    @core_input
    def begin_import(self, moved: MovedRequest) -> Import:
        """Reserve host blocks for a request from another core; see `Moves.begin_import`."""
        return self.moves.begin_import(moved)

    @core_input
    def end_import(self, import_id: ImportId, output_indices: Collection[int]) -> None:
        """Queue the sequences that have arrived from another core; see `Moves.end_import`."""
        for seq in self.moves.end_import(import_id, output_indices):
            if seq.status is SeqStatus.WAITING:
                self.queue.discount_cached(seq, self.lookup.find(seq).num_tokens)

    @core_input
    def lend(self, hashes: Seq[BlockHash]) -> Loan:
        """Hold blocks for another core to copy; see `Copies.lend`."""
        return self.copies.lend(hashes)

    @core_input
    def end_loan(self, loan_id: LoanId) -> None:
        """Release the blocks that `lend` holds for a loan; see `Copies.end_loan`."""
        self.copies.end_loan(loan_id)

    @core_input
    def expect(self, hashes: Seq[BlockHash]) -> Room:
        """Reserve host blocks for copies from another core; see `Copies.expect`."""
        return self.copies.expect(hashes)

    @core_input
    def receive(self, room_id: RoomId, num_arrived: int) -> None:
        """Publish the blocks that have arrived from another core; see `Copies.receive`."""
        self.copies.receive(room_id, num_arrived)

    @core_input
    def inherit(self, holdings: Holdings, now: float) -> None:
        """Take over the worker's rows and blocks (`Takeover`); call this before other methods."""
        self.takeover.inherit(holdings, now)

    # --- state ----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait in the queue, for the disk, or for their leader."""
        return len(self.queue) + len(self.fetching) + self.live.num_siblings

    @property
    def num_queued_tokens(self) -> int:
        """Number of uncomputed tokens of the queued and the prefilling sequences."""
        prefilling = sum(seq.num_tokens_left for seq in self.running.prefilling)
        return self.queue.num_tokens + prefilling

    @property
    def max_request_len(self) -> int:
        """The greatest length, in tokens, of a sequence that has all usable blocks for itself."""
        return max_request_len(self.pool.num_usable, self.config)

    def owner(self, row: int) -> tuple[SourceId, SeqKey] | None:
        """Return the source and key of a row's sequence; None if the sequence is gone."""
        seq = self.rows.owner(row)
        return None if seq is None else (seq.request.source, seq.seq_key)

    def load(self) -> SchedulerLoad:
        return read_load(self)

    # --- parts of a step ------------------------------------------------------------------------

    def _plan(
        self, now: float, max_paced_tokens: int | None, max_prompt_tokens: int | None
    ) -> Plan | None:
        """Plan a step, as the docstring of `schedule` describes."""
        step = StepId(self.steps.last + 1)
        num_preemptions = self.preemption.num_preemptions
        self.tier.begin_step()
        if not self.preemption.make_room(step):
            return None
        num_decodes = self.running.num_decoding
        builder, budget = PlanBuilder(step, now, num_decodes), self.budget
        has_foreground = self.live.num_foreground > 0
        budget.begin_step(
            num_decodes, max_paced_tokens, max_prompt_tokens, has_foreground=has_foreground
        )
        self.running.grow_tables(builder)
        self.beams.advance(builder)
        for seq in self.running.prefilling:
            if not budget.num_tokens:
                break
            self._compute(seq, builder)
        # A preemption means that blocks or memory are short, so no sequence is admitted.
        if self.preemption.num_preemptions == num_preemptions:
            self._admit(builder)
        for seq in budget.long_prefills:  # long prefills get the tokens that are left
            if budget.num_tokens:
                self._compute(seq, builder)
        self.running.evict_ahead(step)
        if now >= self.defragmenter.due:  # last, because a step swaps out before it copies blocks
            self.defragmenter.plan(builder, len(self.steps))
        plan = None
        has_work = num_decodes or builder.chunk_lens or builder.copy_src or builder.placements
        if has_work or self.running.must_send:
            builder.pins = self.pins.take_unsent(now)
            plan = self.running.send(builder)
        if self.resizing.is_shrinking:
            self.resizing.on_planned()
        return plan

    def _expire(self, now: float) -> None:
        """End the waiting sequences whose deadline has passed."""
        while seq := self.queue.first_expired(now) or self.fetching.first_expired(now):
            self._expired += self._finish(seq, FinishReason.DEADLINE)

    def _admit(self, builder: PlanBuilder) -> None:
        """Start waiting sequences in order, as long as there are tokens, rows and blocks.

        Short prompts overtake a long prompt that has to wait because too many other long prompts
        prefill (`TokenBudget.may_start`). The table shows where the KV of a sequence's tokens comes
        from. Each column is a range of tokens, `[start, end)`; `step` is the end of this step's
        chunk. A `FoundKv` has the blocks of the first two columns (`ready`; `loading` and
        `sources`), and the blocks of the third column once they are on the host.

        start  0              ready           found            disk            step
        end    ready          found           disk             step            all known
               | on the       | on the        | on the         | computed      | computed in   |
               | device       | host          | disk           | in this step  | later steps   |
        owner  | shared: one  | own blocks,   | the sequence   | own blocks    | own blocks,   |
               | more holder  | or shared     | holds the host |               | taken now so  |
               |              | with another  | blocks loaded  |               | that none is  |
               |              | that swaps in | for it         |               | lacking later |
        fate   | read in      | swapped in    | loaded first,  | published     | published     |
               | place        | by this step; | while FETCHING | as soon as    | when planned  |
               |              | the sequence  | and out of the | planned       |               |
               |              | computes from | queue; then    |               |               |
               |              | the next on   | on the host    |               |               |

        The sequence computes the tokens of blocks that the disk cannot deliver or the host has no
        room for. A SWAPPED sequence has its KV in its own host blocks; the last one may be partial.
        It swaps in only blocks that the device's prefix cache no longer has, and shares the blocks
        that the cache still has. Every sequence computes at least its last known token, because the
        step samples from the logits of this token.
        """
        may_be_long = True
        while self.budget.num_tokens and self.rows.num_free:
            if (seq := self.queue.first(may_be_long=may_be_long)) is None:
                return
            if not self.budget.prompt_room(seq) and seq.status is not SeqStatus.SWAPPED:
                return  # the sequence would hold blocks without computing
            num_tokens = len(seq.token_ids)
            has_room = self._has_room(self.groups.num_needed(num_tokens))
            match self.fetching.at_turn(seq, has_room=has_room):
                case FetchStatus.FETCHING:
                    continue  # it has left the queue; look at the sequence that is first now
                case FetchStatus.LATER:
                    return  # it cannot be loaded yet, and no later sequence may overtake it
            found = self.lookup.find(seq)
            num_left = num_tokens - found.num_tokens
            if not self.budget.has_room(seq, num_left):
                return
            if not self.budget.may_start(num_left, self.running.prefilling):
                may_be_long = False
                continue
            num_new = self.running.num_new_blocks(seq, found)
            num_rows, num_needed = (1, 0) if seq.group is None else self.beams.demand(seq.group)
            num_needed += num_new + sum(self.pool.ref_count(block) == 0 for block in found.ready)
            if not self._has_room(num_needed, num_rows):
                if self.steps.hold_blocks:
                    return  # wait until results free blocks
                num_lacking = num_needed - self.pool.num_available
                if self.running:
                    num_lacking += self._reserve
                    # While sequences run, pins are given up only if they suffice and their blocks
                    # can *go down*: be demoted to the host.
                    if not self.pins.go_down or num_lacking > len(self.pins):
                        return  # wait until running sequences free blocks
                if not self._has_rows(num_rows):
                    return  # pins hold no rows
                if not self.pins.give_up(num_lacking):
                    return
                continue
            if self.tier.loses_evicted and num_new > self.pool.num_free:
                return  # in the next step evicted blocks can be demoted
            self._start(seq, found, builder)

    def _start(self, seq: Sequence, found: FoundKv, builder: PlanBuilder) -> None:
        self.queue.remove(seq)
        self.num_recomputed_tokens += max(0, seq.num_computed_tokens - found.num_tokens)
        if seq.status is SeqStatus.WAITING:
            self.tier.num_promoted += len(found.sources)
            self.prefix_cache_queries += len(seq.token_ids)
            self.prefix_cache_hits += found.num_tokens
        self.running.start(seq, found)
        self.beams.on_started(seq)
        self.live.record_admitted(seq, found.num_tokens, builder.now)
        self._compute(seq, builder)

    def _compute(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Plan a chunk of a sequence's known tokens; after the last chunk, fork its siblings.

        A sequence whose blocks are swapped in gets its first chunk in the step after the last of
        these swap-ins. With windows, the sequence waits until results confirm its swap-ins, because
        before that `RunningSet` gives the sequence no blocks for further chunks.
        """
        if seq.loading_block_ids and not (self.groups.is_plain and self.running.is_loaded(seq)):
            return
        if self.running.compute_chunk(seq, builder):
            self._fork_siblings(seq, builder.now)

    def _has_room(self, num_blocks: int, num_rows: int = 1) -> bool:
        """Whether a sequence or search may take `num_blocks` blocks and `num_rows` rows to start.

        While sequences run, an admission must leave `_reserve` blocks available, and at most
        `Pressure.max_running` rows may be taken. If nothing runs, neither limit applies.
        """
        if self.running:
            num_blocks += self._reserve
        return self._has_rows(num_rows) and num_blocks <= self.pool.num_available

    def _has_rows(self, num_rows: int) -> bool:
        most = self.pressure.max_running
        if self.running and most is not None and self._num_taken_rows + num_rows > most:
            return False
        return num_rows <= self.rows.num_free

    @property
    def _reserve(self) -> int:
        """How many blocks an admission must leave available, so that running sequences can grow."""
        return int(self.config.watermark * self.pool.num_usable)

    @property
    def _num_taken_rows(self) -> int:
        """Number of rows that are reserved or that running sequences have."""
        return len(self.running) + self.rows.num_reserved

    def _fork_siblings(self, leader: Sequence, now: float) -> None:
        """Fork the siblings of a leader; queue the siblings that cannot be forked now."""
        self.pins.on_prompt_computed(leader, now)
        for seq in self.live.take_siblings(leader):
            if self._has_room(self.groups.num) and self.running.can_fork(leader, seq):
                self.running.fork(leader, seq)
                self.live.record_admitted(seq, 0, now)
            else:
                seq.set_status(SeqStatus.WAITING)
                self.queue.push(seq)

    def _end_transfers(self, result: Result) -> None:
        """Record finished swap-ins and disk moves; preempt the sequences whose swap-in failed."""
        self.fetching.answer(result)
        self.tier.answer(result.step_id, result.failed_swap_in_block_ids)
        for seq in self.running.confirm_loads(result.failed_swap_in_block_ids):
            if seq.row is not None:  # None: its whole search was preempted already
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
        """End a sequence in any state; if it is a beam, end its whole search."""
        if seq.status in QUEUED:
            self.queue.remove(seq)
        elif seq.status is SeqStatus.FETCHING:
            self.fetching.stop(seq)
        elif seq.group is not None:
            self.beams.stop(seq.group)
        elif seq.status in RUNNING:
            self.running.stop(seq)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.pins.on_completed(seq)
        self.host_room.release(seq)
        for output in seq.outputs:
            if (next_leader := self.live.remove(output)) is not None:  # a sibling
                self.queue.push(next_leader)
        return [
            Finished(output.request.source, output.seq_key, reason, stop_token_id, error)
            for output in seq.outputs
        ]
