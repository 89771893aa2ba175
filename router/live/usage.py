"""Sums up the usage of requests by tenant, key and model, until it is stored."""

import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Final, TypeAlias

import structlog

from contract.outputs import Usage

log = structlog.get_logger()

HOUR_S: Final = 3600
_MAX_ROWS: Final = 100_000
"""The limit on new sums that wait for the store. If the store fails for so long that the limit is
reached, usage that would need a further sum is lost."""


@dataclass(frozen=True, slots=True)
class UsageKey:
    """The key of a sum: who used which model. There is one sum for each `UsageKey` and hour."""

    tenant: str
    key: str
    """The name of the API key; empty: the router uses no API keys."""
    model: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Used:
    """The usage of requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The number of prompt tokens that were found in the prefix cache."""
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    """Generated tokens that are thinking."""

    def __add__(self, other: "Used") -> "Used":
        return Used(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def used_of(usage: Usage) -> Used:
    """Return the usage of one request."""
    return Used(
        1,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        usage.reasoning_tokens,
    )


UsageRows: TypeAlias = Mapping[tuple[int, UsageKey], Used]
"""Maps (hour, key) to the sum; the hour is the Unix time of its beginning."""


class UsageCounts:
    """Sums up usage, and passes it to the store in parts.

    The parts are numbered, so that the store adds a part only once, even if it gets the part twice.
    """

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
        """Return the next part of the usage to store: the part's number and its sums.

        Until `kept` is called, later calls return the same part.
        """
        if not self._taken and self._new:
            self._taken, self._new = self._new, {}
            self._number += 1
            self._is_full = False
        return self._number, self._taken

    def kept(self) -> None:
        self._taken = {}


def hour_of(at: float) -> int:
    """Return the Unix time at which the hour of `at` began."""
    return int(at // HOUR_S) * HOUR_S
