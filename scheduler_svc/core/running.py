"""The running sequences, with their rows and block tables, from start to stop."""

from bisect import insort
from collections.abc import Iterator
from itertools import chain

import numpy as np

from contract.arrays import Int32Array
from contract.hashing import extend_chain, group_hash, tail_hash
from contract.step import NewSequence, Plan, StepId
from scheduler_svc.core.budget import TokenBudget
from scheduler_svc.core.decodes import Decodes, DraftedDecodes, SteadyDecodes
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.events import Preempted, Started
from scheduler_svc.core.interface.identity import identity, swap_root
from scheduler_svc.core.interface.request import SeqId
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefix import FoundKv, Publisher
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.space.kv_groups import NULL_BLOCK, KvGroups
from scheduler_svc.core.space.labels import NewLabels
from scheduler_svc.core.steps_in_flight import StepsInFlight
from scheduler_svc.core.tiers.host_tier import HostTier


class RunningSet:
    """Starts, advances and stops sequences.

    Only this class and `Defragmenter` change block tables.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        groups: KvGroups,
        pool: BlockPool[DeviceBlockId],
        tier: HostTier,
        rows: Rows,
        steps: StepsInFlight,
        labels: NewLabels,
        budget: TokenBudget,
        policy: Policy,
    ) -> None:
        self._config = config
        self._groups = groups
        self._is_plain = groups.is_plain  # read in every step
        self._pool = pool
        self._tier = tier
        self._rows = rows
        self._steps = steps
        self._labels = labels
        self._budget = budget
        self._policy = policy
        self.publisher = Publisher(config, groups, pool, rows)
        self._seqs: dict[SeqId, Sequence] = {}
        self._loading: dict[SeqId, Sequence] = {}  # sequences with `loading_block_ids`
        self._prefilling: list[Sequence] = []  # sorted by `Sequence.order`
        self._decodes: Decodes = (
            DraftedDecodes(config, rows, steps)
            if config.num_draft_tokens
            else SteadyDecodes(config, steps)
        )
        self._begun: list[Sequence] = []  # began to decode in the last step; with recurrent layers
        self._released_rows: list[int] = []  # for the next plan
        self._trace_events: list[Started | Preempted] = []  # for the next plan

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs.values())

    @property
    def is_alone(self) -> bool:
        """Whether only one sequence, or only one beam search, runs."""
        first = next(iter(self._seqs.values()))
        return all(
            seq is first or (seq.group is not None and seq.group is first.group)
            for seq in self._seqs.values()
        )

    @property
    def num_decoding(self) -> int:
        """Number of sequences that decode in the next step."""
        return self._decodes.num_next

    @property
    def prefilling(self) -> tuple[Sequence, ...]:
        """The sequences that have known tokens to compute, in the policy's order."""
        return tuple(self._prefilling)

    @property
    def loading(self) -> tuple[Sequence, ...]:
        """The sequences whose swap-in is not confirmed yet (`Sequence.loading_block_ids`)."""
        return tuple(self._loading.values())

    @property
    def must_send(self) -> bool:
        """Whether a plan must be sent even if it computes nothing.

        True if the worker must learn of released rows or block moves. Also true if disk moves are
        in progress and no step is in flight, because only the result of a step reports their end.
        """
        waits_for_disk = self._tier.disk.is_busy and not self._steps
        return bool(self._released_rows) or self._tier.has_moves or waits_for_disk

    def num_blocks_due(self, step: StepId) -> int:
        """Return how many blocks `grow_tables` has to give to running sequences at `step`."""
        num_due = self._decodes.num_due(step)
        if self._is_plain:
            return num_due
        num_missing = sum(len(self._missing(seq)) for seq in self._prefilling)
        return num_due * self._groups.num + num_missing

    def give_back(self, step: StepId) -> None:
        """Free blocks that are before the windows of all later tokens.

        Prefilling sequences lose such blocks in every step, decoding sequences when they need new
        blocks at `step`. With recurrent layers, a sequence also loses such blocks when it has
        begun to decode, because these blocks are large, and the sequence may not need a new block
        for a long time.

        Steps in flight may still read the freed blocks. This does no harm, because only a later
        step writes to the blocks, and the worker runs steps and copies in order.
        """
        begun = [seq for seq in self._begun if seq.status is SeqStatus.DECODE]
        self._begun = []
        decoding = [*self._decodes.due(step), *begun]
        if not (decoding or self._prefilling):
            return
        tables = [seq.block_ids for seq in (*self._prefilling, *decoding)]
        num_computed = [seq.num_computed_tokens for seq in self._prefilling]
        rows = [seq.row for seq in decoding if seq.row is not None]
        num_computed += [num - 1 for num in self._rows.num_tokens_by_row[rows].tolist()]
        self._pool.drop(self._groups.take_passed(tables, num_computed))

    def num_new_blocks(self, seq: Sequence, found: FoundKv) -> int:
        """Return how many blocks `start` allocates, including the targets of its swap-ins."""
        if found.places is None:
            return self._num_indices(seq) - len(found.ready) - len(found.loading)
        return len(found.sources) + len(self._places_ahead(seq, found))

    def start(self, seq: Sequence, found: FoundKv) -> None:
        """Give a sequence a row and a block table, and let it prefill.

        Args:
            seq: A sequence without device blocks.
            found: The KV that the sequence reuses; the sequence becomes a holder of the shared
                blocks. Besides these blocks, `num_new_blocks` blocks must be available.
        """
        seq.set_status(SeqStatus.PREFILL)
        shared = found.ready + found.loading
        num_new = self.num_new_blocks(seq, found)
        self._pool.share(shared)
        # Hold the host blocks first, because the allocation may evict host blocks, too.
        self._tier.pool.share(found.sources)
        own = self._pool.allocate(num_new)
        targets = own[: len(found.sources)]
        self._tier.swap_in(found.sources, targets)
        self._tier.pool.drop(seq.fetched_block_ids)
        seq.fetched_block_ids = ()
        if found.places is None:
            seq.block_ids = shared + own
            seq.num_published_blocks = len(found.ready)
        else:
            places = found.places + self._places_ahead(seq, found)
            seq.block_ids = [NULL_BLOCK] * (self._num_indices(seq) * self._groups.num)
            for place, block in zip(places, shared + own, strict=True):
                seq.block_ids[place] = block
            unpublished = min(found.places[len(found.ready) :], default=None)
            seq.num_published_blocks = (
                found.num_indices if unpublished is None else unpublished // self._groups.num
            )
        seq.num_computed_tokens = found.num_tokens
        seq.row = self._rows.occupy(seq)
        seq.announced = False
        self._seqs[seq.seq_id] = seq
        if seq.traceparent:
            source = seq.request.source
            self._trace_events.append(Started(source, seq.seq_key, found.num_tokens, len(targets)))
        self._wait_for(seq, (*found.loading, *targets))
        insort(self._prefilling, seq, key=lambda other: other.order)

    def can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """Whether `child` can be forked from `parent`.

        The parent must still have the KV to which the child's next token attends, and the model
        must have no recurrent layers.
        """
        # The parent's state already includes a token that the child computes
        if self._groups.has_states:
            return False
        places = () if self._groups.is_plain else self._groups.kept(len(child.token_ids) - 1)
        return not any(parent.block_ids[place] == NULL_BLOCK for place in places)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child` with the KV that `parent` has of all tokens of `child` except the last one.

        The child's first step computes the last token. If the block of this token also has KV of
        earlier tokens, the step first copies the block, in each KV group, and the child writes to
        the copy.
        """
        num_groups = self._groups.num
        num_computed = len(child.token_ids) - 1
        num_shared, offset = divmod(num_computed, self._config.block_size)
        child.block_hashes = parent.block_hashes[:num_shared]
        end = num_shared * num_groups
        if offset:
            child.copy_from = tuple(parent.block_ids[end : end + num_groups])
            self._pool.share(child.copy_from)
        found = FoundKv(parent.block_ids[:end], [], [], num_computed)
        if not self._groups.is_plain:
            places = [p for p in self._groups.kept(num_computed) if p < end]
            shared = [parent.block_ids[place] for place in places]
            found = FoundKv(shared, [], [], num_computed, places, num_shared)
        self.start(child, found)
        # If a swap-in fails for the parent, it fails for the child, too.
        self._wait_for(child, parent.loading_block_ids)

    def extend(self, beam: Sequence, token_ids: Int32Array) -> None:
        """Let a beam compute a new token, in the same row and blocks.

        All other tokens of the beam already have KV. To the worker, the beam is a new sequence in
        each step. So the plan of a step releases the beam's row, and gives the same row to the beam
        again.

        Args:
            beam: A running beam that no step in flight computes.
            token_ids: The beam's tokens and one new token. If the new token begins a block, a block
                for each KV group must be available.
        """
        assert beam.row is not None
        beam.set_status(SeqStatus.PREFILL)
        beam.token_ids, beam.max_total_tokens = token_ids, len(token_ids) + 1
        beam.num_computed_tokens = len(token_ids) - 1
        num_groups = self._groups.num
        if not self._groups.is_plain:
            passed = self._groups.take_passed([beam.block_ids], [beam.num_computed_tokens])
            self._pool.drop(passed)
        if beam.num_computed_tokens * num_groups == len(beam.block_ids) * self._config.block_size:
            beam.block_ids += self._pool.allocate(num_groups)
        self._rows.set_tokens(beam.row, token_ids)
        self._released_rows.append(beam.row)
        beam.announced = False
        insort(self._prefilling, beam, key=lambda other: other.order)

    def is_loaded(self, seq: Sequence) -> bool:
        """Whether the step being planned may compute `seq`.

        It may not while a swap-in for `seq` still waits to be sent with a plan.
        """
        return not any(map(self._tier.is_unsent, seq.loading_block_ids))

    def compute_chunk(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """Plan as many known tokens of `seq` as the budget grants, and charge the account of `seq`.

        May be called several times for one step.

        Returns:
            Whether the chunk has the last known token. If so, the step samples a token, and the
            sequence decodes from now on.
        """
        assert seq.row is not None
        num_granted = self._budget.grant(seq, builder.chunk_lens.get(seq.row, 0))
        if num_granted == 0:
            return False
        if not seq.announced:
            self._announce(seq, builder)
        builder.add_chunk(seq.row, num_granted)
        num_charged = max(seq.num_computed_tokens, seq.num_charged_tokens)
        seq.num_computed_tokens += num_granted
        if self._policy.has_accounts:
            num_new = min(seq.num_computed_tokens, seq.num_prompt_tokens) - num_charged
            if num_new > 0:
                seq.num_charged_tokens = num_charged + num_new
                self._policy.charge(seq.rank.account, num_new, 0)
        # Publish these blocks already, although this step has yet to compute them. A sequence that
        # finds them computes in this step or later, and in each layer a step stores KV before it
        # reads any.
        self.publisher.publish(seq, seq.num_computed_tokens)
        if seq.num_tokens_left:
            return False
        self._prefilling.remove(seq)
        seq.set_status(SeqStatus.DECODE)
        if self._groups.has_states:
            self._begun.append(seq)
        self._decodes.start(seq, builder.step_id)
        return True

    def grow_tables(self, builder: PlanBuilder) -> None:
        """Give new blocks to the running sequences that need some in this step.

        A decoding sequence gets one block per KV group when its blocks are full. A prefilling
        sequence gets blocks only in groups with a window, because `start` has given it all its
        blocks in the other groups.
        """
        self._labels.begin_step()
        due = self._decodes.take_due(builder.step_id)
        if not self._is_plain:
            self._take_missing(builder)
        if not due:
            return
        num_groups = self._groups.num
        builder.appended_blocks = self._pool.allocate(len(due) * num_groups)
        builder.appended_rows = [seq.row for seq in due if seq.row is not None]
        if self._config.num_draft_tokens:  # then the last block may not be full yet
            for seq in due:
                self.publisher.publish(seq, self.num_computed_tokens(seq))
        else:
            self.publisher.publish_last(due, builder.appended_rows)
        for group in range(num_groups):
            for seq, block in zip(due, builder.appended_blocks[group::num_groups], strict=True):
                seq.block_ids.append(block)

    def evict_ahead(self, step: StepId) -> None:
        """Evict cached blocks so that decodes find free blocks in the two steps after `step`.

        The evicted blocks are demoted to the host now, because a step that swaps blocks in cannot
        demote any. If such a step had to evict blocks, their content would be lost, and the prefix
        cache would no longer find the blocks that follow them in a prompt.
        """
        num_due = self._decodes.num_due_soon(step) * self._groups.num
        num_lacking = num_due - self._pool.num_free
        if num_lacking <= 0:
            return
        num_evicted = min(num_lacking, self._pool.num_cached, self._tier.num_demotions_left)
        if num_evicted:
            # `allocate` takes all free blocks first, so it evicts `num_evicted` cached ones. `drop`
            # then frees all of them.
            self._pool.drop(self._pool.allocate(self._pool.num_free + num_evicted))

    def send(self, builder: PlanBuilder) -> Plan:
        """Complete a plan and record that it is sent."""
        self._tier.send(builder)
        self._steps.send(builder.step_id)
        self._steps.hold(builder.copied)
        self._decodes.send(builder.step_id)
        builder.trace_events, self._trace_events = tuple(self._trace_events), []
        released, self._released_rows = self._released_rows, []
        return builder.finish(released, self._labels.take())

    def pop_ended(self, step: StepId) -> list[Sequence]:
        """Return the sequences to which `step` gave their last token; the caller must stop them."""
        return self._decodes.take_ended(step)

    def confirm_loads(self, failed: Int32Array) -> list[Sequence]:
        """Record the result of a step with swap-ins.

        Args:
            failed: Device blocks whose content is corrupt.

        Returns:
            The sequences that depend on the failed blocks; the caller must stop them.
        """
        bad = set(failed.tolist())
        broken = []
        for seq in list(self._loading.values()):
            if not bad.isdisjoint(seq.loading_block_ids):
                broken.append(seq)
                continue
            seq.loading_block_ids = tuple(filter(self._tier.is_loading, seq.loading_block_ids))
            if not seq.loading_block_ids:
                del self._loading[seq.seq_id]
                self._tier.pool.drop(seq.host_block_ids)
                seq.host_block_ids = ()
                self.publisher.publish(seq, self.num_computed_tokens(seq))
        return broken

    def num_computed_tokens(self, seq: Sequence) -> int:
        """Return how many known tokens of a sequence will have KV when the sent steps have ended.

        While the sequence decodes, its last known token does not count, even if a step in flight is
        computing this token. If the sequence is stopped, it must compute the token again to get the
        token's logits.
        """
        if seq.status is SeqStatus.PREFILL:
            return seq.num_computed_tokens
        assert seq.row is not None
        return self._rows.num_tokens(seq.row) - 1

    def stop(self, seq: Sequence, *, is_idle: bool = False) -> None:
        """Take a running sequence's row and device blocks from it; the caller changes its status.

        `is_idle` says that no step in flight computes the sequence. Then its row and blocks are
        freed at once; otherwise they are freed when the steps in flight have ended.
        """
        assert seq.row is not None
        del self._seqs[seq.seq_id]
        if seq.status is SeqStatus.DECODE:
            self.publisher.publish(seq, self._rows.num_tokens(seq.row) - 1)
            if not self._groups.is_plain:
                self.publisher.publish_windows(seq, self._rows.num_tokens(seq.row) - 1)
            self._decodes.stop(seq)
        else:
            self._prefilling.remove(seq)
        if seq.loading_block_ids:
            del self._loading[seq.seq_id]
            others = (other.loading_block_ids for other in self._loading.values())
            still_wanted = set(chain.from_iterable(others))
            self._tier.cancel_swap_ins(set(seq.loading_block_ids) - still_wanted)
        held = self._groups.held(seq.block_ids)
        if seq.copy_from:
            held = [*held, *seq.copy_from]
        if seq.announced:
            self._released_rows.append(seq.row)
        self._rows.abandon(seq.row)
        if is_idle:
            self._pool.drop(held)
            self._rows.give_back(seq.row)
        else:
            self._steps.hold(held, seq.row)
        seq.block_ids, seq.row, seq.copy_from, seq.loading_block_ids = [], None, (), ()

    def trace_preempted(
        self, seq: Sequence, num_computed: int, num_swapped_out_blocks: int
    ) -> None:
        """Add a `Preempted` event to the next plan if the sequence is traced."""
        if seq.traceparent:
            source = seq.request.source
            self._trace_events.append(
                Preempted(source, seq.seq_key, num_computed, num_swapped_out_blocks)
            )

    def last_checkpoint(self, seq: Sequence, num_computed: int) -> tuple[list[DeviceBlockId], int]:
        """Find the device blocks with which a sequence that was just stopped can continue.

        Called only for models with recurrent layers. All returned blocks are full. A partial block
        is of no use, because steps in flight may advance its recurrent state beyond the sequence's
        known tokens, and the state cannot be rolled back.

        Args:
            seq: The sequence.
            num_computed: The number of its tokens with KV.

        Returns:
            The blocks, and the number n of tokens whose KV they have, which may be 0. The blocks
            are those at the places `KvGroups.kept(n)`.
        """
        size = self._config.block_size
        chain = seq.block_hashes[: num_computed // size]
        num_tokens = size * self._groups.longest_prefix(chain, lambda n: bool(self._pool.find([n])))
        names = self._groups.names(chain, self._groups.kept(num_tokens))
        return [block for name in names for block in self._pool.find([name])], num_tokens

    def swap_out(self, seq: Sequence, blocks: list[DeviceBlockId], num_computed: int) -> None:
        """Copy to the host the KV of a sequence that was just stopped, including partial blocks.

        Args:
            seq: The sequence.
            blocks: The sequence's blocks at the places `KvGroups.kept(num_computed)`.
            num_computed: The number of its tokens with KV.

        A later scheduler finds a partial block by the label that this method gives it. Full blocks
        get their labels when they are published. Without a prefix cache they are not published, so
        this method labels them, too.
        """
        size, has_cache = self._config.block_size, self._config.enable_prefix_caching
        num_in_tail = num_computed % size
        chain = seq.block_hashes if has_cache else []
        root = swap_root(seq.request, seq.output_index, has_prefix_cache=has_cache)
        extend_chain(chain, root, seq.token_ids, size)
        num_groups = self._groups.num
        places = self._groups.kept(num_computed)
        full = places[:-num_groups] if num_in_tail else places  # every group keeps its last block
        names = self._groups.names(chain, full)
        if not has_cache:
            self._labels.give(blocks[: len(full)], names)
        if num_in_tail:
            name = tail_hash(chain, root, seq.token_ids, num_computed, size)
            tails = [group_hash(name, group) for group in range(num_groups)]
            self._labels.give(blocks[-num_groups:], tails)
        seq.host_block_ids = tuple(self._tier.swap_out(blocks, names if has_cache else ()))

    def distrust(self, seq: Sequence) -> None:
        """Remove the hashes of a running sequence's blocks from all tiers.

        The sequence's KV is wrong, and without the hashes no other sequence finds it.
        """
        places = range(len(seq.block_hashes) * self._groups.num)
        names = self._groups.names(seq.block_hashes, places)
        for name in names:  # includes the names of blocks that the sequence gave back
            self._pool.forget(self._pool.find([name]))
        self._pool.forget(self._groups.held(seq.block_ids))
        self._tier.forget(names)
        seq.block_hashes = []  # so that no block is published when it stops
        seq.num_published_blocks = len(seq.block_ids) // self._groups.num

    def _num_indices(self, seq: Sequence) -> int:
        """Return how many block indices the known tokens of a sequence take."""
        return -(-len(seq.token_ids) // self._config.block_size)

    def _places_ahead(self, seq: Sequence, found: FoundKv) -> list[int]:
        """Return the places, other than `found.places`, where a starting sequence gets blocks."""
        return self._groups.ahead(found.num_indices, found.num_tokens, self._num_indices(seq))

    def _missing(self, seq: Sequence) -> list[int]:
        if seq.loading_block_ids:  # the sequence computes nothing yet
            return []
        return self._groups.missing(seq.block_ids, seq.num_computed_tokens)

    def _take_missing(self, builder: PlanBuilder) -> None:
        """Give blocks for the next chunk to prefilling sequences."""
        placements: list[int] = []
        for seq in self._prefilling:
            places = self._missing(seq)
            # Until it is announced, a sequence has the blocks that it took when it started
            assert seq.row is not None
            assert seq.announced or not places
            for place, block in zip(places, self._pool.allocate(len(places)), strict=True):
                seq.block_ids[place] = block
                placements += (seq.row, place, block)
        builder.placements = placements

    def _wait_for(self, seq: Sequence, blocks: tuple[DeviceBlockId, ...]) -> None:
        """Let a sequence wait for swap-ins to `blocks`.

        If `blocks` is empty, no swap-in reads the sequence's host blocks, so they are dropped.
        """
        if blocks:
            seq.loading_block_ids = blocks
            self._loading[seq.seq_id] = seq
        elif seq.host_block_ids:
            self._tier.pool.drop(seq.host_block_ids)
            seq.host_block_ids = ()

    def _announce(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Add a sequence with all its data to the plan."""
        assert seq.row is not None
        seq.announced = True
        search = None if seq.group is None else seq.group.state_with(seq)
        name = b""
        if (seq.group is None or search is not None) and not seq.request.pools:
            name = identity(seq.request, 0 if search else seq.output_index)
        builder.new_sequences.append(
            NewSequence(
                seq_id=seq.seq_id,
                row=seq.row,
                token_ids=seq.token_ids,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_computed_tokens=seq.num_computed_tokens,
                block_ids=np.array(seq.block_ids, np.int32),
                sampling=seq.request.sampling,
                output_index=seq.output_index,
                max_total_tokens=seq.max_total_tokens,
                traceparent=seq.traceparent,
                identity=name,
                search=search,
            )
        )
        if seq.copy_from:
            for src, dst in zip(seq.copy_from, seq.block_ids[-len(seq.copy_from) :], strict=True):
                builder.copy(src, dst)
            builder.copied += seq.copy_from
            seq.copy_from = ()
