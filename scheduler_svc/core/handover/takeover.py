"""A scheduler core that goes on with what its worker holds of the scheduler before.

What is known of it, and what becomes of that:

    a sequence that had a row   its tokens and its block table; *unclaimed* until its request is
                                submitted again: then it runs on in its blocks, and computes nothing
                                again. If the next block that it needs is not free, it is as if it
                                were preempted: it waits with its KV on the host or, if there is no
                                host tier or no room in it, or to compute is preferred, is computed
                                again. Nobody knows what it was but by its identity.
    a search                    how far it was: it goes on as after a preemption, with what the
                                prefix cache has
    one that was swapped out    nothing but the names of its blocks, the partial tail included;
                                found by the tokens that its request comes with, it is SWAPPED
                                again. Without a prefix cache these names are its own. What holds
                                tokens of which its source has not heard has names that nobody can
                                make, so that less than a block before them is computed again; the
                                last of them may be missing
    blocks that are named       are cached: the prefix cache is as it was, in all tiers
    names that are pinned       are pinned for the rest of their time

Unclaimed blocks and rows are given to nobody else until `claim_s` have passed, or, after
`REUNION_S`, until somebody could not run otherwise. Not sooner: requests come again one by one, and
the first could take what the second runs on in. Then what is named among them stays in the cache,
and the rest is free.

The worker may have sampled tokens of which the source has not heard: it does now, with their
log-probabilities, so that not even those are computed again. If it lacks more of these than the
worker has kept, the tokens are drawn again, and come out the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from contract.arrays import Int32Array
from contract.hashing import BlockHash, extend_chain, tail_hash
from contract.state import HeldBlocks, HeldRow, Holdings
from contract.step import Plan, TokenLogprob
from scheduler_svc.core.beams.group import BeamGroup
from scheduler_svc.core.blocks import BlockIdT, DeviceBlockId, DiskBlockId, HostBlockId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import Finished, News
from scheduler_svc.core.handover.identity import identity, swap_root
from scheduler_svc.core.handover.moves import Replica
from scheduler_svc.core.prefix import FoundKv
from scheduler_svc.core.request import FinishReason, OutputSoFar, Request
from scheduler_svc.core.sequence import SeqStatus, Sequence

REUNION_S = 2.0
"""How long what nobody has claimed is kept even from those who cannot run without: all who will
claim are there by then, as a rule."""


class Successor(Replica):
    """The sequences and blocks of one worker, which may have had a scheduler before."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._unclaimed: dict[bytes, list[HeldRow]] = {}
        self._kept_until = 0.0
        self._claimable_until = 0.0
        self._told: list[tuple[Sequence, Int32Array, tuple[TokenLogprob, ...]]] = []
        """Tokens that sequences had already, and of which their sources have not heard; with their
        log-probabilities, if these are wanted."""
        self._ended: list[Finished] = []

    # --- taking over ----------------------------------------------------------------------------

    def inherit(self, holdings: Holdings, now: float) -> None:
        """Learn what the worker holds; once, before anything else."""
        for row in holdings.rows[: self.config.max_num_seqs]:
            self._unclaimed.setdefault(row.identity, []).append(row)
        self._kept_until = now + REUNION_S
        self._claimable_until = now + self.config.claim_s
        self._rows.num_reserved += len(self.unclaimed)
        device, host, disk = holdings.device, holdings.host, holdings.disk
        tables = [_table(row) for row in self.unclaimed]
        self._tier.pool.restore((), _blocks(host, HostBlockId), host.hashes)
        self._tier.disk.pool.restore((), _blocks(disk, DiskBlockId), disk.hashes)
        if not self.config.enable_prefix_caching:
            self._pool.restore(tables, (), ())
            return
        self._pool.restore(tables, _blocks(device, DeviceBlockId), device.hashes)
        self._pins.restore(holdings.pins, now)

    @property
    def unclaimed(self) -> list[HeldRow]:
        """The sequences that had a row and whose requests have not come again."""
        return [row for rows in self._unclaimed.values() for row in rows]

    def num_held_tokens(self, request: Request) -> int:
        """Return how many tokens of a request have KV here that only it can find.

        They have rows, or, without a prefix cache, were swapped out.
        """
        return sum(self._num_held_tokens(request, index) for index in range(request.n))

    def take_adopted(self) -> News | None:
        """Return what the sources must hear of what was adopted since the last call."""
        if not (self._told or self._ended):
            return None
        told, self._told = self._told, []
        ended, self._ended = tuple(self._ended), []
        admitted, self._admitted = tuple(self._admitted), []
        seqs = [seq for seq, tokens, _ in told for _ in range(len(tokens))]
        logprobs: list[TokenLogprob | None] = []
        for _, tokens, scores in told:
            logprobs += scores or [None] * len(tokens)
        return News(
            sources=np.array([seq.request.source for seq in seqs], np.int32),
            seq_keys=np.array([seq.seq_key for seq in seqs], np.uint64),
            token_ids=np.concatenate([np.empty(0, np.int32), *(tokens for _, tokens, _ in told)]),
            result_index=np.arange(len(seqs), dtype=np.int32),
            admitted=admitted,
            finished=ended,
            logprobs=tuple((i, each) for i, each in enumerate(logprobs) if each is not None),
        )

    # --- what a core does -----------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """See `Scheduler`; what the worker has of it is not computed again."""
        has_diverged = request.beam is None and not request.outputs and request.n > 1
        if has_diverged and any(self._find(request, index) for index in range(1, request.n)):
            nothing = OutputSoFar(np.empty(0, np.int32), finished=False)
            request = replace(request, outputs=(nothing,) * request.n)
        super().submit(request, now)

    def schedule(
        self,
        now: float,
        max_paced_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> Plan | None:
        """See `Scheduler`; nobody waits for ever for what nobody claims."""
        if self._unclaimed and now >= self._claimable_until:
            for row in self.unclaimed:
                self._let_go(row)
        plan = super().schedule(now, max_paced_tokens, max_prompt_tokens)
        if now < self._kept_until:
            return plan
        while plan is None and self._unclaimed and self._waiting and not self._steps:
            self._let_go(self.unclaimed[-1])
            plan = super().schedule(now, max_paced_tokens, max_prompt_tokens)
        return plan

    # --- parts ----------------------------------------------------------------------------------

    def _enqueue(self, seq: Sequence) -> None:
        if seq.group is not None:
            self._resume_search(seq, seq.group)
        elif self._adopt_running(seq) or self._adopt_swapped(seq):
            return
        super()._enqueue(seq)

    def _find(self, request: Request, output_index: int) -> HeldRow | None:
        """Return an unclaimed row that is an output's, of whose tokens either has a beginning."""
        if not self._unclaimed:
            return None
        rows = self._unclaimed.get(identity(request, output_index), ())
        known = _known_tokens(request, output_index)
        return next((row for row in rows if _is_same(row.token_ids, known)), None)

    def _resume_search(self, leader: Sequence, group: BeamGroup) -> None:
        """Let a search be as far as it was; it finds what it needs, or computes it."""
        row = self._find(leader.request, 0)
        if row is None:
            return
        self._let_go(row)
        if row.search is not None and group.search.resume(row.search, row.token_ids):
            group.queue_leader()
            leader.num_computed_tokens = len(leader.token_ids) - 1
            leader.num_charged_tokens = leader.num_prompt_tokens
            self._tell_admitted(leader, 0, leader.arrived)

    def _num_held_tokens(self, request: Request, output_index: int) -> int:
        if (row := self._find(request, output_index)) is not None:
            return row.num_computed_tokens
        if self.config.enable_prefix_caching or not self._tier.pool.num_cached:
            return 0  # as most often: it is asked for every request
        kv = self._find_swapped(request, output_index, [])
        return 0 if kv is None else kv.num_tokens

    def _adopt_running(self, seq: Sequence) -> bool:
        """Let a sequence run on in the blocks of its row, if there is one."""
        row = self._find(seq.request, seq.output_index)
        if row is None or len(row.token_ids) > seq.max_total_tokens:
            return False
        has_all_to_tell = len(seq.token_ids) > seq.num_prompt_tokens
        if not (seq.request.reads_prefix_cache or has_all_to_tell):
            return False  # its prompt's log-probabilities are still to be told
        num_known = len(seq.token_ids)
        num_new = len(row.token_ids) - num_known
        has_all = not row.had_logprobs or len(row.logprobs) >= num_new
        if num_new > 0 and has_all:
            seq.token_ids = row.token_ids
            self._tell_admitted(seq, 0, seq.arrived)
            logprobs = row.logprobs[-num_new:] if row.had_logprobs else ()
            self._told.append((seq, row.token_ids[num_known:], logprobs))
            if row.has_stopped or len(row.token_ids) >= seq.max_total_tokens:
                self._let_go(row)
                self._waiting.push(seq)
                reason = FinishReason.STOP if row.has_stopped else FinishReason.LENGTH
                last = int(row.token_ids[-1]) if row.has_stopped else None
                self._ended += self._finish(seq, reason, stop_token_id=last)
                return True
        return self._run_on(seq, row)

    def _run_on(self, seq: Sequence, row: HeldRow) -> bool:
        """Start a sequence in the blocks of its row, which are its own from now on.

        A last block that is not its own to write, it copies. Blocks in which nothing is computed
        are given back, and others taken. If there are none, it waits with its KV on the host.
        """
        num_computed = min(row.num_computed_tokens, len(seq.token_ids) - 1)
        num_full, num_in_tail = divmod(num_computed, self.config.block_size)
        table = _table(row)
        kept = table[: num_full + bool(num_in_tail)]
        num_before = max(seq.num_computed_tokens, row.num_computed_tokens)
        self._claim(row)
        self._pool.drop(table[len(kept) :])
        copies = bool(num_in_tail) and not self._pool.is_writable(kept[-1])
        ready = [*kept[:-1]] if copies else [*kept]
        num_new = -(-len(seq.token_ids) // self.config.block_size) - len(ready)
        if num_new > self._pool.num_free:
            seq.num_computed_tokens = num_before
            is_out = self._swap_out(seq, [*kept], num_computed)
            self._pool.drop(kept)
            return is_out
        if copies:
            seq.copy_from = kept[-1]
        self._num_recomputed_tokens += num_before - num_computed
        self._num_adopted_tokens += num_computed
        self._running.start(seq, FoundKv(ready, [], [], num_computed), num_new)
        self._pool.drop(ready)
        seq.num_published_blocks = 0  # the worker knows of some, and of which is not known here
        seq.num_charged_tokens = min(num_computed, seq.num_prompt_tokens)
        self._tell_admitted(seq, 0, seq.arrived)
        return True

    def _swap_out(self, seq: Sequence, blocks: list[DeviceBlockId], num_computed: int) -> bool:
        """Let a new sequence wait with what these blocks hold, if the host has room for it."""
        if not (num_computed and self._host_room.make_for_swap(len(blocks), num_computed)):
            return False
        self._running.swap_out(seq, blocks, num_computed)
        self._wait_swapped(seq, num_computed)
        return True

    def _adopt_swapped(self, seq: Sequence) -> bool:
        """Let a sequence wait with its KV, if host and disk have what was swapped out."""
        kv = self._find_swapped(seq.request, seq.output_index, seq.block_hashes)
        if kv is None:
            return False
        self._tier.pool.share(kv.host)
        self._tier.disk.pool.share(kv.disk)
        if not self.config.enable_prefix_caching:  # they have been found by all who may
            self._tier.pool.forget(kv.host)
            self._tier.disk.pool.forget(kv.disk)
        seq.host_block_ids, seq.disk_block_ids = tuple(kv.host), tuple(kv.disk)
        self._wait_swapped(seq, kv.num_tokens)
        return True

    def _wait_swapped(self, seq: Sequence, num_computed: int) -> None:
        """Let a new sequence wait with so many tokens' KV in its blocks on host and disk."""
        self._num_recomputed_tokens += max(0, seq.num_computed_tokens - num_computed)
        self._num_adopted_tokens += num_computed
        seq.num_computed_tokens = num_computed
        seq.num_charged_tokens = min(num_computed, seq.num_prompt_tokens)
        self._tell_admitted(seq, 0, seq.arrived)
        seq.move(SeqStatus.MIGRATING)  # from one core to the next
        seq.move(SeqStatus.SWAPPED)
        self._waiting.push(seq)

    def _find_swapped(
        self, request: Request, output_index: int, chain: list[BlockHash]
    ) -> "_SwappedKv | None":
        """Look for an output's KV up to its last block, a partial one or not, on host and disk.

        What they have of full blocks only, the prefix cache finds at admission, if there is one. So
        it does for a prompt of which no output is known.

        Args:
            request: Whose it is.
            output_index: Which output.
            chain: Its hashes, as far as they are known, if there is a prefix cache; extended.
        """
        has_cache, size = self.config.enable_prefix_caching, self.config.block_size
        known = _known_tokens(request, output_index)
        has_output = len(known) > len(request.prompt_token_ids)
        may_find = has_output or (not has_cache and request.reads_prefix_cache)
        if not self.config.num_host_blocks or not may_find:
            return None
        chain = chain if has_cache else []
        root = swap_root(request, output_index, has_prefix_cache=has_cache)
        extend_chain(chain, root, known, size)
        hashes = chain[: (len(known) - 1) // size]
        host = self._tier.pool.find(hashes)
        disk = self._tier.disk.pool.find(hashes[len(host) :])
        num_full = len(host) + len(disk)
        next_end = (num_full + 1) * size
        # To its end, if a token has been drawn after these of which the source has not heard.
        for end in range(min(len(known), next_end), num_full * size, -1):
            name = chain[num_full] if end == next_end else tail_hash(chain, root, known, end, size)
            host_tail = [] if disk else self._tier.pool.find([name])
            disk_tail = [] if host_tail else self._tier.disk.pool.find([name])
            if host_tail or disk_tail:
                num_tokens = min(end, len(known) - 1)
                return _SwappedKv([*host, *host_tail], [*disk, *disk_tail], num_tokens)
        return None if has_cache or not num_full else _SwappedKv(host, disk, num_full * size)

    def _claim(self, row: HeldRow) -> None:
        """Take a row out of those unclaimed; its blocks are the caller's."""
        rows = self._unclaimed[row.identity]
        rows.remove(row)
        if not rows:
            del self._unclaimed[row.identity]
        self._rows.num_reserved -= 1

    def _let_go(self, row: HeldRow) -> None:
        self._claim(row)
        self._pool.drop(_table(row))

    @property
    def held_device_blocks(self) -> list[DeviceBlockId]:
        """The device blocks that unclaimed rows hold, each as often as it is held."""
        return [block for row in self.unclaimed for block in _table(row)]


@dataclass(frozen=True, slots=True)
class _SwappedKv:
    host: list[HostBlockId]
    disk: list[DiskBlockId]
    """Behind those on the host."""
    num_tokens: int


def _table(row: HeldRow) -> list[DeviceBlockId]:
    return [DeviceBlockId(block) for block in row.block_ids.tolist()]


def _blocks(held: HeldBlocks, block_id: Callable[[int], BlockIdT]) -> list[BlockIdT]:
    return [block_id(block) for block in held.block_ids.tolist()]


def _known_tokens(request: Request, output_index: int) -> Int32Array:
    if not request.outputs:
        return request.prompt_token_ids
    return np.concatenate([request.prompt_token_ids, request.outputs[output_index].token_ids])


def _is_same(one: Int32Array, other: Int32Array) -> bool:
    """Whether one of two token streams begins with the other."""
    num_both = min(len(one), len(other))
    return bool((one[:num_both] == other[:num_both]).all())
