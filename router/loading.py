"""Has the schedulers' workers unload their models and load them, for operators."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import grpc.aio
import structlog

from quire.v1 import loading_pb2, loading_pb2_grpc
from router.schedulers import Schedulers
from rpc.channel import open_channel
from rpc.errors import NotFoundError, QuireError
from rpc.merging import merged
from rpc.operators import Operators
from rpc.status import calling
from rpc.tls import ClientTls

log: Final = structlog.get_logger()


class Loading:
    """Every method takes the `peer` that calls, as `Operators.check` wants it, and raises as that.

    And `UnavailableError` while there is no scheduler, and what the schedulers refuse;
    `NotFoundError` only if none of them has such a worker.
    """

    def __init__(self, schedulers: Schedulers, operators: Operators, tls: ClientTls | None) -> None:
        """Calls schedulers on channels of their own: a stream ends when the model changes."""
        self._schedulers = schedulers
        self._operators = operators
        self._tls = tls

    async def unload(self, worker: str, peer: str) -> Sequence[loading_pb2.UnloadedWorker]:
        """Have a worker, or all if that is empty, give their devices back."""
        self._operators.check(peer, "unloads models")
        log.info("told to unload models", worker=worker, peer=peer)
        targets = self._schedulers.targets
        ends = await asyncio.gather(*(self._unload(each, worker) for each in targets))
        unloaded = [worker for end in ends if not isinstance(end, QuireError) for worker in end]
        errors = [end for end in ends if isinstance(end, QuireError)]
        known = [error for error in errors if not isinstance(error, NotFoundError)]
        if known or len(errors) == len(ends):
            raise (known or errors)[0]
        return unloaded

    async def load(
        self, worker: str, directory: str, peer: str
    ) -> AsyncGenerator[loading_pb2.LoadResponse]:
        """Have them take these again, with what is in a directory; tells how far that is."""
        self._operators.check(peer, "loads models")
        log.info("told to load models", worker=worker, directory=directory, peer=peer)
        targets = self._schedulers.targets
        refusals: list[NotFoundError] = []
        loads = merged([self._load(each, worker, directory, refusals) for each in targets])
        async with aclosing(loads):
            async for told in loads:
                yield told
        if len(refusals) == len(targets):
            raise refusals[0]

    async def _unload(
        self, target: str, worker: str
    ) -> Sequence[loading_pb2.UnloadedWorker] | QuireError:
        request = loading_pb2.UnloadRequest(worker=worker)
        async with open_channel(target, tls=self._tls) as channel:
            stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                with calling():
                    response = await stub.Unload(request)
            except QuireError as error:
                return error
        workers: Sequence[loading_pb2.UnloadedWorker] = response.workers
        return workers

    async def _load(
        self, target: str, worker: str, directory: str, refusals: list[NotFoundError]
    ) -> AsyncGenerator[loading_pb2.LoadResponse]:
        request = loading_pb2.LoadRequest(worker=worker, directory=directory)
        async with open_channel(target, tls=self._tls) as channel:
            stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Load(request)
            try:
                with calling():
                    while (told := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                        yield told
            except NotFoundError as error:
                refusals.append(error)
            finally:
                call.cancel()
