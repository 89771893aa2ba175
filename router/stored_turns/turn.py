"""A turn: one stored call of an API, with its output so far."""

from dataclasses import dataclass, field
from enum import StrEnum

from contract.errors import UnavailableError
from router.live.usage import UsageRows, Used


class StoreError(UnavailableError):
    """The store of turns cannot be read or written now."""


class TurnStatus(StrEnum):
    QUEUED = "queued"
    """Accepted, but not submitted to a scheduler yet."""
    RUNNING = "running"
    COMPLETED = "completed"
    """The output has ended, at a stop or at its length limit."""
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
    """The API of the call, such as "response"; see `TurnKind`."""
    body: bytes
    """The client's request, as JSON of the call's API."""
    created_at: float
    """Unix time, like all times of a turn."""
    key_name: str = ""
    """The name of the caller's API key."""
    model: str = ""
    previous_id: str | None = None
    """The turn that this one continues."""
    group: str = ""
    """The group of the turn, such as a batch; empty: no group."""
    position: int = 0
    """The turn's position in its group."""
    priority: int = 0
    idempotency_key: str | None = None
    """All calls of one tenant with the same key get the same turn."""
    fingerprint: bytes = b""
    """A hash of the request, to detect a different request with the same key."""
    status: TurnStatus = TurnStatus.QUEUED
    record: bytes | None = None
    """What `record_to_bytes` makes of the turn's request, so that any router can submit the request
    again; None: the turn was never submitted."""
    result: bytes | None = None
    """The answer, as JSON of the API; None until the turn has ended."""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The answer of a turn that has no tokens to store, such as a batch's line for embeddings."""

    result: bytes
    used: Used


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a turn has ended."""

    status: TurnStatus
    result: bytes
    at: float
    usage: UsageRows = field(default_factory=dict)
    """The usage to add to the tenant's usage, in the transaction that stores the end."""
    used: Used = field(default_factory=Used)
    """The usage to add to the counts of the turn's group."""
