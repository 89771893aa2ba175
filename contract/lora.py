"""LoRA adapters, and how requests, schedulers and workers name them."""

from dataclasses import dataclass, field
from typing import Final

MAX_ADAPTER_NAME_CHARS: Final = 128
DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter. Two adapters are equal if their names and digests are equal."""

    name: str
    """The name that requests use."""
    digest: bytes
    """SHA-256 of the adapter's contents."""
    directory: str = field(default="", compare=False)
    """An absolute path on the workers' machines; empty: unknown. Not part of requests."""

    def __str__(self) -> str:
        return f"LoRA adapter {self.name!r} ({self.digest.hex()[:8]})"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """The result of loading an adapter."""

    adapter: LoraAdapter
    was_there: bool
    """Whether the adapter was already loaded, with the same contents, so that nothing has changed.
    """


def is_adapter_name(name: str) -> bool:
    """Whether `name` is a valid adapter name."""
    return bool(name) and name.isprintable() and len(name) <= MAX_ADAPTER_NAME_CHARS
