"""Admits a request, unless its id is in use, too many requests are live, or the router drains.

Three modules refuse requests under overload. This module limits the live requests of this router,
to bound the router's memory. `router/schedulers/pool.py` refuses a request when every scheduler has
reported a full queue. `scheduler_svc/core/limits/acceptance.py` limits the waiting sequences of one
worker, and knows their exact number.

A request's reader is the call that reads the request's events for the client.
"""

import asyncio
from dataclasses import dataclass

import structlog
from opentelemetry.trace import Span, SpanKind, format_trace_id

from contract.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    QuireError,
    TooBusyError,
    UnavailableError,
)
from router.live.live_request import LiveRequest
from router.metrics import of_model
from router.request import span as request_span
from rpc.observe import telemetry

log = structlog.get_logger()

_LAST_BYTES_S = 0.2
"""How long a drain waits after the last request has ended, so that clients can read the last bytes
of their answers; a socket that closes may discard unread bytes."""


@dataclass(slots=True, eq=False)
class AdmittedRequest:
    """One request, from its admission until its reader has finished or left."""

    tenant: str
    request_id: str
    model: str
    """The model's name in the router's flags; for an adapter, the name of its base model."""
    span: Span
    admitted_at: float
    """The time of admission, on the event loop's clock."""
    live: LiveRequest | None = None
    """None until the prompt is tokenized. When a client resumes a request: None until a scheduler
    has sent the request's state to this router."""
    ended_by: QuireError | None = None
    """The error that ended the request before `live` was set."""

    def end(self, error: QuireError) -> bool:
        """End the request with `error`; return whether it was still live."""
        if self.live is not None:
            return self.live.end(error)
        self.ended_by = error
        return True


class Admission:
    """The live requests by tenant and id, from admission until the reader has finished or left."""

    def __init__(self, max_live_requests: int) -> None:
        self._max_live_requests = max_live_requests
        self._admitted: dict[tuple[str, str], AdmittedRequest] = {}
        self._is_draining = False
        self._drained = asyncio.Event()

    def __len__(self) -> int:
        return len(self._admitted)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._admitted

    @property
    def admitted(self) -> tuple[AdmittedRequest, ...]:
        """The admitted requests, oldest first."""
        return tuple(self._admitted.values())

    def find(self, tenant: str, request_id: str) -> AdmittedRequest | None:
        """Return the admitted request with this tenant and id; None if there is no such request."""
        return self._admitted.get((tenant, request_id))

    def check_capacity(self, num_requests: int) -> None:
        """Raise `InvalidArgumentError` if `num_requests` exceeds the limit on live requests."""
        if num_requests > self._max_live_requests:
            raise InvalidArgumentError(
                "prompt",
                f"holds {num_requests} prompts; at most {self._max_live_requests} requests may be"
                " live (--max-live-requests)",
            )

    def admit(self, tenant: str, request_id: str, model: str) -> AdmittedRequest:
        """Admit a request, and begin its span, which `release` ends.

        `model` is the model's name in the router's flags. Raises `UnavailableError` during a drain,
        `AlreadyExistsError` if a request with this tenant and id is live, and `TooBusyError` if
        `max_live_requests` are live.
        """
        if self._is_draining:
            raise UnavailableError("the router is draining; send the request to another one")
        if (tenant, request_id) in self._admitted:
            raise AlreadyExistsError(f"request_id {request_id!r} belongs to a live request")
        if len(self._admitted) >= self._max_live_requests:
            raise TooBusyError(
                f"{len(self._admitted)} requests are live; the limit is {self._max_live_requests}"
            )
        span = telemetry.tracer().start_span("request", kind=SpanKind.SERVER)
        admitted = AdmittedRequest(
            tenant, request_id, model, span, asyncio.get_running_loop().time()
        )
        self._admitted[tenant, request_id] = admitted
        of_model(model).num_requests_live.inc()
        return admitted

    def add(self, live: LiveRequest) -> None:
        """Set the `live` of an admitted request."""
        self._admitted[live.record.tenant, live.request_id].live = live

    def close(self, live: LiveRequest) -> None:
        """Release a request whose reader has finished or left; complete its span."""
        tenant = live.record.tenant
        admitted = self._admitted[tenant, live.request_id]
        span = admitted.span
        first_s = live.time_to_first_token_s
        traced: dict[str, str] = {}
        if span.is_recording():
            span.set_attributes(request_span.closed(live))
            traced["trace_id"] = format_trace_id(span.get_span_context().trace_id)
        log.info(
            "request ended",
            request_id=live.request_id,
            tenant=tenant,
            model=live.model,
            num_prompt_tokens=len(live.prompt_token_ids),
            num_output_tokens=live.num_completion_tokens,
            finish_reasons=live.finish_reasons,
            time_to_first_token_s=None if first_s is None else round(first_s, 4),
            took_s=round(asyncio.get_running_loop().time() - admitted.admitted_at, 4),
            goes_on=live.goes_on,
            **traced,
        )
        self.release(tenant, live.request_id)

    def release(self, tenant: str, request_id: str) -> None:
        """Remove an admitted request."""
        admitted = self._admitted.pop((tenant, request_id))
        admitted.span.end()
        of_model(admitted.model).num_requests_live.dec()
        if self._is_draining and not self._admitted:
            self._drained.set()

    async def drain(self) -> None:
        """Admit no more requests; return when all live requests have been read to the end."""
        self._is_draining = True
        if self._admitted:
            await self._drained.wait()
            await asyncio.sleep(_LAST_BYTES_S)
