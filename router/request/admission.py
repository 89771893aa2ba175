"""Which requests the router admits: each id once, up to a limit, none while it drains."""

import asyncio
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind

from contract.errors import AlreadyExistsError, QuireError, TooBusyError, UnavailableError
from router import metrics
from router.request import span as request_span
from router.request.live import LiveRequest
from rpc.observe import telemetry

_LAST_BYTES_S = 0.2
"""Time for clients to read the last bytes: closing a socket may discard them."""


@dataclass(slots=True, eq=False)
class Admitted:
    """One request, from its admission until it is read to the end or left."""

    tenant: str
    request_id: str
    span: Span
    admitted_at: float
    """On the event loop's clock."""
    live: LiveRequest | None = None
    """None until it is submitted."""
    ended_by: QuireError | None = None
    """Why it is not to be submitted any more."""

    def end(self, error: QuireError) -> bool:
        """End it with `error`; returns whether it was still live."""
        if self.live is not None:
            return self.live.end(error)
        self.ended_by = error
        return True


class Admission:
    """The live requests by tenant and id, from admission until they are read to the end or left."""

    def __init__(self, max_live_requests: int) -> None:
        self._max_live_requests = max_live_requests
        self._admitted: dict[tuple[str, str], Admitted] = {}
        self._is_draining = False
        self._drained = asyncio.Event()

    def __len__(self) -> int:
        return len(self._admitted)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._admitted

    @property
    def admitted(self) -> tuple[Admitted, ...]:
        """The requests, oldest first."""
        return tuple(self._admitted.values())

    @property
    def lives(self) -> tuple[LiveRequest, ...]:
        """The submitted requests."""
        return tuple(each.live for each in self._admitted.values() if each.live is not None)

    def find(self, tenant: str, request_id: str) -> LiveRequest | None:
        """Return the request with this tenant and id, if it has been submitted."""
        admitted = self._admitted.get((tenant, request_id))
        return None if admitted is None else admitted.live

    def admit(self, tenant: str, request_id: str) -> Admitted:
        """Admit a request; its span lasts until it is released.

        Raises `UnavailableError` in a drain; `AlreadyExistsError` if a request with this tenant and
        id is live; `TooBusyError` beyond `max_live_requests`.
        """
        if self._is_draining:
            raise UnavailableError("the router is draining; send the request to another one")
        if (tenant, request_id) in self._admitted:
            raise AlreadyExistsError(f"request_id {request_id!r} belongs to a live request")
        if len(self._admitted) >= self._max_live_requests:
            raise TooBusyError(
                f"{len(self._admitted)} requests are live; at most {self._max_live_requests} may be"
            )
        span = telemetry.tracer().start_span("request", kind=SpanKind.SERVER)
        admitted = Admitted(tenant, request_id, span, asyncio.get_running_loop().time())
        self._admitted[tenant, request_id] = admitted
        metrics.NUM_REQUESTS_LIVE.inc()
        return admitted

    def add(self, live: LiveRequest) -> None:
        """Add an admitted request that has been submitted."""
        self._admitted[live.record.tenant, live.request_id].live = live

    def close(self, live: LiveRequest) -> None:
        """Release a request that has been read to the end, or left; complete its span."""
        tenant = live.record.tenant
        span = self._admitted[tenant, live.request_id].span
        if span.is_recording():
            span.set_attributes(request_span.closed(live))
        self.release(tenant, live.request_id)

    def release(self, tenant: str, request_id: str) -> None:
        """Forget an admitted request."""
        self._admitted.pop((tenant, request_id)).span.end()
        metrics.NUM_REQUESTS_LIVE.dec()
        if self._is_draining and not self._admitted:
            self._drained.set()

    async def drain(self) -> None:
        """Admit no more requests; return when the live ones have been read to the end."""
        self._is_draining = True
        if self._admitted:
            await self._drained.wait()
            await asyncio.sleep(_LAST_BYTES_S)
