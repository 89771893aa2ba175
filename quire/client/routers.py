"""The routers that a client knows, and the choice among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from contract.errors import InvalidArgumentError, QuireError, UnavailableError
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from rpc.transport import PATIENT, QUICK, Pings

Targets: TypeAlias = str | Sequence[str]
"""The routers of one service, as a sequence, or as one string with commas between the routers. A
router is "host:port" or "unix:/path"."""


@dataclass(frozen=True, slots=True)
class RouterStubs:
    """One router, with two channels that connect at their first call."""

    stub: InferenceServiceStub
    """For calls that fail if the connection is lost. The connection counts as lost when the router
    has been silent for half a minute."""
    resuming_stub: InferenceServiceStub
    """For streams of resumable requests, which can continue at another router. The connection
    counts as lost when the router has been silent for 1.7 seconds."""


class Routers:
    """The routers of one service. All calls go to the same router until it fails."""

    def __init__(self, targets: Targets, open_channel: Callable[[str, Pings], Any]) -> None:
        """Open two channels to each router; raises InvalidArgumentError if there is no router."""
        listed = targets.split(",") if isinstance(targets, str) else list(targets)
        if not all(listed) or not listed:
            raise InvalidArgumentError(
                "targets", f"is {targets!r}; it must name at least one router"
            )
        self.channels: list[Any] = []
        """Two channels to each router; the client closes them."""
        self._index = 0

        def stub(target: str, pings: Pings) -> InferenceServiceStub:
            self.channels.append(open_channel(target, pings))
            return InferenceServiceStub(self.channels[-1])  # type: ignore[no-untyped-call]

        self._routers = [
            RouterStubs(stub(target, PATIENT), stub(target, QUICK)) for target in listed
        ]

    @property
    def current(self) -> RouterStubs:
        """The router to call."""
        return self._routers[self._index]

    def failed(self, router: RouterStubs, error: QuireError) -> None:
        """Switch to the next router if `error` is an UnavailableError.

        Does nothing if `router` is no longer the current router.
        """
        if router is self.current and isinstance(error, UnavailableError):
            self._index = (self._index + 1) % len(self._routers)
