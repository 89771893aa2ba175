"""Moves live requests with their KV from one core to another.

The KV of all sequences of a request goes through the host blocks of both workers. The caller copies
the contents, and calls both cores in this order:

    source core                              target core

    begin_export   the request waits, with its KV on the host
                                             begin_import   host blocks are reserved
            after the results of both `ready_step`s the contents are copied
    end_export     the request is removed
                                             end_import     the request waits, with its KV
                                                            on the host

The request belongs to the source core until `end_export`, and to the target core from `end_import`
on. Between these two calls no core has the request, so the caller makes them one right after the
other. Before `end_export` the move can be given up, and the request continues at the source. The
move itself holds the blocks that are read and written, even if a sequence ends during the move.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import count

from contract.hashing import BlockHash, extend_chain, root_hash
from contract.request import MAX_N
from contract.step import StepId
from scheduler_svc.core.handover.moved_request import (
    CopyProgress,
    Export,
    ExportId,
    Import,
    ImportId,
    MovableRequest,
    MovedRequest,
    MovedSequence,
)
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.errors import MigrationRefusedError, RequestTooLongError
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.limits.acceptance import check_length
from scheduler_svc.core.live_sequences import LiveSequences, resubmittable
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import QUEUED, RUNNING, SeqStatus, Sequence
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId, HostBlockId
from scheduler_svc.core.space.kv_groups import KvGroups
from scheduler_svc.core.steps_in_flight import StepsInFlight
from scheduler_svc.core.tiers.host_room import HostRoom
from scheduler_svc.core.tiers.host_tier import HostTier

_WITH_KV_BELOW = frozenset({SeqStatus.SWAPPED, SeqStatus.FETCHING})
"""The states in which a sequence has its own KV on the host or the disk, or waits for the disk."""


@dataclass(frozen=True, slots=True, eq=False)
class _Leaving:
    seqs: list[Sequence]
    host_block_ids: list[HostBlockId]
    """The host blocks to copy; the export holds a reference to each."""


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    moved: MovedRequest
    host_block_ids: tuple[HostBlockId, ...]


class Moves:
    """The exports and imports in progress."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        groups: KvGroups,
        pool: BlockPool[DeviceBlockId],
        tier: HostTier,
        rows: Rows,
        steps: StepsInFlight,
        live: LiveSequences,
        queue: WaitingQueue,
        host_room: HostRoom,
        running: RunningSet,
        preemption: Preemption,
        policy: Policy,
    ) -> None:
        self._config = config
        self._groups = groups
        self._pool = pool
        self._tier = tier
        self._rows = rows
        self._steps = steps
        self._live = live
        self._queue = queue
        self._host_room = host_room
        self._running = running
        self._preemption = preemption
        self._policy = policy
        self._exports: dict[ExportId, _Leaving] = {}
        self._imports: dict[ImportId, _Arriving] = {}
        self._ids = count(1)

    # --- finding requests to move ---------------------------------------------------------------

    def find_requests(self, request_id: str | None = None) -> list[MovableRequest]:
        """Return the live requests with this id; None: all. Two routers may use the same id."""
        seqs = [seq for seq in self._live if request_id in (None, seq.request.request_id)]
        return [self._describe(group) for group in _by_request(seqs)]

    def first_swapped(self) -> MovableRequest | None:
        """Return the first request whose sequences all wait, at least one of them SWAPPED.

        "First" is in the order of the queue. `begin_export` may still refuse the request, for
        example if some of its KV is on the disk.
        """
        swapped = [seq for seq in self._live if seq.status is SeqStatus.SWAPPED]
        for first in sorted(swapped, key=self._queue.sort_key):
            group = self._group(first.request.source, first.request.first_seq_key)
            if all(seq.status in QUEUED for seq in group):
                return self._describe(group)
        return None

    def find_running(self) -> list[tuple[SourceId, SeqKey]]:
        """Return the source and first key of each running request with `max_tokens` above 1.

        Beam searches, embeddings and scores are left out.
        """
        requests = dict.fromkeys(
            seq.request
            for seq in self._running
            if seq.group is None and not seq.request.pools and seq.request.max_tokens > 1
        )
        return [(request.source, request.first_seq_key) for request in requests]

    def progress(self, source: SourceId, first_seq_key: SeqKey) -> CopyProgress | None:
        """Return which blocks of a request can be copied, and whether the request can leave.

        None if the request has ended or is leaving.
        """
        seqs = self._group(source, first_seq_key)
        if not seqs or any(seq.status is SeqStatus.MIGRATING for seq in seqs):
            return None
        hashes = {name: None for seq in seqs if seq.row is not None for name in _named(seq)}
        can_copy = (
            self._config.enable_prefix_caching
            and self._groups.is_plain
            and seqs[0].request.reads_prefix_cache
            and not any(seq.status in _WITH_KV_BELOW for seq in seqs)
        )
        return CopyProgress(self._describe(seqs), can_copy, tuple(hashes), self._decodes(seqs))

    # --- source core ----------------------------------------------------------------------------

    def begin_export(
        self, source: SourceId, first_seq_key: SeqKey, *, keeps_kv: bool = True
    ) -> Export:
        """Preempt a live request, swap its KV to the host, and take it out of the queue.

        Without `keeps_kv`, a running request drops its KV, because the target core already has a
        copy of it (`Copies`).

        Raises:
            MigrationRefusedError: The request cannot leave now; nothing has changed.
        """
        seqs = self._group(source, first_seq_key)
        self._check_can_leave(seqs)
        request = resubmittable(seqs, self._rows.known_tokens)
        for seq in seqs:
            if seq.status in RUNNING:
                self._preemption.take_out(seq, can_swap=keeps_kv, must_swap=True)
            self._tier.pool.drop(seq.fetched_block_ids)
            seq.fetched_block_ids = ()
            self._queue.remove(seq)
            seq.set_status(SeqStatus.MIGRATING)
        moved = MovedRequest(
            request=request,
            arrived=seqs[0].arrived,
            block_size=self._config.block_size,
            bytes_per_block=self._config.bytes_per_block,
            sequences=tuple(_moved(seq) for seq in seqs),
        )
        held = moved.host_block_ids
        self._tier.pool.share(held)
        export_id = ExportId(next(self._ids))
        self._exports[export_id] = _Leaving(seqs, held)
        return Export(export_id, moved, self._step_of_last_move)

    def end_export(self, export_id: ExportId, *, leaves: bool) -> tuple[int, ...]:
        """Remove an exported request if it `leaves`; otherwise queue it here again.

        In both cases, release the host blocks that the export holds.

        Returns:
            The output indices of the sequences that have not ended since `begin_export`.
        """
        leaving = self._exports.pop(export_id)
        seqs = [seq for seq in leaving.seqs if seq.status is SeqStatus.MIGRATING]
        for seq in seqs:
            if leaves:
                self._host_room.release(seq)
                self._live.remove(seq)
            else:
                seq.set_status(SeqStatus.SWAPPED if seq.host_block_ids else SeqStatus.WAITING)
                self._queue.push(seq)
        self._tier.pool.drop(leaving.host_block_ids)
        return tuple(seq.output_index for seq in seqs)

    # --- target core ----------------------------------------------------------------------------

    def begin_import(self, moved: MovedRequest) -> Import:
        """Reserve host blocks for a request from another core.

        Raises:
            MigrationRefusedError: The request cannot run here; nothing has changed.
        """
        self._check_can_take(moved)
        blocks = tuple(self._tier.take_free() for _ in moved.host_block_ids)
        import_id = ImportId(next(self._ids))
        self._imports[import_id] = _Arriving(moved, blocks)
        return Import(import_id, blocks, self._step_of_last_move)

    def end_import(self, import_id: ImportId, output_indices: Collection[int]) -> list[Sequence]:
        """Queue the sequences with these output indices; free the other sequences' host blocks.

        Args:
            import_id: The import. The caller must have copied its KV, unless `output_indices` is
                empty.
            output_indices: The result of `end_export`, which leaves out the sequences that ended
                during the move. Empty if the move was given up.

        Returns:
            The queued sequences.
        """
        arriving = self._imports.pop(import_id)
        moved, blocks = arriving.moved, iter(arriving.host_block_ids)
        tables = {
            seq.output_index: tuple(next(blocks) for _ in seq.host_block_ids)
            for seq in moved.sequences
        }
        index_to_moved = {seq.output_index: seq for seq in moved.sequences}
        for index in tables.keys() - set(output_indices):
            self._tier.pool.drop(tables[index])
        if not output_indices:
            return []
        request = replace(
            moved.request,
            outputs=tuple(
                output if index in output_indices else replace(output, finished=True)
                for index, output in enumerate(moved.request.outputs)
            ),
        )
        rank = self._policy.rank(request, moved.arrived)
        seqs = self._live.add(request, rank, moved.arrived)
        for seq in seqs:
            arrived = index_to_moved[seq.output_index]
            seq.num_computed_tokens = arrived.num_computed_tokens
            seq.num_charged_tokens = arrived.num_charged_tokens
            seq.num_cached_tokens = arrived.num_cached_tokens
            seq.was_admitted = arrived.was_admitted
            seq.host_block_ids = tables[seq.output_index]
            self._publish_on_host(seq)
            if seq.host_block_ids:
                seq.set_status(SeqStatus.SWAPPED)
            self._queue.push(seq)
        return seqs

    # --- parts ----------------------------------------------------------------------------------

    @property
    def held_host_blocks(self) -> Iterator[HostBlockId]:
        """The host blocks that exports and imports hold; a block occurs once per reference."""
        for leaving in self._exports.values():
            yield from leaving.host_block_ids
        for arriving in self._imports.values():
            yield from arriving.host_block_ids

    @property
    def arriving_requests(self) -> Iterator[Request]:
        """The requests that come from another core, and for which host blocks are reserved."""
        return (each.moved.request for each in self._imports.values())

    @property
    def num_leaving(self) -> int:
        """Number of sequences that are out of the queue, on their way to another core."""
        leaving = (seq for each in self._exports.values() for seq in each.seqs)
        return sum(seq.status is SeqStatus.MIGRATING for seq in leaving)

    @property
    def _step_of_last_move(self) -> StepId:
        """The step whose result says that all block moves requested so far are done.

        If some block moves have not been sent to the worker yet, this is the next step, because the
        next plan will contain them.
        """
        last = self._steps.last
        return StepId(last + 1) if self._tier.has_moves else last

    def _group(self, source: SourceId, first_seq_key: SeqKey) -> list[Sequence]:
        """Return the live sequences of a request, in the order of their output indices."""
        seqs = self._live.find(source, range(first_seq_key, first_seq_key + MAX_N))
        return [seq for seq in seqs if seq.request.first_seq_key == first_seq_key]

    def _describe(self, seqs: list[Sequence]) -> MovableRequest:
        request = seqs[0].request
        num_blocks = self._groups.num_needed(seqs[0].max_total_tokens)
        return MovableRequest(
            source=request.source,
            first_seq_key=request.first_seq_key,
            request_id=request.request_id,
            num_seqs=len(seqs),
            num_host_blocks=sum(len(seq.host_block_ids) for seq in seqs),
            num_device_blocks=sum(len(self._groups.held(seq.block_ids)) for seq in seqs),
            max_total_tokens=seqs[0].max_total_tokens,
            max_device_blocks=len(seqs) * num_blocks,
        )

    def _decodes(self, seqs: list[Sequence]) -> bool:
        """Return the value of `CopyProgress.decodes`."""
        running = [seq for seq in seqs if seq.row is not None]
        if not running:
            return False
        for seq in running:
            if seq.row is None or self._rows.num_tokens(seq.row) == len(seq.token_ids):
                return False
            if seq.last_step is not None and seq.last_step <= self._steps.last:
                return False  # a step in flight samples the sequence's last token
        try:
            self._check_can_leave(seqs)
        except MigrationRefusedError:
            return False
        return True

    def _check_can_leave(self, seqs: list[Sequence]) -> None:
        if not seqs:
            raise MigrationRefusedError("the request is not live")
        if seqs[0].group is not None:
            raise MigrationRefusedError("it is a beam search, whose KV cannot leave the device")
        if not self._config.num_host_blocks:
            raise MigrationRefusedError("its worker has no host tier (--host-kv-memory-gb)")
        if any(seq.status is SeqStatus.MIGRATING for seq in seqs):
            raise MigrationRefusedError("it is being moved already")
        if any(seq.status is SeqStatus.FETCHING or seq.disk_block_ids for seq in seqs):
            raise MigrationRefusedError("some of its KV is on its worker's disk")
        if any(seq.siblings for seq in seqs):
            raise MigrationRefusedError(f"n is {len(seqs)} and its prompt is not computed yet")
        num_blocks = sum(len(self._groups.held(seq.block_ids)) for seq in seqs)
        if num_blocks > self._tier.pool.num_available:
            raise MigrationRefusedError(
                f"it has {num_blocks} device blocks, but its worker has only "
                f"{self._tier.pool.num_available} free host blocks"
            )

    def _check_can_take(self, moved: MovedRequest) -> None:
        config = self._config
        if not config.num_host_blocks:
            raise MigrationRefusedError("the target worker has no host tier (--host-kv-memory-gb)")
        ours = (config.block_size, config.bytes_per_block)
        if ours != (moved.block_size, moved.bytes_per_block):
            raise MigrationRefusedError(
                f"a block has {moved.block_size} tokens in {moved.bytes_per_block} bytes, but at "
                f"the target worker {config.block_size} tokens in {config.bytes_per_block} bytes"
            )
        try:
            check_length(moved.request, self._pool.num_usable, config)
        except RequestTooLongError as error:
            raise MigrationRefusedError(f"the target worker refuses it: {error}") from None
        num_blocks = len(moved.host_block_ids)
        if num_blocks > self._tier.pool.num_available:
            raise MigrationRefusedError(
                f"it has {num_blocks} host blocks, but the target worker has only "
                f"{self._tier.pool.num_available} free"
            )

    def _publish_on_host(self, seq: Sequence) -> None:
        """Publish the full host blocks that arrived with a sequence."""
        if not self._config.enable_prefix_caching:
            return
        root = root_hash(seq.request.cache_salt)
        extend_chain(seq.block_hashes, root, seq.token_ids, self._config.block_size)
        names = self._host_room.names(seq) if seq.host_block_ids else []
        self._tier.pool.publish(seq.host_block_ids[: len(names)], names)


def _named(seq: Sequence) -> list[BlockHash]:
    """Return the hashes of a running sequence's blocks that the prefix cache can find."""
    return seq.block_hashes[: seq.num_published_blocks]


def _moved(seq: Sequence) -> MovedSequence:
    return MovedSequence(
        output_index=seq.output_index,
        host_block_ids=seq.host_block_ids,
        num_computed_tokens=seq.num_computed_tokens,
        num_charged_tokens=seq.num_charged_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        was_admitted=seq.was_admitted,
    )


def _by_request(seqs: list[Sequence]) -> list[list[Sequence]]:
    groups: dict[int, list[Sequence]] = {}
    for seq in seqs:
        groups.setdefault(id(seq.request), []).append(seq)
    return list(groups.values())
