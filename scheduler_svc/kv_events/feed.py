"""The streams of KV events: a snapshot of each worker's prefix cache, then the cache's changes.

A snapshot is made in slices. Between two slices the event loop runs, so workers' steps continue and
the cache may change. So the changes are sent between slices, and each slice shows its blocks as
they are after all changes that were sent before this slice. When a reader has read the whole
snapshot, it knows the exact state of the cache.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from contract.errors import NotFoundError
from contract.info import WorkerInfo
from quire.v1 import kv_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.kv_events.index import KvBlock, KvIndex
from scheduler_svc.kv_events.wire import blocks_to_proto, changes_to_proto
from scheduler_svc.workers.engine import OpenCore

MAX_UNREAD_CHANGES: Final = 65_536
"""At most this many changes wait for one reader; a slower reader gets a snapshot instead."""
_MESSAGE_BLOCKS: Final = 256
"""A message has about this many blocks. To make such a message and to convert it to vLLM's format
takes less than a millisecond of the event loop (`bench/kv_events.py`)."""


class KvEvents:
    """The feeds of all workers, and the readers of these feeds."""

    def __init__(self, epoch: int, max_unread_changes: int = MAX_UNREAD_CHANGES) -> None:
        self.epoch = epoch
        self._max_unread = max_unread_changes
        self._feeds: dict[str, WorkerFeed] = {}
        self._readers: set[KvReader] = set()

    def feed(self, worker: str) -> "WorkerFeed":
        """Return the feed of a worker; the first call creates it."""
        if worker not in self._feeds:
            self._feeds[worker] = WorkerFeed(worker, self.epoch, self._readers)
            for reader in self._readers:
                reader.on_worker(self._feeds[worker])
        return self._feeds[worker]

    def watched(self, worker: str, open_core: OpenCore) -> OpenCore:
        """Wrap `open_core`, so that each core that it opens reports cached blocks to the feed."""
        feed = self.feed(worker)

        @contextmanager
        def opened(info: WorkerInfo) -> Iterator[Scheduler]:
            with open_core(info) as core:
                core.watch_cache(feed.attach(core.config.block_size))
                try:
                    yield core
                finally:
                    feed.detach()

        return opened

    @contextmanager
    def reader(self, worker: str = "") -> Iterator["KvReader"]:
        """Make a reader of the events of `worker`, or of all workers if `worker` is empty.

        Raises:
            NotFoundError: There has been no worker of this name.
        """
        if worker and worker not in self._feeds:
            raise NotFoundError(f"worker {worker!r} is not known")
        reader = KvReader(worker, self._max_unread)
        for feed in self._feeds.values():
            reader.on_worker(feed)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)


class WorkerFeed:
    """The events of one worker. It numbers batches of changes and passes them to the readers."""

    def __init__(self, worker: str, epoch: int, readers: "set[KvReader]") -> None:
        self.worker = worker
        self.index: KvIndex | None = None
        """The blocks in the worker's prefix cache; None: the worker is not attached."""
        self.sequence = 0
        self._epoch = epoch
        self._readers = readers

    def attach(self, block_size: int) -> KvIndex:
        """Report that the worker's cache is empty, and return the worker's new index.

        The core reports to this index which blocks the cache gains and loses.
        """
        self.index = KvIndex(block_size, self._flush_soon)
        self._publish([kv_pb2.KvEvent(cleared=kv_pb2.KvCacheCleared())], 1)
        return self.index

    def detach(self) -> None:
        """Report that the worker's cache is empty, because the worker is lost."""
        self.index = None
        self._publish([kv_pb2.KvEvent(cleared=kv_pb2.KvCacheCleared())], 1)

    def flush(self) -> None:
        """Pass to the readers all changes that the core has reported since the last call.

        After a change, the event loop calls this method in its next turn. So all changes of a step
        become one batch, unless there are very many. A snapshot calls this method directly, because
        it needs the changes at once.
        """
        changes = [] if self.index is None else self.index.take_changes()
        for first in range(0, len(changes), _MESSAGE_BLOCKS):
            some = changes[first : first + _MESSAGE_BLOCKS]
            self._publish(list(changes_to_proto(some)), len(some))

    def message(self, events: Sequence[kv_pb2.KvEvent], sequence: int) -> kv_pb2.WatchKvResponse:
        """Make a message with events of this worker."""
        return kv_pb2.WatchKvResponse(
            worker=self.worker,
            epoch=self._epoch,
            sequence=sequence,
            block_size=0 if self.index is None else self.index.block_size,
            events=events,
        )

    def _flush_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.flush)

    def _publish(self, events: Sequence[kv_pb2.KvEvent], num_changes: int) -> None:
        self.sequence += 1
        if self._readers:
            message = self.message(events, self.sequence)
            for reader in self._readers:
                reader.push(message, num_changes)


class KvReader:
    """One reader of events. It queues messages until they are read, up to a limit."""

    def __init__(self, worker: str, max_unread_changes: int) -> None:
        self._worker = worker
        self._max_unread = max_unread_changes
        self._unread: deque[tuple[kv_pb2.WatchKvResponse, int]] = deque()
        self._num_unread = 0
        self._feeds: dict[str, WorkerFeed] = {}
        self._lacks: dict[str, kv_pb2.KvSnapshotReason] = {}
        """The workers whose snapshot the reader needs, each with the reason. The reader drops
        changes of these workers."""
        self._sent: dict[str, int] = {}
        """For each worker, the sequence number of the last batch that the reader was sent."""
        self._wake = asyncio.Event()

    @property
    def workers(self) -> Collection[str]:
        """The workers whose events this reader gets."""
        return self._feeds.keys()

    def on_worker(self, feed: WorkerFeed) -> None:
        """Begin to read a worker's events, if the reader wants them and does not read them yet."""
        if self._worker in ("", feed.worker) and feed.worker not in self._feeds:
            self._feeds[feed.worker] = feed
            self._lacks[feed.worker] = kv_pb2.KV_SNAPSHOT_REASON_FIRST
            self._wake.set()

    def push(self, message: kv_pb2.WatchKvResponse, num_changes: int) -> None:
        """Add a batch of changes, unless a snapshot will replace it."""
        if message.worker not in self._feeds or message.worker in self._lacks:
            return
        self._unread.append((message, num_changes))
        self._num_unread += num_changes
        if self._num_unread > self._max_unread:
            self._unread.clear()
            self._num_unread = 0
            self._lacks |= dict.fromkeys(self._feeds, kv_pb2.KV_SNAPSHOT_REASON_FELL_BEHIND)
        self._wake.set()

    async def messages(self) -> AsyncIterator[kv_pb2.WatchKvResponse]:
        """Yield snapshots and changes without end."""
        while True:
            for message in self._take_unread():
                yield message
            if self._lacks:
                async for message in self._snapshot(next(iter(self._lacks))):
                    yield message
            elif not self._unread:
                await self._wake.wait()
            self._wake.clear()

    def _take_unread(self) -> Iterator[kv_pb2.WatchKvResponse]:
        """Yield the messages that are unread at the call, but no messages that arrive later."""
        for _ in range(len(self._unread)):
            if not self._unread:
                return  # the reader has fallen behind
            message, num_changes = self._unread.popleft()
            self._num_unread -= num_changes
            self._sent[message.worker] = message.sequence
            yield message

    async def _snapshot(self, worker: str) -> AsyncIterator[kv_pb2.WatchKvResponse]:
        feed, index = self._feeds[worker], self._feeds[worker].index
        feed.flush()  # the slices have these changes
        self._sent[worker] = feed.sequence
        reason = self._lacks.pop(worker)
        begin = kv_pb2.KvEvent(begin=kv_pb2.KvSnapshotBegin(reason=reason))
        yield feed.message([begin], self._sent[worker])
        for blocks in () if index is None else _slices(index):
            if worker in self._lacks or feed.index is not index:
                break
            live = [block for block in blocks if block.tiers]
            yield feed.message(list(blocks_to_proto(live)), self._sent[worker])
            await asyncio.sleep(0)
            feed.flush()
            for message in self._take_unread():
                yield message
        # The slices may be ahead of the changes that were sent, so send the other changes now.
        feed.flush()
        num_blocks = 0 if feed.index is None else len(feed.index)
        for message in self._take_unread():
            yield message
        if worker not in self._lacks:
            end = kv_pb2.KvEvent(end=kv_pb2.KvSnapshotEnd(num_blocks=num_blocks))
            yield feed.message([end], self._sent[worker])


def _slices(index: KvIndex) -> Iterator[list[KvBlock]]:
    """Yield the blocks of an index in slices; a message has one slice."""
    blocks: list[KvBlock] = []
    for drawer in index.drawers():
        blocks += drawer
        if len(blocks) >= _MESSAGE_BLOCKS:
            yield blocks
            blocks = []
    yield blocks
