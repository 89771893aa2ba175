"""What an adapter is known by."""

from dataclasses import dataclass, field
from typing import Final

MAX_ADAPTER_NAME: Final = 128
"""Characters."""


@dataclass(frozen=True, slots=True)
class AdapterId:
    """Names an adapter, and tells its contents from all others."""

    name: str
    """What requests call it."""
    digest: bytes
    """32 bytes."""
    directory: str = field(default="", compare=False)
    """Where it was read, an absolute path."""


def is_adapter_name(name: str) -> bool:
    """Whether requests can call an adapter so."""
    return bool(name) and name.isprintable() and len(name) <= MAX_ADAPTER_NAME
