"""What every process can be told by whoever operates it: to drain, as by SIGTERM."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from quire.v1 import admin_pb2, admin_pb2_grpc
from rpc.errors import InvalidArgumentError, PermissionDeniedError

ADMIN_SERVICE_NAME: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

_LOOK_S: Final = 0.1
_LOOPBACK_PEERS: Final = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")

log = structlog.get_logger()


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Sets `stopping` when it is told to by somebody who may."""

    def __init__(
        self,
        stopping: asyncio.Event,
        *,
        num_live: Callable[[], int],
        check_operator: Callable[[], None] | None,
        has_client_certificates: bool,
        obeys_loopback: bool,
        drain_worker: Callable[[str], AsyncIterator[int]] | None = None,
    ) -> None:
        """`check_operator` raises unless the call is an operator's; None: calls have no keys.

        Without keys and certificates it is obeyed by a Unix socket, which its permissions guard;
        `obeys_loopback`: by the loopback interface, too, which any proxy on the machine calls by.
        `drain_worker` has a worker of this scheduler drain, and yields what is live there.
        """
        self._stopping = stopping
        self._num_live = num_live
        self._drain_worker = drain_worker
        self._check_operator = check_operator
        self._has_client_certificates = has_client_certificates
        self._local_peers = ("unix:", *_LOOPBACK_PEERS) if obeys_loopback else ("unix:",)
        self._closed = asyncio.Event()

    async def Drain(  # noqa: N802 - the proto's name
        self,
        request: admin_pb2.DrainRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[admin_pb2.DrainResponse]:
        """Begin the drain, and tell of it until it is over."""
        self._check(context.peer())
        if request.worker:
            if self._drain_worker is None:
                raise InvalidArgumentError("worker", "is set; only a scheduler has workers drain")
            log.info("told to have a worker drain", peer=context.peer(), worker=request.worker)
            async for num_live in self._drain_worker(request.worker):
                yield admin_pb2.DrainResponse(num_live=num_live)
            return
        log.info("told to drain", peer=context.peer())
        self._stopping.set()
        last: int | None = None
        while not self._closed.is_set():
            if (num_live := self._num_live()) != last:
                last = num_live
                yield admin_pb2.DrainResponse(num_live=num_live)
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._closed.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """End the calls: the process has drained."""
        self._closed.set()

    def _check(self, peer: str) -> None:
        if self._check_operator is not None:
            self._check_operator()
        elif not self._has_client_certificates and not peer.startswith(self._local_peers):
            raise PermissionDeniedError(
                "a process without keys or --tls-client-ca is drained by SIGTERM, by its Unix"
                f" socket or, with --local-drain, from its own machine; this call is from {peer}"
            )
