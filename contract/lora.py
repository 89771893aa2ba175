"""LoRA adapters: how requests, schedulers and workers name one."""

from dataclasses import dataclass, field
from typing import Final

MAX_ADAPTER_NAME_CHARS: Final = 128
DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter; two are equal if name and contents are."""

    name: str
    """The name that requests use."""
    digest: bytes
    """SHA-256 of its contents."""
    directory: str = field(default="", compare=False)
    """An absolute path on the workers' machines; empty: not known. Requests do not carry it."""

    def __str__(self) -> str:
        return f"LoRA adapter {self.name!r} ({self.digest.hex()[:8]})"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """The result of a load."""

    adapter: LoraAdapter
    was_there: bool
    """Whether it was loaded already; then nothing has changed."""


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return bool(name) and name.isprintable() and len(name) <= MAX_ADAPTER_NAME_CHARS
