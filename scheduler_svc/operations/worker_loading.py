"""Tells a worker to unload its model, and to load one: its `LoadingService`.

On a channel of its own: the one of the worker's link is closed when the model goes.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from quire.v1 import loading_pb2, loading_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls
from rpc.status import calling
from rpc.tasks import responses
from scheduler_svc.workers.stream import ADAPTER_TIMEOUT_S

_UNLOAD_TIMEOUT_S = ADAPTER_TIMEOUT_S + 60.0
"""An adapter that is being read is waited for: who gave up before would say that a model stays."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a worker is with its model."""

    worker: str
    """Its target."""
    status: str
    progress: float | None = None
    is_done: bool = False
    was_loaded: bool = False
    """Whether it was there already."""


class WorkerLoading:
    """Calls workers under one epoch; all raises QuireError, which is what the worker says."""

    def __init__(self, epoch: int, tls: ClientTls | None) -> None:
        self._epoch = epoch
        self._tls = tls

    async def unload(self, target: str) -> bool:
        """Have a worker give its device back; returns when it has, and whether it had before."""
        request = loading_pb2.UnloadRequest(epoch=self._epoch)
        async with open_channel(target, tls=self._tls) as channel:
            stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            with calling():
                answer = await stub.Unload(request, timeout=_UNLOAD_TIMEOUT_S)
        return all(each.was_unloaded for each in answer.workers)

    async def load(self, target: str, directory: str) -> AsyncGenerator[LoadProgress]:
        """Have a worker load a model; tells how far that is, and ends when it is there."""
        request = loading_pb2.LoadRequest(directory=directory, epoch=self._epoch)
        async with open_channel(target, tls=self._tls) as channel:
            stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            async with aclosing(responses(stub.Load(request))) as loading:
                async for told in loading:
                    yield LoadProgress(
                        target,
                        told.status,
                        told.progress if told.HasField("progress") else None,
                        is_done=told.is_done,
                        was_loaded=told.was_loaded,
                    )
