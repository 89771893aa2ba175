"""Resizes the KV pools of workers, with one resize at a time for each worker.

To grow a pool, the worker maps memory before the core uses the new blocks. To shrink a pool, the
core empties the blocks beyond the pool's new end before the worker frees their memory. If the
worker refuses the new size, the pool keeps its size. If a worker is lost during a resize, the
scheduler learns the pool's size from the worker when the worker is attached again.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from contract.errors import FailedPreconditionError, InvalidArgumentError, QuireError
from contract.info import WorkerInfo
from quire.v1 import scheduler_pb2
from rpc.tasks import retrieve
from scheduler_svc.core.interface.errors import ResizeRefusedError
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.session import Session

log = structlog.get_logger()


class OngoingResize:
    """The resize of one pool. It continues even if no caller waits for `task`."""

    def __init__(
        self,
        worker: str,
        session: Session,
        num_blocks: int,
        on_resized: Callable[[WorkerInfo, int], Awaitable[None]],
    ) -> None:
        """Start a resize; call `on_resized` when it has succeeded.

        Raises:
            FailedPreconditionError: The core refuses the size.
        """
        self._worker = worker
        self._session = session
        self._num_before = session.load().num_blocks
        self._num_blocks = num_blocks
        self._on_resized = on_resized
        self._is_less = num_blocks < self._num_before
        try:
            if self._is_less:
                session.call(lambda core: core.shrink(num_blocks))
            else:
                session.call(lambda core: core.resizing.check(num_blocks))
        except ResizeRefusedError as error:
            raise FailedPreconditionError(str(error)) from None
        self.task = asyncio.create_task(self._run(), name=f"resize of {worker}")

    def progress(self) -> scheduler_pb2.ResizeKvResponse:
        """Return the progress of the resize; `is_done` is also set if the resize has failed."""
        is_done = self.task.done()
        return scheduler_pb2.ResizeKvResponse(
            num_blocks_before=self._num_before,
            num_blocks=self._num_blocks,
            num_leaving_blocks=0 if is_done else self._num_leaving(),
            is_done=is_done,
            block_bytes=self._session.info.block_bytes,
        )

    def _num_leaving(self) -> int:
        return self._session.call(lambda core: core.resizing.num_leaving_blocks)

    async def _run(self) -> None:
        who = {"worker": self._worker, "before": self._num_before, "num_blocks": self._num_blocks}
        try:
            await self._resize()
        except QuireError as error:
            log.warning("a pool could not be resized", **who, reason=str(error))
            raise
        log.info("a pool was resized", **who)
        await self._on_resized(self._session.info, self._num_blocks)

    async def _resize(self) -> None:
        session, num_blocks = self._session, self._num_blocks
        if self._is_less:
            await session.wait_until(lambda core: core.resizing.is_shrunk)
        try:
            await session.link.resize_pool(num_blocks)
        except QuireError:
            session.call(lambda core: core.resize(self._num_before))
            raise
        session.call(lambda core: core.resize(num_blocks))


class Resizer:
    """Starts resizes, at most one at a time per worker."""

    def __init__(
        self, roster: Roster, on_resized: Callable[[WorkerInfo, int], Awaitable[None]]
    ) -> None:
        """`on_resized` is called with each resized worker and the new size."""
        self._roster = roster
        self._on_resized = on_resized
        self._resizes: dict[str, OngoingResize] = {}

    def begin(self, request: scheduler_pb2.ResizeKvRequest) -> OngoingResize:
        """Start resizing a worker's pool.

        Raises:
            NotFoundError: There is no such worker.
            UnavailableError: The worker is not attached.
            InvalidArgumentError: The worker or the size is missing, or the size is in bytes and the
                size of a block is unknown.
            FailedPreconditionError: The core refuses the size, or the pool is being resized.
        """
        if request.WhichOneof("size") is None:
            raise InvalidArgumentError("size", "is not set; it must be num_blocks or num_bytes")
        worker, session = self._find(request.worker)
        num_blocks = _num_blocks(request, worker, session.info.block_bytes)
        if (other := self._resizes.get(worker)) is not None and not other.task.done():
            raise FailedPreconditionError(
                f"worker {worker} is being resized already, to {other.progress().num_blocks} blocks"
            )
        resize = self._resizes[worker] = OngoingResize(
            worker, session, num_blocks, self._on_resized
        )
        resize.task.add_done_callback(retrieve)
        return resize

    def stop(self) -> None:
        """Cancel the resizes in progress; called when the sessions end."""
        for resize in self._resizes.values():
            resize.task.cancel()

    def _find(self, worker: str) -> tuple[str, Session]:
        if not worker:
            targets = [engine.target for engine in self._roster.engines]
            if len(targets) != 1:
                known = ", ".join(targets)
                raise InvalidArgumentError(
                    "worker", f"is empty; of {len(targets)} workers it must be one: {known}"
                )
            (worker,) = targets
        return worker, self._roster.attached(worker)[worker]


def _num_blocks(request: scheduler_pb2.ResizeKvRequest, worker: str, block_bytes: int) -> int:
    if request.HasField("num_blocks"):
        return request.num_blocks
    if not block_bytes:
        raise InvalidArgumentError(
            "num_bytes",
            f"is {request.num_bytes}; worker {worker} does not report the size of a block",
        )
    return request.num_bytes // block_bytes
