"""A turn: one call of an API that is kept, with its output so far."""

from dataclasses import dataclass, field
from enum import StrEnum

from contract.errors import UnavailableError
from router.request.usage import UsageRows


class StoreError(UnavailableError):
    """The store of turns cannot be read or written now."""


class TurnStatus(StrEnum):
    QUEUED = "queued"
    """Accepted, and not submitted to a scheduler yet."""
    RUNNING = "running"
    COMPLETED = "completed"
    """Its output has ended, at a stop or at its limit."""
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self not in (TurnStatus.QUEUED, TurnStatus.RUNNING)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, without its tokens."""

    id: str
    tenant: str
    kind: str
    """Which API's it is, such as "response"; see `TurnKind`."""
    body: bytes
    """The client's request, as JSON of that API."""
    created_at: float
    """Unix time, as all times of a turn."""
    key_name: str = ""
    """The name of the API key that it came with."""
    model: str = ""
    previous_id: str | None = None
    """The turn that it continues."""
    group: str = ""
    """What it is a part of, such as a batch; empty: nothing."""
    position: int = 0
    """Its place in the group."""
    priority: int = 0
    idempotency_key: str | None = None
    """The same key of the same tenant is the same turn."""
    fingerprint: bytes = b""
    """A hash of the request, to tell another one with the same key."""
    status: TurnStatus = TurnStatus.QUEUED
    record: bytes | None = None
    """What submits it to a scheduler again, as `record_to_bytes` makes it; None: it never was."""
    result: bytes | None = None
    """The answer, as JSON of its API; None until it has ended."""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a turn has ended."""

    status: TurnStatus
    result: bytes
    at: float
    usage: UsageRows = field(default_factory=dict)
    """What it used; kept together with the end."""
