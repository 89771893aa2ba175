"""Continues the sequences of an earlier scheduler from the KV that the worker still holds.

When a scheduler attaches a worker, the worker reports what it holds (`Holdings`). The core uses
each part of this report as follows:

    a row            has the tokens and block table of a sequence. A row is *unclaimed* until a
                     router submits the sequence's request again. Then the sequence continues in the
                     blocks of the row, and computes nothing again. If no block is available for the
                     next token, the sequence is treated as preempted: it waits with its KV on the
                     host. If the host has no room, or if computing is faster than copying, the
                     sequence computes its tokens again.
    a search         has a state that the worker has kept. The search continues from this state as
                     after a preemption.
    swapped blocks   are host and disk blocks with labels, including a partial last block. The
                     tokens of the resubmitted request hash to these labels, and the sequence is
                     SWAPPED again. Without a prefix cache, the hashes also depend on the identity
                     of the sequence, so that no other sequence finds the blocks. A block with
                     tokens that the router has not received is not found, because the block's hash
                     is unknown; the tokens of this block are computed again.
    labelled blocks  become cached blocks, so that the prefix cache is as before, in all tiers.
    pins             stay for the rest of their time.

Unclaimed rows and their blocks stay reserved for `claim_s` seconds. After the first `REUNION_S`
seconds, rows may be freed before `claim_s` ends: one at a time, and only if nothing could run
otherwise. No row is freed in the first `REUNION_S` seconds, because routers submit their requests
one by one, and a row that is still unclaimed may belong to a request that has not come yet. When a
row is freed, its labelled blocks stay cached, and its blocks without labels become free.

The worker may have sampled tokens that the router has not received. The core reports these tokens
with their log-probabilities, so that they are not computed again. If the worker has not kept all of
the log-probabilities, the tokens are drawn again, with the same result.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from contract.arrays import Int32Array
from contract.hashing import BlockHash, extend_chain, tail_hash
from contract.state import HeldBlocks, HeldRow, Holdings
from contract.step import StepLogprob
from scheduler_svc.core.beams.group import BeamGroup
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.events import Finished, StepEvents
from scheduler_svc.core.interface.identity import identity, swap_root
from scheduler_svc.core.interface.request import FinishReason, OutputSoFar, Request
from scheduler_svc.core.live_sequences import LiveSequences
from scheduler_svc.core.prefix import FoundKv
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.space.blocks import (
    BlockIdT,
    BlockPool,
    DeviceBlockId,
    DiskBlockId,
    HostBlockId,
)
from scheduler_svc.core.space.kv_groups import NULL_BLOCK, KvGroups
from scheduler_svc.core.space.pins import Pins
from scheduler_svc.core.tiers.host_room import HostRoom
from scheduler_svc.core.tiers.host_tier import HostTier

REUNION_S = 2.0
"""For this many seconds after a takeover, no unclaimed row is freed, even if queued sequences need
its blocks. Routers usually resubmit their live requests within this time. Chosen, not measured."""


class Takeover:
    """Holds the unclaimed rows, and lets new sequences claim them.

    A sequence that gets KV that the worker still held is *adopted*.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        groups: KvGroups,
        pool: BlockPool[DeviceBlockId],
        pins: Pins,
        tier: HostTier,
        rows: Rows,
        running: RunningSet,
        live: LiveSequences,
        queue: WaitingQueue,
        host_room: HostRoom,
        finish: Callable[..., list[Finished]],
    ) -> None:
        """`finish` is `Scheduler._finish`."""
        self.num_recomputed_tokens = 0
        """Number of tokens that adopted sequences compute again, because their KV was lost."""
        self.num_adopted_tokens = 0
        """Number of tokens of adopted sequences whose KV the worker still held."""
        self.expires_at = float("inf")
        """The time at which `expire` must be called."""
        self._config = config
        self._groups = groups
        self._pool = pool
        self._pins = pins
        self._tier = tier
        self._rows = rows
        self._running = running
        self._live = live
        self._queue = queue
        self._host_room = host_room
        self._finish = finish
        self._unclaimed: dict[bytes, list[HeldRow]] = {}  # by identity
        self._kept_until = 0.0
        self._unreported: list[tuple[Sequence, Int32Array, tuple[StepLogprob, ...]]] = []
        """Sampled tokens that the sources have not received, with their log-probabilities if the
        request asks for them."""
        self._ended: list[Finished] = []

    # --- unclaimed rows -------------------------------------------------------------------------

    def inherit(self, holdings: Holdings, now: float) -> None:
        """Take over the worker's rows and blocks; call this once, before all other methods."""
        for row in holdings.rows[: self._config.max_num_seqs]:
            self._unclaimed.setdefault(row.identity, []).append(row)
        self._kept_until = now + REUNION_S
        self.expires_at = now + self._config.claim_s
        self._rows.num_reserved += len(self.unclaimed)
        device, host, disk = holdings.device, holdings.host, holdings.disk
        tables = [self._held(row) for row in self.unclaimed]
        self._tier.pool.restore((), _blocks(host, HostBlockId), host.hashes)
        self._tier.disk.pool.restore((), _blocks(disk, DiskBlockId), disk.hashes)
        if not self._config.enable_prefix_caching:
            self._pool.restore(tables, (), ())
            return
        self._pool.restore(tables, _blocks(device, DeviceBlockId), device.hashes)
        self._pins.restore(holdings.pins, now)

    @property
    def unclaimed(self) -> list[HeldRow]:
        """The rows of requests that routers have not submitted again."""
        return [row for rows in self._unclaimed.values() for row in rows]

    @property
    def held_device_blocks(self) -> list[DeviceBlockId]:
        """The device blocks that unclaimed rows hold; a block occurs once per reference."""
        return [block for row in self.unclaimed for block in self._held(row)]

    def expire(self) -> None:
        """Free all rows that are still unclaimed. `schedule()` calls this at `expires_at`."""
        self.expires_at = float("inf")
        for row in self.unclaimed:
            self._free(row)

    def give_up_one(self, now: float) -> bool:
        """Free one unclaimed row so that a queued sequence can run; return whether one was freed.

        No row is freed in the first `REUNION_S` seconds after `inherit`.
        """
        if not self._unclaimed or now < self._kept_until:
            return False
        self._free(self.unclaimed[-1])
        return True

    def num_held_tokens(self, request: Request) -> int:
        """Return how many tokens of a resubmitted request have KV that only this request can use.

        This KV is in unclaimed rows and, without a prefix cache, in swapped-out blocks.
        """
        return sum(self._num_held_tokens(request, index) for index in range(request.n))

    def take_adopted(self) -> StepEvents | None:
        """Return the events of the sequences adopted since the last call, if there are any."""
        if not self._unreported:
            return None
        unreported, self._unreported = self._unreported, []
        ended, self._ended = tuple(self._ended), []
        seqs = [seq for seq, tokens, _ in unreported for _ in range(len(tokens))]
        logprobs: list[StepLogprob | None] = []
        for _, tokens, scores in unreported:
            logprobs += scores or [None] * len(tokens)
        new_tokens = (tokens for _, tokens, _ in unreported)
        token_ids = np.concatenate([np.empty(0, np.int32), *new_tokens])
        return StepEvents(
            sources=np.array([seq.request.source for seq in seqs], np.int32),
            seq_keys=np.array([seq.seq_key for seq in seqs], np.uint64),
            token_ids=token_ids,
            result_index=np.arange(len(seqs), dtype=np.int32),
            admitted=self._live.take_admitted(),
            finished=ended,
            logprobs=tuple((i, each) for i, each in enumerate(logprobs) if each is not None),
        )

    # --- adopted sequences ----------------------------------------------------------------------

    def with_separate_outputs(self, request: Request) -> Request:
        """Mark a request's outputs as diverged if an output after the first has an unclaimed row.

        Diverged outputs do not fork from the first one. The outputs may have diverged at the worker
        although the router has not received any token yet.
        """
        if not request.outputs and any(self._find_row(request, i) for i in range(1, request.n)):
            nothing = OutputSoFar(np.empty(0, np.int32), finished=False)
            request = replace(request, outputs=(nothing,) * request.n)
        return request

    def adopt(self, seq: Sequence) -> bool:
        """Let a sequence continue where the earlier scheduler left it, if the worker has its KV.

        Returns:
            Whether the sequence now runs, waits SWAPPED in the queue, or has ended. If false, the
            caller must queue the sequence. Always false for a search, because the KV of a
            search is looked up only at its admission.
        """
        if seq.group is not None:
            self._resume_search(seq, seq.group)
            return False
        return self._adopt_running(seq) or self._adopt_swapped(seq)

    def _find_row(self, request: Request, output_index: int) -> HeldRow | None:
        """Return the output's unclaimed row, if the row's tokens agree with the request's."""
        if not self._unclaimed:
            return None
        rows = self._unclaimed.get(identity(request, output_index), ())
        known = _known_tokens(request, output_index)
        return next((row for row in rows if _is_same(row.token_ids, known)), None)

    def _resume_search(self, leader: Sequence, group: BeamGroup) -> None:
        """Restore the state of a search; its KV is looked up when the search is admitted."""
        row = self._find_row(leader.request, 0)
        if row is None:
            return
        self._free(row)
        if row.search is not None and group.search.resume(row.search, row.token_ids):
            group.queue_leader()
            leader.num_computed_tokens = len(leader.token_ids) - 1
            leader.num_charged_tokens = leader.num_prompt_tokens
            self._live.record_admitted(leader, 0, leader.arrived)

    def _num_held_tokens(self, request: Request, output_index: int) -> int:
        if (row := self._find_row(request, output_index)) is not None:
            return row.num_computed_tokens
        if self._config.enable_prefix_caching or not self._tier.pool.num_cached:
            return 0  # the usual case
        kv = self._find_swapped(request, output_index, [])
        return 0 if kv is None else kv.num_tokens

    def _adopt_running(self, seq: Sequence) -> bool:
        """Continue a sequence in the blocks of its row, or end it.

        Return False if the sequence has no row, or if the KV of the row cannot be used.
        """
        row = self._find_row(seq.request, seq.output_index)
        if row is None or len(row.token_ids) > seq.max_total_tokens:
            return False
        has_output = len(seq.token_ids) > seq.num_prompt_tokens
        if not (seq.request.reads_prefix_cache or has_output):
            self._free(row)  # the router still waits for the prompt's log-probabilities
            return False
        num_known = len(seq.token_ids)
        num_new = len(row.token_ids) - num_known
        has_all = not row.had_logprobs or len(row.logprobs) >= num_new
        if num_new > 0 and has_all:
            seq.token_ids = row.token_ids
            self._live.record_admitted(seq, 0, seq.arrived)
            logprobs = row.logprobs[-num_new:] if row.had_logprobs else ()
            self._unreported.append((seq, row.token_ids[num_known:], logprobs))
            if row.has_stopped or len(row.token_ids) >= seq.max_total_tokens:
                self._free(row)
                self._queue.push(seq)
                reason = FinishReason.STOP if row.has_stopped else FinishReason.LENGTH
                last = int(row.token_ids[-1]) if row.has_stopped else None
                self._ended += self._finish(seq, reason, stop_token_id=last)
                return True
        return self._continue(seq, row)

    def _continue(self, seq: Sequence, row: HeldRow) -> bool:
        """Start a sequence in the blocks of its row; from now on the sequence holds the blocks.

        If the last block is not full, the sequence will write to it. So if this block is shared or
        has a hash, the sequence gets a copy of it. Blocks without computed tokens are dropped, and
        missing blocks are allocated. If too few blocks are available, the sequence waits with its
        KV on the host.

        Returns:
            Whether the sequence runs or waits with its KV on the host. If not, the row was freed.
        """
        num_computed = min(row.num_computed_tokens, len(seq.token_ids) - 1)
        if self._groups.has_states and (row.has_stopped or num_computed != row.num_computed_tokens):
            self._free(row)  # its state is ahead of the known tokens
            return False
        num_full, num_in_tail = divmod(num_computed, self._config.block_size)
        num_groups, table = self._groups.num, self._table(row)
        kept = table[: (num_full + bool(num_in_tail)) * num_groups]
        places = self._groups.kept(num_computed)
        blocks = [kept[place] for place in places]
        if not self._groups.is_plain and NULL_BLOCK in blocks:
            self._free(row)  # the sequence must recompute tokens whose window was given back
            return False
        num_before = max(seq.num_computed_tokens, row.num_computed_tokens)
        self._claim(row)
        self._pool.drop(self._groups.held(table[len(kept) :]))
        last = kept[-num_groups:] if num_in_tail else []
        copies = not all(map(self._pool.is_writable, last))
        ready = [*kept[:-num_groups]] if copies else [*kept]
        found = FoundKv(ready, [], [], num_computed)
        if not self._groups.is_plain:
            places = [place for place in places if place < len(ready)]
            shared, num_indices = [kept[place] for place in places], len(ready) // num_groups
            found = FoundKv(shared, [], [], num_computed, places, num_indices)
        if self._running.num_new_blocks(seq, found) > self._pool.num_available:
            seq.num_computed_tokens = num_before
            is_swapped = self._swap_out(seq, blocks, num_computed)
            self._pool.drop(blocks)
            return is_swapped
        if copies:
            seq.copy_from = tuple(last)
        self.num_recomputed_tokens += num_before - num_computed
        self.num_adopted_tokens += num_computed
        self._running.start(seq, found)
        self._pool.drop(self._groups.held(ready))
        seq.num_published_blocks = 0  # some are published already; publishing again is harmless
        seq.num_charged_tokens = min(num_computed, seq.num_prompt_tokens)
        self._live.record_admitted(seq, 0, seq.arrived)
        return True

    def _swap_out(self, seq: Sequence, blocks: list[DeviceBlockId], num_computed: int) -> bool:
        """Copy the blocks of a new sequence to the host; return False if the host has no room."""
        if not (num_computed and self._host_room.make_for_swap(len(blocks), num_computed)):
            return False
        self._running.swap_out(seq, blocks, num_computed)
        self._wait_swapped(seq, num_computed)
        return True

    def _adopt_swapped(self, seq: Sequence) -> bool:
        """Queue a sequence as SWAPPED if host and disk hold its KV; return whether they do."""
        if self._groups.has_states:  # only full blocks are useful, and admission finds full blocks
            return False
        size = self._config.block_size
        kv = self._find_swapped(seq.request, seq.output_index, seq.block_hashes)
        if kv is None or len(kv.host) + len(kv.disk) > self._tier.pool.num_blocks:
            return False  # a swap-in needs all KV on the host at once
        self._tier.pool.share(kv.host)
        self._tier.disk.pool.share(kv.disk)
        if not self._config.enable_prefix_caching:  # no other sequence can use these hashes
            self._tier.pool.forget(kv.host)
            self._tier.disk.pool.forget(kv.disk)
        elif (
            self._groups.is_plain
            and (num_blocks := len(kv.host) + len(kv.disk)) * size == kv.num_tokens + 1
        ):
            # The sequence writes the last slot of its last block again, so this block must not
            # be shared, even if it is being loaded for another sequence now.
            self._tier.forget(seq.block_hashes[num_blocks - 1 : num_blocks])
        seq.host_block_ids, seq.disk_block_ids = tuple(kv.host), tuple(kv.disk)
        self._wait_swapped(seq, kv.num_tokens)
        return True

    def _wait_swapped(self, seq: Sequence, num_computed: int) -> None:
        """Queue a new sequence; its host and disk blocks hold the KV of `num_computed` tokens."""
        self.num_recomputed_tokens += max(0, seq.num_computed_tokens - num_computed)
        self.num_adopted_tokens += num_computed
        seq.num_computed_tokens = num_computed
        seq.num_charged_tokens = min(num_computed, seq.num_prompt_tokens)
        self._live.record_admitted(seq, 0, seq.arrived)
        seq.set_status(SeqStatus.SWAPPED)
        self._queue.push(seq)

    def _find_swapped(
        self, request: Request, output_index: int, chain: list[BlockHash]
    ) -> "_SwappedKv | None":
        """Look on host and disk for the KV of an output, up to its last block, full or partial.

        With a prefix cache, the result is None in two cases: the output has no tokens yet, or its
        last block is not found. In both cases admission finds the full blocks by itself.

        Args:
            request: The request.
            output_index: The index of the output.
            chain: The hashes of the output's first full blocks, as far as they are known; this
                method adds the missing hashes. Not used without a prefix cache.
        """
        has_cache, size = self._config.enable_prefix_caching, self._config.block_size
        known = _known_tokens(request, output_index)
        has_output = len(known) > len(request.prompt_token_ids)
        may_find = has_output or (not has_cache and request.reads_prefix_cache)
        if not self._config.num_host_blocks or not may_find:
            return None
        chain = chain if has_cache else []
        root = swap_root(request, output_index, has_prefix_cache=has_cache)
        extend_chain(chain, root, known, size)
        if not self._groups.is_plain:
            return self._find_swapped_places(known, chain, root)
        hashes = chain[: (len(known) - 1) // size]
        host = self._tier.pool.find(hashes)
        disk = self._tier.disk.pool.find(hashes[len(host) :])
        num_full = len(host) + len(disk)
        next_end = (num_full + 1) * size
        # The last token that the router knows has KV if the worker sampled a further token.
        for end in range(min(len(known), next_end), num_full * size, -1):
            name = chain[num_full] if end == next_end else tail_hash(chain, root, known, end, size)
            host_tail = [] if disk else self._tier.pool.find([name])
            disk_tail = [] if host_tail else self._tier.disk.pool.find([name])
            if host_tail or disk_tail:
                num_tokens = min(end, len(known) - 1)
                return _SwappedKv([*host, *host_tail], [*disk, *disk_tail], num_tokens)
        return None if has_cache or not num_full else _SwappedKv(host, disk, num_full * size)

    def _find_swapped_places(
        self, known: Int32Array, chain: list[BlockHash], root: BlockHash
    ) -> "_SwappedKv | None":
        """Do the work of `_find_swapped` for a model with several KV groups or windows."""
        size = self._config.block_size
        num_full = (len(known) - 1) // size
        # A full last block would be shared, but the step writes to it, because it recomputes the
        # last known token.
        is_full = len(known) == (num_full + 1) * size
        for end in range(len(known) - is_full, num_full * size, -1):
            names = chain[:num_full]
            names.append(tail_hash(chain, root, known, end, size))
            names = self._groups.names(names, self._groups.kept(end))
            host = self._tier.pool.find(names)
            disk = self._tier.disk.pool.find(names[len(host) :])
            if len(host) + len(disk) == len(names):
                num_tokens = min(end, len(known) - 1)
                if self._groups.kept(num_tokens) == self._groups.kept(end):
                    return _SwappedKv(host, disk, num_tokens)
        return None

    def _table(self, row: HeldRow) -> list[DeviceBlockId]:
        """Return the block table of a row, with the null block for blocks behind the window."""
        table = [DeviceBlockId(block) for block in row.block_ids.tolist()]
        if self._groups.is_plain:
            return table
        kept = {*self._groups.kept(row.num_computed_tokens)}
        return [block if place in kept else NULL_BLOCK for place, block in enumerate(table)]

    def _held(self, row: HeldRow) -> list[DeviceBlockId]:
        return self._groups.held(self._table(row))

    def _claim(self, row: HeldRow) -> None:
        """Remove a row from the unclaimed ones; the caller now owns the row's block references."""
        rows = self._unclaimed[row.identity]
        rows.remove(row)
        if not rows:
            del self._unclaimed[row.identity]
        self._rows.num_reserved -= 1

    def _free(self, row: HeldRow) -> None:
        self._claim(row)
        self._pool.drop(self._held(row))


@dataclass(frozen=True, slots=True)
class _SwappedKv:
    host: list[HostBlockId]
    disk: list[DiskBlockId]
    """The disk blocks with the KV that follows the KV in `host`."""
    num_tokens: int


def _blocks(held: HeldBlocks, block_id: Callable[[int], BlockIdT]) -> list[BlockIdT]:
    return [block_id(block) for block in held.block_ids.tolist()]


def _known_tokens(request: Request, output_index: int) -> Int32Array:
    if not request.outputs:
        return request.prompt_token_ids
    return np.concatenate([request.prompt_token_ids, request.outputs[output_index].token_ids])


def _is_same(one: Int32Array, other: Int32Array) -> bool:
    """Return whether one of the two token arrays is a prefix of the other."""
    num_both = min(len(one), len(other))
    return bool((one[:num_both] == other[:num_both]).all())
