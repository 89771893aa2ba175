"""Stores turns (API calls with their output) in a PostgreSQL database that several routers share.

`quire[postgres]` installs the driver.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from router.stored_turns.database import Cursor
from router.stored_turns.turn import StoreError

T = TypeVar("T")

_CONNECT_S: Final = 5
_STATEMENT_MS: Final = 10_000
_STATEMENT_MS_PER_MIB: Final = 1000
"""Additional timeout per MiB that a statement writes; one MiB took 250 ms on two busy cores."""


class PostgresConnection:
    """One connection to a PostgreSQL server."""

    skips_locked = " FOR UPDATE SKIP LOCKED"

    def __init__(self, url: str) -> None:
        """Connect; raises StoreError if that fails."""
        try:
            import psycopg  # noqa: PLC0415 - an extra of the package
        except ImportError as error:
            raise StoreError(
                "turns cannot be stored in PostgreSQL: psycopg is not installed (quire[postgres])"
            ) from error
        self._error = psycopg.Error
        try:
            self._connection = psycopg.connect(
                url,
                connect_timeout=_CONNECT_S,
                options=f"-c statement_timeout={_STATEMENT_MS}",
                application_name="quire-router",
                # Detect a server that no longer answers.
                keepalives_idle=2,
                keepalives_interval=1,
                keepalives_count=3,
                tcp_user_timeout=5000,
            )
        except psycopg.Error as error:  # the error's text names host and user, but not the password
            raise StoreError(f"the store of turns cannot be reached: {error}") from None

    def transaction(self, work: Callable[[Cursor], T]) -> T:
        """Run `work` in one transaction."""
        try:
            with self._connection.transaction(), self._connection.cursor() as cursor:
                return work(_Statements(cursor))
        except self._error as error:
            raise StoreError(f"turns cannot be stored now: {error}") from error

    def now(self, cursor: Cursor) -> float:
        """Return the server's time."""
        cursor.execute("SELECT extract(epoch FROM clock_timestamp())::double precision")
        (now,) = cursor.fetchone()
        return float(now)

    def close(self) -> None:
        self._connection.close()


class _Statements:
    """A cursor that takes `?` for parameters, like SQLite's cursor."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    @property
    def rowcount(self) -> int:
        count: int = self._cursor.rowcount
        return count

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> None:
        # PostgreSQL's texts cannot contain NUL, and an error would cost the connection.
        taken = [p.replace("\0", "\ufffd") if isinstance(p, str) else p for p in parameters]
        num_mib = sum(len(p) for p in taken if isinstance(p, (bytes, bytearray))) // 2**20
        if num_mib:
            limit_ms = _STATEMENT_MS + num_mib * _STATEMENT_MS_PER_MIB
            self._cursor.execute(f"SET LOCAL statement_timeout = {limit_ms}")
        self._cursor.execute(statement.replace("?", "%s"), taken)

    def fetchone(self) -> Any:
        return self._cursor.fetchone()

    def fetchall(self) -> list[Any]:
        rows: list[Any] = self._cursor.fetchall()
        return rows
