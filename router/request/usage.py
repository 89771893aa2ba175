"""Counts what requests have used, for tenants, keys and models, until the store has kept it."""

import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Final, TypeAlias

import structlog

from contract.outputs import Usage

log = structlog.get_logger()

HOUR_S: Final = 3600
_MAX_ROWS: Final = 100_000
"""Most sums that wait for a store that fails."""


@dataclass(frozen=True, slots=True)
class UsageKey:
    """Whose usage it is, and of which model: there is a sum for each of these and each hour."""

    tenant: str
    key: str
    """The name of the API key; empty: calls have none."""
    model: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Used:
    """What requests have used."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts."""
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    """Of the generated ones."""

    def __add__(self, other: "Used") -> "Used":
        return Used(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def used_of(usage: Usage) -> Used:
    """Return what one request has used."""
    return Used(
        1,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        usage.reasoning_tokens,
    )


UsageRows: TypeAlias = Mapping[tuple[int, UsageKey], Used]
"""By the Unix time of the hour's beginning, and the key."""


class UsageCounts:
    """Sums up usage, and gives the store one part after another, each under a number of its own."""

    def __init__(self) -> None:
        self._new: dict[tuple[int, UsageKey], Used] = {}
        self._taken: UsageRows = {}
        self._number = 0
        self._is_full = False

    def add(self, key: UsageKey, used: Used) -> None:
        if used == Used():
            return
        place = hour_of(time.time()), key
        if place not in self._new and len(self._new) >= _MAX_ROWS:
            if not self._is_full:
                log.error("usage is lost: the store of turns has failed for too long")
            self._is_full = True
            return
        self._new[place] = self._new.get(place, Used()) + used

    def take(self) -> tuple[int, UsageRows]:
        """Return the part to keep, and its number; the same part until `kept` is called."""
        if not self._taken and self._new:
            self._taken, self._new = self._new, {}
            self._number += 1
            self._is_full = False
        return self._number, self._taken

    def kept(self) -> None:
        self._taken = {}


def hour_of(at: float) -> int:
    """Return when the hour of a Unix time began."""
    return int(at // HOUR_S) * HOUR_S
