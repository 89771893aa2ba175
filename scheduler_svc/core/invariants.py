"""What is always true of a scheduler core, counted the slow way."""

from collections import Counter

import numpy as np

from scheduler_svc.core.blocks import BlockIdT, BlockPool, DiskBlockId, HostBlockId
from scheduler_svc.core.errors import BrokenInvariantError
from scheduler_svc.core.handover.moves import Replica
from scheduler_svc.core.handover.takeover import Successor
from scheduler_svc.core.policies.policy import rank
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QUEUED, RUNNING, SeqStatus, Sequence

_ON_HOST = (SeqStatus.SWAPPED, SeqStatus.MIGRATING)


def check(core: Scheduler) -> None:
    """Check the books of `core`; it may be called between any two operations.

    Raises:
        BrokenInvariantError: Naming what is wrong.
    """
    pool, rows = core._pool, core._rows  # noqa: SLF001
    live = list(core._live)  # noqa: SLF001
    running = [seq for seq in live if seq.status in RUNNING]

    holders = Counter(core._steps.held_blocks)  # noqa: SLF001
    for seq in live:
        holders.update(seq.block_ids)
        if seq.copy_from is not None:
            holders[seq.copy_from] += 1
    holders.update(list(core._pins._ends))  # noqa: SLF001
    num_unclaimed = 0
    if isinstance(core, Successor):
        holders.update(core.held_device_blocks)
        num_unclaimed = len(core.unclaimed)
    _check_pool(pool, holders)
    _check_pins(core)
    _check_host(core, live)
    _check_disk(core, live)
    _check_fetching(core, live)

    owned = [seq.row for seq in running if seq.row is not None]
    places = owned + core._steps.held_rows + rows._free  # noqa: SLF001
    _expect(sorted(places) == list(range(rows.max_num_seqs)), "a row is nowhere, or twice")
    for seq in running:
        assert seq.row is not None
        _expect(rows.owner(seq.row) is seq, f"row {seq.row} has another owner")
        (account,) = rows.accounts.count(np.array([seq.row], np.int32))
        _expect(account == (seq.place.account, 1), f"row {seq.row} is of another account")
        slots = len(seq.block_ids) * core.config.block_size
        known = rows.num_tokens(seq.row)
        _expect(known - 1 <= slots, f"sequence {seq.seq_id} has {known} tokens and {slots} slots")
        if seq.status is SeqStatus.PREFILL:
            _expect(seq.num_computed_tokens < known, "a computed prompt is still in prefill")
            writable = seq.block_ids[seq.num_computed_tokens // core.config.block_size :]
            _expect(
                all(pool.ref_count(block) == 1 for block in writable),
                f"sequence {seq.seq_id} would write a shared block",
            )

    _expect(
        set(core._running._seqs.values()) == set(running)  # noqa: SLF001
        and list(core._running.prefilling)  # noqa: SLF001
        == sorted((s for s in running if s.status is SeqStatus.PREFILL), key=lambda s: s.order),
        "the running sequences are not those listed",
    )
    waiting = [seq for seq in live if seq.status in QUEUED]
    _expect(
        len(core._waiting) == len(waiting) and all(seq in core._waiting for seq in waiting),  # noqa: SLF001
        "the waiting sequences are not those queued",
    )
    accounts = Counter(seq.place.account for seq in waiting)
    _expect(
        core._waiting._num_waiting == accounts,  # noqa: SLF001
        "the waiting sequences of an account are miscounted",
    )
    if waiting:
        ranks = [rank(core._policy, seq.place, seq.seq_id) for seq in waiting]  # noqa: SLF001
        first = core._waiting.first()  # noqa: SLF001
        _expect(first is waiting[ranks.index(min(ranks))], "the first in order is another")
    siblings = [sibling for seq in live for sibling in seq.siblings]
    _expect(
        {seq for seq in live if seq.status is SeqStatus.SIBLING} == set(siblings)
        and len(siblings) == core._live.num_siblings,  # noqa: SLF001
        "a sibling has no leader, or two",
    )
    groups = {id(seq.group): seq.group for seq in live if seq.group is not None}.values()
    _expect(
        rows.num_reserved
        == sum(len(group.spares) for group in groups if group.places) + num_unclaimed
        and rows.num_reserved <= len(rows._free),  # noqa: SLF001
        "the rows that are kept for beams, or may be claimed, are miscounted",
    )
    for group in groups:
        beams = [seq for seq in group.seqs if seq.status in RUNNING]
        _expect(
            set(group.places) == set(beams) and len(beams) == len(group.places),
            f"the beams of sequence {group.leader.seq_id} are not those listed",
        )
        _expect(
            bool(group.places) == (group in list(core._beams)),  # noqa: SLF001
            f"the search of sequence {group.leader.seq_id} runs and does not",
        )
    next_step = core._steps.last + 1  # noqa: SLF001
    decoding = [seq for seq in running if seq.status is SeqStatus.DECODE]
    _expect(
        core._running.num_decoding  # noqa: SLF001
        == sum(s.last_step is None or s.last_step >= next_step for s in decoding),
        "the decoding sequences are miscounted",
    )
    _expect(
        core._steps or not core._steps.hold_blocks,  # noqa: SLF001
        "blocks are held for a step that is not in flight",
    )


def _expect(condition: object, what: str) -> None:
    if not condition:
        raise BrokenInvariantError(what)


def _check_pool(pool: BlockPool[BlockIdT], holders: Counter[BlockIdT]) -> None:
    cached = [pool._hash_to_block[block_hash] for block_hash in pool._cached]  # noqa: SLF001
    blank = pool._blank + pool._blank_beyond  # noqa: SLF001
    blocks = blank + cached
    free = set(blocks)
    _expect(len(free) == len(blocks), "a block is free twice")
    _expect(free.isdisjoint(holders), f"blocks {free & set(holders)} are held and free")
    retired = {*range(pool.num_usable, pool.num_blocks)} - set(holders)
    _expect(free.isdisjoint(retired), f"blocks {free & retired} are out of use and free")
    _expect(
        len(free) + len(holders) + len(retired) == pool.num_blocks,
        "a block is neither held nor free, nor out of use",
    )
    _expect(not any(map(pool._hashes.__getitem__, retired)), "a block out of use can be found")  # noqa: SLF001
    counted = {block: pool.ref_count(block) for block in (*free, *holders)}
    wrong = {block: n for block, n in counted.items() if n != holders[block]}
    _expect(not wrong, f"wrong reference counts: {wrong}")
    _expect(all(map(pool.is_cached, cached)), "a block is in the order of eviction but not cached")
    _expect(not any(map(pool._hashes.__getitem__, blank)), "a blank block can be found")  # noqa: SLF001
    highest, lowest = max(pool._blank, default=-1), min(pool._blank_beyond, default=pool.num_blocks)  # noqa: SLF001
    _expect(highest < pool._border <= lowest, "a blank block is across the border")  # noqa: SLF001
    named = {block_hash: block for block, block_hash in enumerate(pool._hashes) if block_hash}  # noqa: SLF001
    _expect(named == pool._hash_to_block, "blocks are not found by their hashes, or by others")  # noqa: SLF001


def _check_pins(core: Scheduler) -> None:
    pins = core._pins  # noqa: SLF001
    share = core.config.max_pinned_share
    most = share * core._pool.num_usable  # noqa: SLF001
    _expect(len(pins) <= most, f"{len(pins)} blocks are pinned")
    _expect(set(pins._by_end) == set(pins._ends), "a pin never ends, or is none")  # noqa: SLF001
    first = min(((end, place) for end, place in pins._ends.values()), default=None)  # noqa: SLF001
    head = pins._by_end.first()  # noqa: SLF001
    is_first = head is None or pins._ends[head[1]] == first  # noqa: SLF001
    _expect(is_first, "the pin that ends first is another")


def _check_host(core: Scheduler, live: list[Sequence]) -> None:
    tier = core._tier  # noqa: SLF001
    waiting = list(tier._swap_ins.items())  # noqa: SLF001
    moves = waiting + [move for _, step in tier._in_flight for move in step.items()]  # noqa: SLF001
    holders: Counter[HostBlockId] = Counter(source for _, source in moves)
    holders.update(list(tier.disk._loads))  # noqa: SLF001
    for seq in live:
        holders.update(seq.host_block_ids)
        holders.update(seq.fetched_block_ids)
    if isinstance(core, Replica):
        holders.update(core.held_host_blocks)
    _check_pool(tier.pool, holders)
    for source, target in tier._targets.items():  # noqa: SLF001
        _expect((target, source) in moves, f"host block {source} is not on its way to {target}")
    for target, _ in waiting:
        _expect(core._pool._hashes[target] is None, f"block {target} is found before it is there")  # noqa: SLF001
        _expect(
            any(target in seq.loading_block_ids for seq in live),
            f"nobody waits for the swap-in to block {target}",
        )

    swapped = [seq for seq in live if seq.status is SeqStatus.SWAPPED]
    _expect(len(swapped) == core._waiting.num_swapped, "the swapped sequences are miscounted")  # noqa: SLF001
    for seq in swapped:
        num_blocks = len(seq.host_block_ids) + len(seq.disk_block_ids)
        slots = num_blocks * core.config.block_size
        _expect(
            0 < seq.num_computed_tokens <= slots and seq.num_computed_tokens < len(seq.token_ids),
            f"sequence {seq.seq_id}: {seq.num_computed_tokens} tokens in {slots} slots",
        )
    loading = [seq for seq in live if seq.loading_block_ids]
    _expect(
        set(core._running._loading.values()) == set(loading),  # noqa: SLF001
        "the sequences that are being swapped in are not those listed",
    )
    for seq in live:
        _expect(
            not seq.host_block_ids
            or seq.status in _ON_HOST
            or (seq.status is SeqStatus.FETCHING and seq.disk_block_ids)
            or seq in loading,
            f"sequence {seq.seq_id} holds host blocks that it does not need",
        )
        for block in seq.loading_block_ids:
            _expect(tier.is_loading(block), f"sequence {seq.seq_id} waits for {block} in vain")


def _check_disk(core: Scheduler, live: list[Sequence]) -> None:
    disk, host = core._tier.disk, core._tier.pool  # noqa: SLF001
    loads = disk._loads  # noqa: SLF001
    holders: Counter[DiskBlockId] = Counter(list(disk._stores))  # noqa: SLF001
    holders.update(load.source for load in loads.values())
    for seq in live:
        holders.update(seq.disk_block_ids)
        _expect(
            not seq.disk_block_ids or seq.status in (SeqStatus.SWAPPED, SeqStatus.FETCHING),
            f"sequence {seq.seq_id} holds disk blocks that it does not need",
        )
    _check_pool(disk.pool, holders)
    _expect(disk._new_stores.keys() <= disk._stores.keys(), "a store goes out that nobody holds")  # noqa: SLF001
    for block, block_hash in disk._stores.items():  # noqa: SLF001
        _expect(disk.pool._hashes[block] is None, f"disk block {block} is found before its time")  # noqa: SLF001
        storing = block_hash is None or disk._storing.get(block_hash) == block  # noqa: SLF001
        _expect(storing, f"the content of disk block {block} is stored elsewhere")
    _expect(
        len(disk._storing) == sum(h is not None for h in disk._stores.values()),  # noqa: SLF001
        "a content is being stored by nobody",
    )
    _expect(disk._new_loads.keys() <= loads.keys(), "a load goes out that nobody holds")  # noqa: SLF001
    _expect(
        disk._targets == {load.source: target for target, load in loads.items()},  # noqa: SLF001
        "a disk block is loaded twice, or its load is lost",
    )
    for target, load in loads.items():
        _expect(host._hashes[target] is None, f"host block {target} is found before its time")  # noqa: SLF001
        _expect(load.source not in disk._stores, f"disk block {load.source} is loaded too early")  # noqa: SLF001


def _check_fetching(core: Scheduler, live: list[Sequence]) -> None:
    awaited = core._fetching._awaited  # noqa: SLF001
    fetching = {seq for seq in live if seq.status is SeqStatus.FETCHING}
    _expect(fetching == set(awaited), "the fetching sequences are not those listed")
    waiters = core._fetching._waiters  # noqa: SLF001
    _expect(
        {(seq, block) for seq, blocks in awaited.items() for block in blocks}
        == {(seq, block) for block, seqs in waiters.items() for seq in seqs},
        "who waits for a load is miscounted",
    )
    for seq, blocks in awaited.items():
        _expect(blocks, f"sequence {seq.seq_id} waits for nothing")
        _expect(seq.row is None and not seq.block_ids, f"sequence {seq.seq_id} fetches and runs")
        held = {*seq.host_block_ids, *seq.fetched_block_ids}
        _expect(blocks <= held, f"sequence {seq.seq_id} waits for loads that it does not hold")
        for block in blocks:
            _expect(block in core._tier.disk._loads, f"sequence {seq.seq_id} waits in vain")  # noqa: SLF001
    for seq in live:
        _expect(
            not seq.fetched_block_ids or seq.status in (SeqStatus.FETCHING, SeqStatus.WAITING),
            f"sequence {seq.seq_id} holds fetched blocks that it does not need",
        )
