"""How an adapter is identified."""

from dataclasses import dataclass, field
from typing import Final

MAX_ADAPTER_NAME: Final = 128
"""Characters."""


@dataclass(frozen=True, slots=True)
class AdapterId:
    """An adapter's name and the digest of its contents."""

    name: str
    """The name that requests use."""
    digest: bytes
    """32 bytes."""
    directory: str = field(default="", compare=False)
    """Where it was read from, an absolute path."""


def is_adapter_name(name: str) -> bool:
    """Whether the name is valid for an adapter."""
    return bool(name) and name.isprintable() and len(name) <= MAX_ADAPTER_NAME
