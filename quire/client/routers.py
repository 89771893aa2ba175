"""The routers that a client knows: where they are, which is asked, and for how long."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from contract.errors import InvalidArgumentError, QuireError, UnavailableError
from quire.v1 import inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from rpc.transport import PATIENT, QUICK, Pings

Targets: TypeAlias = str | Sequence[str]
"""The routers of one service: each "host:port" or "unix:/path"; in one string, with commas."""


def split_targets(targets: Targets) -> list[str]:
    """List the routers; raise InvalidArgumentError if there is none."""
    listed = targets.split(",") if isinstance(targets, str) else list(targets)
    if not all(listed) or not listed:
        raise InvalidArgumentError("targets", f"is {targets!r}; it must name one router or more")
    return listed


@dataclass(frozen=True, slots=True)
class Router:
    """One of them, and the connections to it; each connects at its first call."""

    stub: InferenceServiceStub
    """For calls that end with their connection: it is kept through a silence of half a minute."""
    resuming_stub: InferenceServiceStub
    """For calls that can go on elsewhere: a router that is silent for three seconds is left."""


class Routers:
    """Which of several routers is asked: the same one, until it fails."""

    def __init__(self, targets: Targets, open_channel: Callable[[str, Pings], Any]) -> None:
        """Open channels to each, either all synchronous or all not.

        Raises InvalidArgumentError if there is none.
        """
        self.channels: list[Any] = []
        """All that were opened, for the owner to close."""
        self._index = 0

        def stub(target: str, pings: Pings) -> InferenceServiceStub:
            self.channels.append(open_channel(target, pings))
            return InferenceServiceStub(self.channels[-1])  # type: ignore[no-untyped-call]

        self._routers = [
            Router(stub(target, PATIENT), stub(target, QUICK)) for target in split_targets(targets)
        ]

    @property
    def current(self) -> Router:
        """The router to ask."""
        return self._routers[self._index]

    def failed(self, router: Router, error: QuireError) -> None:
        """Ask the next one, unless that is done already, or it was no fault of this one's."""
        if router is self.current and isinstance(error, UnavailableError):
            self._index = (self._index + 1) % len(self._routers)


class TimeLimit:
    """What is left of a time limit, for one call after another."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float | None:
        """Say how much is left; None: there is no limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def check(self, delay_s: float, error: QuireError) -> None:
        """Raise `error` if the limit passes in so many seconds."""
        remaining_s = self.remaining_s()
        if remaining_s is not None and remaining_s <= delay_s:
            raise error


def start_call(
    stub: InferenceServiceStub,
    request: inference_pb2.GenerateRequest | inference_pb2.ResumeRequest,
    timeout_s: float | None,
    metadata: list[tuple[str, str]],
) -> Any:
    """Begin a stream of the kind that `request` asks for."""
    is_new = isinstance(request, inference_pb2.GenerateRequest)
    return (stub.Generate if is_new else stub.Resume)(request, timeout=timeout_s, metadata=metadata)
