"""Decides which requests the router admits: each id once, up to a limit, none while it drains.

Three places refuse requests under overload. This module limits the live requests of this router, to
bound its memory. `router/schedulers/pool.py` refuses early when all schedulers have reported full
queues. The scheduler decides with exact numbers (`scheduler_svc/core/limits.py`).
"""

import asyncio

from opentelemetry.trace import Span, SpanKind

from contract.errors import AlreadyExistsError, InvalidArgumentError, TooBusyError, UnavailableError
from router import metrics
from router.request import span as request_span
from router.request.live import LiveRequest
from rpc.observe import telemetry

_LAST_BYTES_S = 0.2
"""Time for clients to read the last bytes, which closing a socket may discard."""


class Admission:
    """The live requests by tenant and id, from admission until the reader has finished or left."""

    def __init__(self, max_live_requests: int) -> None:
        self._max_live_requests = max_live_requests
        self._spans: dict[tuple[str, str], Span] = {}
        self._lives: dict[tuple[str, str], LiveRequest] = {}
        """The submitted requests."""
        self._is_draining = False
        self._drained = asyncio.Event()

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._spans

    @property
    def lives(self) -> tuple[LiveRequest, ...]:
        """The submitted requests."""
        return tuple(self._lives.values())

    def find(self, tenant: str, request_id: str) -> LiveRequest | None:
        """Return the request with this tenant and id, if it has been submitted."""
        return self._lives.get((tenant, request_id))

    def check_capacity(self, num_requests: int) -> None:
        """Raise `InvalidArgumentError` if `num_requests` exceeds the limit on live requests."""
        if num_requests > self._max_live_requests:
            raise InvalidArgumentError(
                "prompt",
                f"holds {num_requests} prompts; at most {self._max_live_requests} requests may be"
                " live (--max-live-requests)",
            )

    def admit(self, tenant: str, request_id: str) -> Span:
        """Admit a request; return the span that lasts until it is released.

        Raises `UnavailableError` in a drain; `AlreadyExistsError` if a request with this tenant and
        id is live; `TooBusyError` beyond `max_live_requests`.
        """
        if self._is_draining:
            raise UnavailableError("the router is draining; send the request to another one")
        if (tenant, request_id) in self._spans:
            raise AlreadyExistsError(f"request_id {request_id!r} belongs to a live request")
        if len(self._spans) >= self._max_live_requests:
            raise TooBusyError(
                f"{len(self._spans)} requests are live; at most {self._max_live_requests} may be"
            )
        span = telemetry.tracer().start_span("request", kind=SpanKind.SERVER)
        self._spans[tenant, request_id] = span
        metrics.NUM_REQUESTS_LIVE.inc()
        return span

    def add(self, live: LiveRequest) -> None:
        """Add an admitted request that has been submitted."""
        self._lives[live.record.tenant, live.request_id] = live

    def close(self, live: LiveRequest) -> None:
        """Release a request that has been read to the end, or left; complete its span."""
        tenant = live.record.tenant
        span = self._spans[tenant, live.request_id]
        if span.is_recording():
            span.set_attributes(request_span.closed(live))
        self.release(tenant, live.request_id)

    def release(self, tenant: str, request_id: str) -> None:
        """Forget an admitted request."""
        self._spans.pop((tenant, request_id)).end()
        self._lives.pop((tenant, request_id), None)
        metrics.NUM_REQUESTS_LIVE.dec()
        if self._is_draining and not self._spans:
            self._drained.set()

    async def drain(self) -> None:
        """Admit no more requests; return when the live ones have been read to the end."""
        self._is_draining = True
        if self._spans:
            await self._drained.wait()
            await asyncio.sleep(_LAST_BYTES_S)
