"""Has a worker drain and end for an operator who knows, or reaches, its scheduler only."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from contract.errors import UnavailableError
from quire.v1 import admin_pb2, admin_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls
from rpc.tasks import responses
from scheduler_svc.workers.roster import Roster


async def drain_worker(roster: Roster, tls: ClientTls | None, worker: str) -> AsyncIterator[int]:
    """Tell a worker to drain; yield how many of its sequences are live, until it has drained.

    It moves them to others by this scheduler, as if it had been told itself.

    Raises:
        NotFoundError: There is no such worker.
        QuireError: What the worker says: it may not obey this scheduler's machine or certificate.
    """
    target = roster.engine(worker).target
    has_begun = False
    async with open_channel(target, tls=tls) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            async with aclosing(responses(stub.Drain(admin_pb2.DrainRequest()))) as draining:
                async for told in draining:
                    has_begun = True
                    yield told.num_live
        except UnavailableError:
            if not has_begun:  # else it has ended before it could say so
                raise
