"""Calls that load and unload the models of schedulers, and ask for the schedulers' load.

The calls do not use the link (`link.py`) to a scheduler, but open channels of their own. The link
closes when the scheduler's model changes, and cannot connect before the scheduler's workers have
had a model. The calls must also work at these times.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Final

import structlog

from contract.errors import NotFoundError, QuireError, UnavailableError
from quire.v1 import loading_pb2, loading_pb2_grpc
from quire.v1.common_pb2 import Load
from router.schedulers.calls import SchedulerCalls, sum_loads
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls
from rpc.status import calling
from rpc.tasks import merged, responses

_UNLOAD_S: Final = 600.0
"""How long a scheduler may take to unload models. A scheduler first moves requests away, and then
waits up to 360 s for each worker. A shorter limit could report a failure although the model is
unloaded afterwards."""

log = structlog.get_logger()


class LoadingCalls:
    """Calls to schedulers; `targets` maps each scheduler's address to whether it is connected.

    `NotFoundError` means that no scheduler has the `worker` of the call. A scheduler that is not
    connected may be a standby; its `UnavailableError` is ignored if another scheduler answers.
    `load` and `unload` raise all other errors of the schedulers.
    """

    def __init__(self, tls: ClientTls | None = None) -> None:
        self._tls = tls

    async def unload(
        self, targets: Mapping[str, bool], worker: str = ""
    ) -> Sequence[loading_pb2.UnloadedWorker]:
        """Unload the model of a worker, or of all workers if `worker` is empty."""
        request = loading_pb2.UnloadRequest(worker=worker)

        async def one(target: str) -> Sequence[loading_pb2.UnloadedWorker] | QuireError:
            try:
                async with (
                    asyncio.timeout(_UNLOAD_S),
                    open_channel(target, tls=self._tls) as channel,
                ):
                    stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
                    with calling():
                        workers: Sequence[loading_pb2.UnloadedWorker] = (
                            await stub.Unload(request)
                        ).workers
                    return workers
            except TimeoutError:
                return UnavailableError(
                    f"the scheduler at {target} did not answer within {_UNLOAD_S:g} s;"
                    " it may still unload the model"
                )
            except QuireError as error:
                return error

        ends = await asyncio.gather(*map(one, targets))
        tolerated: list[QuireError] = []
        for (target, is_connected), end in zip(targets.items(), ends, strict=True):
            if isinstance(end, QuireError):
                _tolerate(target, end, tolerated, may_be_standby=not is_connected)
        _check_answered(tolerated, len(targets))
        return [worker for end in ends if not isinstance(end, QuireError) for worker in end]

    async def load(
        self, targets: Mapping[str, bool], worker: str = "", directory: str = ""
    ) -> AsyncGenerator[loading_pb2.LoadResponse]:
        """Load a model at a worker, or at all workers if `worker` is empty; yield the progress.

        If `directory` is empty, each worker loads the last model that it had.
        """
        request = loading_pb2.LoadRequest(worker=worker, directory=directory)
        tolerated: list[QuireError] = []
        loads = merged(
            [
                self._load_at(target, request, tolerated, may_be_standby=not is_connected)
                for target, is_connected in targets.items()
            ]
        )
        async with aclosing(loads):
            async for progress in loads:
                yield progress
        _check_answered(tolerated, len(targets))

    async def _load_at(
        self,
        target: str,
        request: loading_pb2.LoadRequest,
        tolerated: list[QuireError],
        *,
        may_be_standby: bool,
    ) -> AsyncGenerator[loading_pb2.LoadResponse]:
        try:
            async with open_channel(target, tls=self._tls) as channel:
                stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
                async with aclosing(responses(stub.Load(request))) as loading:
                    async for progress in loading:
                        may_be_standby = False  # it has answered, so its next error is raised
                        yield progress
        except QuireError as error:
            _tolerate(target, error, tolerated, may_be_standby=may_be_standby)

    async def sum_of_loads(self, targets: Mapping[str, bool]) -> Load | None:
        """Return the `Load` of all schedulers that answer, summed; None: no scheduler answers."""

        async def one(target: str) -> Load | None:
            async with open_channel(target, tls=self._tls) as channel:
                try:
                    return await SchedulerCalls(channel).load()
                except QuireError:
                    return None

        found = [load for load in await asyncio.gather(*map(one, targets)) if load is not None]
        return sum_loads(found) if found else None


def _tolerate(
    target: str, error: QuireError, tolerated: list[QuireError], *, may_be_standby: bool
) -> None:
    """Append `error` to `tolerated`, or raise it.

    Only a `NotFoundError`, and a standby's `UnavailableError`, are appended.
    """
    if not isinstance(error, NotFoundError):
        if not (may_be_standby and isinstance(error, UnavailableError)):
            raise error
        log.warning("a scheduler was not reached", target=target, reason=str(error))
    tolerated.append(error)


def _check_answered(tolerated: Sequence[QuireError], num_asked: int) -> None:
    """Raise one of `tolerated` if all schedulers failed, preferably a `NotFoundError`."""
    if tolerated and len(tolerated) == num_asked:
        raise next((each for each in tolerated if isinstance(each, NotFoundError)), tolerated[0])
