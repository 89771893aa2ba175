"""What both clients do alike to have one request served; they differ in how they wait.

A request takes as many calls as it takes, to one router or another: `Attempts` makes each call and
says when to make the next, `Continuation` knows what has come, and the client waits and reads.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from contract.errors import QuireError
from quire.client import wire
from quire.client.continuation import Continuation
from quire.client.retry import Retry, RetryBudget
from quire.client.routers import Routers, Targets, TimeLimit, start_call
from quire.client.types import Event, GenerateOptions, SamplingParams
from quire.v1 import inference_pb2
from rpc.transport import Pings

_CANCEL_TIMEOUT_S = 2.0

Metadata: TypeAlias = list[tuple[str, str]]


class Service:
    """The routers of one service, as one client knows them: whom to ask, and how often."""

    def __init__(
        self,
        targets: Targets,
        open_channel: Callable[[str, Pings], Any],
        *,
        retry: Retry | None,
        api_key: str,
    ) -> None:
        """See `Routers`."""
        self.routers = Routers(targets, open_channel)
        self.metadata: Metadata = wire.api_key_to_metadata(api_key)
        self._retry = retry
        self._budget = RetryBudget()

    def attempts(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: GenerateOptions,
        *,
        priority: int,
        tenant: str,
        timeout_s: float | None,
    ) -> "Attempts":
        """Prepare a request; its time runs from now on."""
        request = wire.generate_request_to_proto(prompt, sampling, options)
        return Attempts(
            self.routers,
            request,
            Continuation(request, self._retry, self._budget),
            TimeLimit(timeout_s),
            [*self.metadata, *wire.precedence_to_metadata(priority, tenant)],
        )


class Attempts:
    """One request, to be served by one call after another."""

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
        """Whether everything has come."""
        return self._continuation.is_complete

    @property
    def must_be_cancelled(self) -> bool:
        """Whether the work goes on though the caller wants no more."""
        return self._continuation.is_resumable and not self.is_complete

    def stream(self, trace: Sequence[tuple[str, str]] = ()) -> Any:
        """Begin the next call, which streams; `trace` is metadata that makes it part of one."""
        self._router = self._routers.current
        self._started_s = time.monotonic()
        can_go_on = self._continuation.is_resumable
        return start_call(
            self._router.resuming_stub if can_go_on else self._router.stub,
            self._continuation.next_request(),
            self._time_limit.remaining_s(),
            [*trace, *self._metadata],
        )

    def once(self, trace: Sequence[tuple[str, str]] = ()) -> Any:
        """Make the next call, answered in one piece; give the answer, or what is to be awaited."""
        self._router = self._routers.current
        return self._router.stub.GenerateOnce(
            inference_pb2.GenerateOnceRequest(request=self._request),
            timeout=self._time_limit.remaining_s(),
            metadata=[*trace, *self._metadata],
        )

    def take(self, response: inference_pb2.GenerateResponse) -> Event | None:
        """Take the next message of a stream; give what is new. Raises as `Continuation.take`."""
        return self._continuation.take(wire.event_from_proto(response))

    def check_complete(self) -> None:
        """Check, when a stream has ended well, that everything has come."""
        self._continuation.check_complete()

    def failed(self, error: QuireError) -> float:
        """Take the failure of the present call; give how long to wait before the next.

        Raises `error` if there is no use in another, or no time.
        """
        now_s = time.monotonic()
        self._routers.failed(self._router, error)  # the next request, too, asks another
        delay_s = self._continuation.failed(error, now_s, now_s - self._started_s)
        self._time_limit.check(delay_s, error)
        return delay_s

    def cancel(self) -> Any:
        """End the work; give what `once` would. It ends by itself if this fails, only later."""
        request = inference_pb2.CancelRequest(request_id=self._continuation.request_id)
        return self._routers.current.stub.Cancel(
            request, timeout=_CANCEL_TIMEOUT_S, metadata=self._metadata
        )
