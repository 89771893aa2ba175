"""One request of a client, which may need several calls to several routers.

`Attempts` makes the calls, and decides when to make the next one. `Continuation` tracks the
received events. The client reads the streams, and waits between calls.
"""

import time
from typing import Any, TypeAlias

from contract.codec.outputs import event_from_proto
from contract.errors import QuireError
from quire.client.continuation import Continuation
from quire.client.routers import Routers
from quire.client.types import Event
from quire.v1 import inference_pb2

_CANCEL_TIMEOUT_S = 2.0

Metadata: TypeAlias = list[tuple[str, str]]


class TimeLimit:
    """A time limit over several calls."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float | None:
        """Return the remaining seconds; None: no limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def check(self, delay_s: float, error: QuireError) -> None:
        """Raise `error` if the limit ends within `delay_s`."""
        remaining_s = self.remaining_s()
        if remaining_s is not None and remaining_s <= delay_s:
            raise error


class Attempts:
    """The calls of one request.

    Methods that start a call return the object that the gRPC stub returns. The caller awaits this
    object or reads from it.
    """

    def __init__(
        self,
        routers: Routers,
        request: inference_pb2.GenerateRequest,
        continuation: Continuation,
        time_limit: TimeLimit,
        metadata: Metadata,
    ) -> None:
        self._routers = routers
        self._router = routers.current
        self._started_s = time.monotonic()
        self._request = request
        self._continuation = continuation
        self._time_limit = time_limit
        self._metadata = metadata

    @property
    def is_complete(self) -> bool:
        """Whether everything has arrived."""
        return self._continuation.is_complete

    @property
    def must_be_cancelled(self) -> bool:
        """Whether the service would continue the request after the client stops reading."""
        return self._continuation.is_resumable and not self.is_complete

    def stream(self) -> Any:
        """Start the next streaming call."""
        self._begin()
        can_go_on = self._continuation.is_resumable
        stub = self._router.resuming_stub if can_go_on else self._router.stub
        request = self._continuation.next_request()
        is_new = isinstance(request, inference_pb2.GenerateRequest)
        method = stub.Generate if is_new else stub.Resume
        return method(request, timeout=self._time_limit.remaining_s(), metadata=self._metadata)

    def once(self) -> Any:
        """Start the next call, whose answer is a single message."""
        self._begin()
        return self._router.stub.GenerateOnce(
            inference_pb2.GenerateOnceRequest(request=self._request),
            timeout=self._time_limit.remaining_s(),
            metadata=self._metadata,
        )

    def _begin(self) -> None:
        self._router = self._routers.current
        self._started_s = time.monotonic()

    def receive(self, response: inference_pb2.GenerateResponse) -> Event | None:
        """Process the next message of a stream; return its new part, if any.

        Raises the errors of `Continuation.receive`.
        """
        return self._continuation.receive(event_from_proto(response))

    def check_complete(self) -> None:
        """Check that a stream that ended without an error is complete."""
        self._continuation.check_complete()

    def failed(self, error: QuireError) -> float:
        """Record the failure of the current call; return the seconds until the next call.

        Raises `error` if another call cannot help, or there is no time for another call.
        """
        now_s = time.monotonic()
        self._routers.failed(self._router, error)  # later calls may use another router
        delay_s = self._continuation.failed(error, now_s, now_s - self._started_s)
        self._time_limit.check(delay_s, error)
        return delay_s

    def cancel(self) -> Any:
        """Start a call that cancels the request; see `must_be_cancelled`."""
        request = inference_pb2.CancelRequest(request_id=self._continuation.request_id)
        return self._routers.current.stub.Cancel(
            request, timeout=_CANCEL_TIMEOUT_S, metadata=self._metadata
        )
