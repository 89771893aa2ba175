"""`AdminService`: an operator's call drains the process, as SIGTERM would."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from contract.errors import InvalidArgumentError
from quire.v1 import admin_pb2, admin_pb2_grpc
from rpc.security.operators import Operators

ADMIN_SERVICE_NAME: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

_POLL_S: Final = 0.1

log = structlog.get_logger()


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Answers the calls of `quire.v1.AdminService`; a drain of the process sets `stopping`."""

    def __init__(
        self,
        stopping: asyncio.Event,
        *,
        num_live: Callable[[], int],
        operators: Operators,
        drain_worker: Callable[[str], AsyncIterator[int]] | None = None,
    ) -> None:
        """`drain_worker` drains a worker, and yields how many of its sequences are still live.

        Processes other than schedulers have no `drain_worker`.
        """
        self._stopping = stopping
        self._num_live = num_live
        self._drain_worker = drain_worker
        self._operators = operators
        self._closed = asyncio.Event()

    async def Drain(  # noqa: N802 - the proto's name
        self,
        request: admin_pb2.DrainRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[admin_pb2.DrainResponse]:
        """Drain the process or a worker, and yield the progress until the drain has ended.

        The progress is the number of requests (at a router) or of sequences (at other processes)
        that are still live.
        """
        self._operators.check(context.peer(), "drains, except on SIGTERM,")
        if request.worker:
            if self._drain_worker is None:
                raise InvalidArgumentError("worker", "is set; only a scheduler drains workers")
            log.info("an operator drains a worker", peer=context.peer(), worker=request.worker)
            async for num_live in self._drain_worker(request.worker):
                yield admin_pb2.DrainResponse(num_live=num_live)
            return
        log.info("an operator drains this process", peer=context.peer())
        self._stopping.set()
        last: int | None = None
        while not self._closed.is_set():
            if (num_live := self._num_live()) != last:
                last = num_live
                yield admin_pb2.DrainResponse(num_live=num_live)
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._closed.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """End all calls of `Drain`, because the process has drained."""
        self._closed.set()
