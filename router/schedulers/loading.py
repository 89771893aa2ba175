"""Tells a scheduler to have workers unload their models, and load them: its `LoadingService`.

On a channel of its own: the one of the link is closed when the model changes.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from quire.v1 import loading_pb2, loading_pb2_grpc
from router.domain import LoadProgress, UnloadedWorker
from router.operations.loading_wire import progress_from_proto, unloaded_from_proto
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls
from rpc.status import calling
from rpc.tasks import responses


class SchedulerLoading:
    """Calls schedulers by their targets; all raises QuireError, which is what they say."""

    def __init__(self, tls: ClientTls | None) -> None:
        self._tls = tls

    async def unload(self, target: str, worker: str) -> Sequence[UnloadedWorker]:
        """Has a worker, or all if that is empty, give their devices back."""
        request = loading_pb2.UnloadRequest(worker=worker)
        async with open_channel(target, tls=self._tls) as channel:
            stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            with calling():
                response = await stub.Unload(request)
        return [unloaded_from_proto(each) for each in response.workers]

    async def load(self, target: str, worker: str, directory: str) -> AsyncGenerator[LoadProgress]:
        """Has them take these again, with what is in a directory; tells how far that is."""
        request = loading_pb2.LoadRequest(worker=worker, directory=directory)
        async with open_channel(target, tls=self._tls) as channel:
            stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            async with aclosing(responses(stub.Load(request))) as loading:
                async for told in loading:
                    yield progress_from_proto(told)
