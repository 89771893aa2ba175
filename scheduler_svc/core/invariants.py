"""What is always true of a scheduler core, counted the slow way."""

from collections import Counter

import numpy as np

from scheduler_svc.core.block_pool import DeviceBlockId
from scheduler_svc.core.errors import BrokenInvariantError
from scheduler_svc.core.policies.policy import rank
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import RUNNING, SeqStatus


def check(core: Scheduler) -> None:
    """Check the books of `core`; it may be called between any two operations.

    Raises:
        BrokenInvariantError: Naming what is wrong.
    """

    def expect(condition: object, what: str) -> None:
        if not condition:
            raise BrokenInvariantError(what)

    pool, rows = core._pool, core._rows  # noqa: SLF001
    live = [seq for by_key in core._live.values() for seq in by_key.values()]  # noqa: SLF001
    running = [seq for seq in live if seq.status in RUNNING]

    holders = Counter(core._steps.held_blocks)  # noqa: SLF001
    for seq in live:
        holders.update(seq.block_ids)
        if seq.copy_from is not None:
            holders[seq.copy_from] += 1
    free = set(pool._blank) | set(pool._cached)  # noqa: SLF001
    expect(len(free) == pool.num_free, "a block is free twice")
    for block in map(DeviceBlockId, range(pool.num_blocks)):
        refs = pool.ref_count(block)
        expect(refs == holders[block], f"block {block}: {refs} counted, {holders[block]} hold it")
        expect(
            (refs == 0) == (block in free), f"block {block}: {refs} hold it, free: {block in free}"
        )
    for block_hash, block in pool._hash_to_block.items():  # noqa: SLF001
        expect(pool._hashes[block] == block_hash, f"block {block} is found by another's hash")  # noqa: SLF001
    expect(
        sum(h is not None for h in pool._hashes) == len(pool._hash_to_block),  # noqa: SLF001
        "a block has a hash and cannot be found",
    )

    owned = [seq.row for seq in running if seq.row is not None]
    places = owned + core._steps.held_rows + rows._free  # noqa: SLF001
    expect(sorted(places) == list(range(rows.max_num_seqs)), "a row is nowhere, or twice")
    for seq in running:
        assert seq.row is not None
        expect(rows.owner(seq.row) is seq, f"row {seq.row} has another owner")
        (account,) = rows.accounts.count(np.array([seq.row], np.int32))
        expect(account == (seq.place.account, 1), f"row {seq.row} is of another account")
        slots = len(seq.block_ids) * core.config.block_size
        known = rows.num_tokens(seq.row)
        expect(known - 1 <= slots, f"sequence {seq.seq_id} has {known} tokens and {slots} slots")
        if seq.status is SeqStatus.PREFILL:
            expect(seq.num_computed_tokens < known, "a computed prompt is still in prefill")
            writable = seq.block_ids[seq.num_computed_tokens // core.config.block_size :]
            expect(
                all(pool.ref_count(block) == 1 for block in writable),
                f"sequence {seq.seq_id} would write a shared block",
            )

    expect(
        set(core._running._seqs.values()) == set(running)  # noqa: SLF001
        and list(core._running.prefilling)  # noqa: SLF001
        == sorted((s for s in running if s.status is SeqStatus.PREFILL), key=lambda s: s.order),
        "the running sequences are not those listed",
    )
    waiting = [seq for seq in live if seq.status is SeqStatus.WAITING]
    expect(
        len(core._waiting) == len(waiting) and all(seq in core._waiting for seq in waiting),  # noqa: SLF001
        "the waiting sequences are not those queued",
    )
    accounts = Counter(seq.place.account for seq in waiting)
    expect(
        core._waiting._num_waiting == accounts,  # noqa: SLF001
        "the waiting sequences of an account are miscounted",
    )
    if waiting:
        ranks = [rank(core._policy, seq.place, seq.seq_id) for seq in waiting]  # noqa: SLF001
        first = core._waiting.first()  # noqa: SLF001
        expect(first is waiting[ranks.index(min(ranks))], "the first in order is another")
    siblings = [sibling for seq in live for sibling in seq.siblings]
    expect(
        {seq for seq in live if seq.status is SeqStatus.SIBLING} == set(siblings)
        and len(siblings) == core._num_siblings,  # noqa: SLF001
        "a sibling has no leader, or two",
    )
    next_step = core._steps.last + 1  # noqa: SLF001
    decoding = [seq for seq in running if seq.status is SeqStatus.DECODE]
    expect(
        core._running.num_decoding == sum((s.last_step or 0) >= next_step for s in decoding),  # noqa: SLF001
        "the decoding sequences are miscounted",
    )
    expect(
        core._steps or not core._steps.hold_blocks,  # noqa: SLF001
        "blocks are held for a step that is not in flight",
    )
