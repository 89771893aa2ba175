"""Operators' calls about usage: sums by tenant, key, model, adapter and time."""

import time
from collections.abc import Sequence
from typing import Final

from contract.errors import InvalidArgumentError, UnimplementedError
from router.stored_turns.turns import Turns
from router.stored_turns.usage import UsageRow, read_usage
from rpc.security.operators import Operators

DEFAULT_BY: Final = ("tenant", "model")
_DAY_S: Final = 86400


class UsageReports:
    """Reads the stored usage, after a check that `peer` is an operator."""

    def __init__(self, turns: Turns | None, operators: Operators) -> None:
        """`turns` is None if usage is not stored."""
        self._turns = turns
        self._operators = operators

    async def read(
        self, since: float | None, until: float | None, by: Sequence[str], peer: str
    ) -> Sequence[UsageRow]:
        """Return the usage of the hours that begin in [since, until), summed by the names in `by`.

        `since` and `until` are Unix times. By default, `since` is a day ago, and there is no upper
        limit. Raises the errors of `read_usage`.
        """
        self._operators.check(peer, "shows usage")
        if self._turns is None:
            raise UnimplementedError("this service does not store usage (--turn-store)")
        if since is None:
            since = time.time() - _DAY_S
        for name, at in (("since", since), ("until", until)):
            if at is not None and not 0 <= at < 2**40:
                raise InvalidArgumentError(name, f"is {at}; it must be a Unix time in seconds")
        return await read_usage(self._turns.store.database, since, until, by)
