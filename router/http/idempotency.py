"""The Idempotency-Key header: a call that is sent again gets the result of the first one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from contract.errors import AlreadyExistsError, InvalidArgumentError
from router.http.strict_json import excerpt

HEADER: Final = "Idempotency-Key"
MAX_KEY_CHARS: Final = 255


@dataclass(frozen=True, slots=True)
class CallKey:
    """A tenant's idempotency key, and a hash of the call that has the key."""

    key: str
    fingerprint: bytes
    """A hash of the call, to detect a different call with the same key."""

    def check(self, fingerprint: bytes) -> None:
        """Raise AlreadyExistsError if the key belongs to a different call.

        `fingerprint` is the hash of the first call that had the key.
        """
        if fingerprint != self.fingerprint:
            raise AlreadyExistsError(f"{HEADER} {self.key!r} belongs to another request")


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Return a call's key, None if it has none; may raise InvalidArgumentError."""
    key = headers.get(HEADER)
    if key is None or (1 <= len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()):
        return key
    raise InvalidArgumentError(
        HEADER, f"is {excerpt(key)}; it must be 1 to {MAX_KEY_CHARS} printable ASCII characters"
    )


def call_key(headers: Mapping[str, str], fingerprint: bytes) -> CallKey | None:
    """Return a `CallKey`, None if the call has no key; may raise InvalidArgumentError."""
    key = idempotency_key(headers)
    return None if key is None else CallKey(key, fingerprint)
