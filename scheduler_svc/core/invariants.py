"""Checks the invariants of a scheduler core by counting all blocks and rows; for tests."""

from collections import Counter

import numpy as np

from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QUEUED, RUNNING, SeqStatus, Sequence
from scheduler_svc.core.space.blocks import (
    BlockIdT,
    BlockPool,
    DeviceBlockId,
    DiskBlockId,
    HostBlockId,
)
from scheduler_svc.core.space.kv_groups import NULL_BLOCK

_ON_HOST = (SeqStatus.SWAPPED, SeqStatus.MIGRATING)


def check(core: Scheduler) -> None:
    """Check a core; may be called between any two operations.

    Raises:
        BrokenInvariantError: The message names what is wrong.
    """
    live = list(core.live)
    running = [seq for seq in live if seq.status in RUNNING]
    _check_pool(core.pool, _device_holders(core, live))
    _check_pins(core)
    _check_host(core, live)
    _check_disk(core, live)
    _check_fetching(core, live)
    _check_rows(core, running)
    for seq in running:
        _check_windows(core, seq)
        _check_running(core, seq)
    _check_running_set(core, running)
    _check_queue(core, live)
    _check_requests(core, live)
    _check_searches(core, live)
    _expect(
        core.steps or not core.steps.hold_blocks,
        "blocks are held for a step that is not in flight",
    )


def _device_holders(core: Scheduler, live: list[Sequence]) -> Counter[DeviceBlockId]:
    """Count the holders of each device block."""
    holders = Counter(core.steps.held_blocks)
    for seq in live:
        holders.update(core.groups.held(seq.block_ids))
        holders.update(seq.copy_from)
    holders.update(list(core.pins))
    holders.update(core.takeover.held_device_blocks)
    if not core.groups.is_plain:
        holders[NULL_BLOCK] += 1
    return holders


def _check_rows(core: Scheduler, running: list[Sequence]) -> None:
    rows = core.rows
    owned = [seq.row for seq in running if seq.row is not None]
    all_rows = owned + core.steps.held_rows + list(rows.free)
    _expect(
        sorted(all_rows) == list(range(rows.max_num_seqs)), "a row is missing, or counted twice"
    )


def _check_running(core: Scheduler, seq: Sequence) -> None:
    """Check the row, the account and the blocks of a running sequence."""
    rows = core.rows
    assert seq.row is not None
    _expect(rows.owner(seq.row) is seq, f"row {seq.row} has another owner")
    (account,) = rows.accounts.count(np.array([seq.row], np.int32))
    _expect(account == (seq.rank.account, 1), f"row {seq.row} is of another account")
    slots = len(seq.block_ids) // core.groups.num * core.config.block_size
    known = rows.num_tokens(seq.row)
    _expect(known - 1 <= slots, f"sequence {seq.seq_id} has {known} tokens and {slots} slots")
    if seq.status is SeqStatus.PREFILL:
        _expect(seq.num_computed_tokens < known, "a computed prompt is still in prefill")
        start = seq.num_computed_tokens // core.config.block_size * core.groups.num
        writable = core.groups.held(seq.block_ids[start:])
        _expect(
            all(core.pool.ref_count(block) == 1 for block in writable),
            f"sequence {seq.seq_id} would write a shared block",
        )


def _check_running_set(core: Scheduler, running: list[Sequence]) -> None:
    _expect(
        set(core.running) == set(running)
        and list(core.running.prefilling)
        == sorted((s for s in running if s.status is SeqStatus.PREFILL), key=lambda s: s.order),
        "the running sequences are not those listed",
    )
    next_step = core.steps.last + 1
    decoding = [seq for seq in running if seq.status is SeqStatus.DECODE]
    _expect(
        core.running.num_decoding
        == sum(s.last_step is None or s.last_step >= next_step for s in decoding),
        "the decoding sequences are miscounted",
    )


def _check_queue(core: Scheduler, live: list[Sequence]) -> None:
    waiting = [seq for seq in live if seq.status in QUEUED]
    _expect(
        len(core.queue) == len(waiting) and all(seq in core.queue for seq in waiting),
        "the waiting sequences are not those queued",
    )
    accounts = Counter(seq.rank.account for seq in waiting)
    _expect(
        core.queue.num_waiting_by_account == accounts,
        "the waiting sequences of an account are miscounted",
    )
    if waiting:
        first = min(waiting, key=core.queue.sort_key)
        _expect(core.queue.first() is first, "another sequence is the first in order")


def _check_requests(core: Scheduler, live: list[Sequence]) -> None:
    """Check that each sibling has one leader; recount the outputs above the lowest priority."""
    siblings = [sibling for seq in live for sibling in seq.siblings]
    _expect(
        {seq for seq in live if seq.status is SeqStatus.SIBLING} == set(siblings)
        and len(siblings) == core.live.num_siblings,
        "a sibling has no leader, or two leaders",
    )
    outputs = {each for seq in live for each in seq.outputs}
    _expect(
        core.live.num_foreground == sum(not each.request.is_background for each in outputs),
        "the outputs above the lowest priority are miscounted",
    )


def _check_searches(core: Scheduler, live: list[Sequence]) -> None:
    rows, num_unclaimed = core.rows, len(core.takeover.unclaimed)
    groups = {id(seq.group): seq.group for seq in live if seq.group is not None}.values()
    _expect(
        rows.num_reserved
        == sum(len(group.spares) for group in groups if group.places) + num_unclaimed
        and rows.num_reserved <= len(rows.free),
        "the rows reserved for beams or for unclaimed sequences are miscounted",
    )
    for group in groups:
        beams = [seq for seq in group.seqs if seq.status in RUNNING]
        _expect(
            set(group.places) == set(beams) and len(beams) == len(group.places),
            f"the beams of sequence {group.leader.seq_id} are not those listed",
        )
        _expect(
            bool(group.places) == (group in list(core.beams)),
            f"the search of sequence {group.leader.seq_id} runs but is not listed, or the reverse",
        )


def _check_windows(core: Scheduler, seq: Sequence) -> None:
    """Check that a sequence holds all blocks that its next tokens read, and not too many blocks.

    The limit on its blocks is `KvGroups.num_needed`.
    """
    if core.groups.is_plain:
        return
    num_computed = core.running.num_computed_tokens(seq)
    held = {place for place, block in enumerate(seq.block_ids) if block != NULL_BLOCK}
    needed = {*core.groups.kept(num_computed)}
    _expect(needed <= held, f"sequence {seq.seq_id} lacks blocks at {needed - held}")
    num_tokens = len(seq.block_ids) // core.groups.num * core.config.block_size
    most = core.groups.num_needed(num_tokens)
    _expect(len(held) <= most, f"sequence {seq.seq_id} holds {len(held)} blocks of {most}")


def _expect(condition: object, what: str) -> None:
    if not condition:
        raise BrokenInvariantError(what)


def _check_pool(pool: BlockPool[BlockIdT], holders: Counter[BlockIdT]) -> None:
    books = pool.books
    unused = [*books.free, *books.free_beyond]
    blocks = unused + books.cached
    available = set(blocks)
    _expect(len(available) == len(blocks), "a block is available twice")
    _expect(available.isdisjoint(holders), f"blocks {available & set(holders)} are also held")
    retired = {*range(pool.num_usable, pool.num_blocks)} - set(holders)
    _expect(available.isdisjoint(retired), f"blocks {available & retired} are out of use")
    _expect(
        len(available) + len(holders) + len(retired) == pool.num_blocks,
        "a block is neither held nor available nor retired",
    )
    _expect(not any(map(books.hashes.__getitem__, retired)), "a block out of use can be found")
    counted = {block: pool.ref_count(block) for block in (*available, *holders)}
    wrong = {block: n for block, n in counted.items() if n != holders[block]}
    _expect(not wrong, f"wrong reference counts: {wrong}")
    _expect(
        all(map(pool.is_cached, books.cached)), "a block is in the order of eviction but not cached"
    )
    _expect(not any(map(books.hashes.__getitem__, unused)), "a free block can be found")
    highest = max(books.free, default=-1)
    lowest = min(books.free_beyond, default=pool.num_blocks)
    _expect(highest < books.border <= lowest, "a free block is across the border")
    named = {block_hash: block for block, block_hash in enumerate(books.hashes) if block_hash}
    _expect(named == books.hash_to_block, "a hash finds no block, or the wrong block")


def _check_pins(core: Scheduler) -> None:
    pins = core.pins
    share = core.config.max_pinned_share
    most = share * core.pool.num_usable
    _expect(len(pins) <= most, f"{len(pins)} blocks are pinned")
    by_tenant = Counter(pins.tenants.values())
    _expect(pins.tenants.keys() <= pins.ends.keys(), "a tenant has a pin that has no end")
    for tenant, num in by_tenant.items():
        _expect(num == pins.num_of(tenant), f"tenant {tenant!r} has {num} pins")
    _expect(set(pins.by_end) == set(pins.ends), "a pin has no end, or an end has no pin")
    owned = Counter(block for blocks in pins.owned.values() for block in blocks)
    _expect(owned.keys() <= pins.ends.keys(), "a request has a pin that has no end")
    _expect(all(num == 1 for num in owned.values()), "a pin has two requests")
    first = min(((end, place) for end, place in pins.ends.values()), default=None)
    head = pins.by_end.first()
    is_first = head is None or pins.ends[head[1]] == first
    _expect(is_first, "another pin ends first")


def _check_host(core: Scheduler, live: list[Sequence]) -> None:
    tier, books = core.tier, core.tier.books
    moves = [*books.unsent.items(), *books.sent]
    holders: Counter[HostBlockId] = Counter(source for _, source in moves)
    holders.update(list(tier.disk.books.loads))
    for seq in live:
        holders.update(seq.host_block_ids)
        holders.update(seq.fetched_block_ids)
    holders.update(core.moves.held_host_blocks)
    holders.update(core.copies.held_host_blocks)
    _check_pool(tier.pool, holders)
    hashes = core.pool.books.hashes
    for source, target in books.targets.items():
        _expect((target, source) in moves, f"no swap-in of host block {source} to {target}")
    for target in books.unsent:
        _expect(hashes[target] is None, f"block {target} can be found before it is swapped in")
        _expect(
            any(target in seq.loading_block_ids for seq in live),
            f"no sequence waits for the swap-in to block {target}",
        )

    swapped = [seq for seq in live if seq.status is SeqStatus.SWAPPED]
    _expect(len(swapped) == core.queue.num_swapped, "the swapped sequences are miscounted")
    for seq in swapped:
        num_blocks = len(seq.host_block_ids) + len(seq.disk_block_ids)
        num_needed = len(core.groups.kept(seq.num_computed_tokens))
        _expect(
            0 < num_needed <= num_blocks and seq.num_computed_tokens < len(seq.token_ids),
            f"sequence {seq.seq_id}: {seq.num_computed_tokens} tokens in {num_blocks} blocks",
        )
    loading = [seq for seq in live if seq.loading_block_ids]
    _expect(
        set(core.running.loading) == set(loading),
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
            _expect(tier.is_loading(block), f"sequence {seq.seq_id} waits for {block}, not loading")


def _check_disk(core: Scheduler, live: list[Sequence]) -> None:
    books, pool = core.tier.disk.books, core.tier.disk.pool
    hashes, host_hashes = pool.books.hashes, core.tier.pool.books.hashes
    holders: Counter[DiskBlockId] = Counter(list(books.stores))
    holders.update(load.source for load in books.loads.values())
    for seq in live:
        holders.update(seq.disk_block_ids)
        _expect(
            not seq.disk_block_ids or seq.status in (SeqStatus.SWAPPED, SeqStatus.FETCHING),
            f"sequence {seq.seq_id} holds disk blocks that it does not need",
        )
    _check_pool(pool, holders)
    _expect(books.new_stores.keys() <= books.stores.keys(), "a new store is not listed")
    for block, block_hash in books.stores.items():
        _expect(hashes[block] is None, f"disk block {block} can be found before it is stored")
        storing = block_hash is None or books.storing.get(block_hash) == block
        _expect(storing, f"the content of disk block {block} is stored elsewhere")
    _expect(
        len(books.storing) == sum(h is not None for h in books.stores.values()),
        "a content is marked as being stored, but is not",
    )
    _expect(books.new_loads.keys() <= books.loads.keys(), "a new load is not listed")
    _expect(
        books.targets == {load.source: target for target, load in books.loads.items()},
        "a disk block is loaded twice, or its load is lost",
    )
    for target, load in books.loads.items():
        _expect(host_hashes[target] is None, f"host block {target} can be found before its load")
        _expect(load.source not in books.stores, f"disk block {load.source} is loaded while stored")


def _check_fetching(core: Scheduler, live: list[Sequence]) -> None:
    awaited = core.fetching.awaited
    fetching = {seq for seq in live if seq.status is SeqStatus.FETCHING}
    _expect(fetching == set(awaited), "the fetching sequences are not those listed")
    waiters = core.fetching.waiters
    _expect(
        {(seq, block) for seq, blocks in awaited.items() for block in blocks}
        == {(seq, block) for block, seqs in waiters.items() for seq in seqs},
        "the sequences that wait for a load are miscounted",
    )
    for seq, blocks in awaited.items():
        _expect(blocks, f"sequence {seq.seq_id} waits for nothing")
        _expect(seq.row is None and not seq.block_ids, f"sequence {seq.seq_id} fetches and runs")
        held = {*seq.host_block_ids, *seq.fetched_block_ids}
        _expect(blocks <= held, f"sequence {seq.seq_id} waits for loads that it does not hold")
        for block in blocks:
            is_loading = block in core.tier.disk.books.loads
            _expect(is_loading, f"sequence {seq.seq_id} waits for {block}, which is not loading")
    for seq in live:
        _expect(
            not seq.fetched_block_ids or seq.status in (SeqStatus.FETCHING, SeqStatus.WAITING),
            f"sequence {seq.seq_id} holds fetched blocks that it does not need",
        )
