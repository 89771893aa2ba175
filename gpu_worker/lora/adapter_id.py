"""What an adapter is known by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterId:
    """Names an adapter, and tells its contents from all others."""

    name: str
    """What requests call it."""
    digest: bytes
    """32 bytes."""
