"""The databases that can store turns: the interface, SQLite, and the migrations of the schema."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import structlog

from router.stored_turns.turn import StoreError

log = structlog.get_logger()

T = TypeVar("T")


class Cursor(Protocol):
    """A cursor of SQLite or PostgreSQL. Statements have `?` for parameters."""

    @property
    def rowcount(self) -> int: ...

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> object: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class DatabaseConnection(Protocol):
    """One connection to a database; its methods run in the thread of a `Database`."""

    skips_locked: str
    """The clause with which a SELECT skips rows that other transactions have locked."""

    def transaction(self, work: Callable[[Cursor], T]) -> T:
        """Run `work` in one transaction, which is durable on return; may raise StoreError."""

    def now(self, cursor: Cursor) -> float:
        """Return the Unix time by a clock that all routers of one store share."""

    def close(self) -> None: ...


class Database:
    """Runs transactions one after another in a thread; connects when needed."""

    def __init__(self, connect: Callable[[], DatabaseConnection]) -> None:
        """`connect` opens the database and raises StoreError if it cannot."""
        self._connect = connect
        self._connection: DatabaseConnection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="turns")

    async def run(self, work: Callable[[Cursor, DatabaseConnection], T]) -> T:
        """Run `work` in a transaction; return its result after the commit.

        Raises:
            StoreError: The database cannot be read or written. Nothing has changed, unless the
                connection was lost during the commit.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def _run(self, work: Callable[[Cursor, DatabaseConnection], T]) -> T:
        if self._connection is None:
            connection = self._connect()
            try:
                migrate(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        connection = self._connection
        try:
            return connection.transaction(lambda cursor: work(cursor, connection))
        except StoreError:
            self._connection = None  # the next call connects again
            connection.close()
            raise

    async def close(self) -> None:
        """Close the connection after all earlier work."""
        connection = self._connection
        if connection is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, connection.close)
        self._thread.shutdown(wait=False)


class SqliteConnection:
    """A connection to a SQLite file on this machine, which several processes may use."""

    skips_locked = ""

    def __init__(self, path: Path) -> None:
        """Open or create the file; raises StoreError if that fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            path.chmod(0o600)  # the file contains prompts and outputs
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                self._connection.execute(f"PRAGMA {pragma}")
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"turns cannot be stored in {path}: {error}") from error

    def transaction(self, work: Callable[[Cursor], T]) -> T:
        """Run `work` in one transaction; other processes wait until the transaction ends."""
        try:
            cursor = self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(cursor)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"turns cannot be stored now: {error}") from error
        return result

    def now(self, _cursor: Cursor) -> float:
        """Return the machine's time."""
        return time.time()

    def close(self) -> None:
        self._connection.close()


_BUSY_S: Final = 5.0
"""How many seconds a transaction waits for another process's transaction to end."""


def migrate(connection: DatabaseConnection) -> None:
    """Upgrade the schema to this router's version; several processes may do so at once.

    Raises:
        StoreError: The schema is newer than this router, or the database cannot be written.
    """

    def work(cursor: Cursor) -> None:
        cursor.execute("CREATE TABLE IF NOT EXISTS turn_schema (version INTEGER NOT NULL)")
        cursor.execute("SELECT max(version) FROM turn_schema")
        (version,) = cursor.fetchone()
        version = version or 0
        if version > len(MIGRATIONS):
            raise StoreError(
                f"the store of turns has version {version} of its schema; this router knows"
                f" {len(MIGRATIONS)}"
            )
        for number, statements in enumerate(MIGRATIONS[version:], version + 1):
            for statement in statements:
                cursor.execute(statement)
            cursor.execute("INSERT INTO turn_schema VALUES (?)", (number,))
            log.info("turn store migrated", version=number)

    connection.transaction(work)


MIGRATIONS: Final[Sequence[Sequence[str]]] = (
    (
        """CREATE TABLE turns (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            kind TEXT NOT NULL,
            body BYTEA NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            model TEXT NOT NULL,
            previous_id TEXT,
            group_id TEXT NOT NULL,
            position INTEGER NOT NULL,
            priority INTEGER NOT NULL,
            idempotency_key TEXT,
            fingerprint BYTEA NOT NULL,
            status TEXT NOT NULL,
            record BYTEA,
            result BYTEA,
            ended_at DOUBLE PRECISION,
            owner TEXT NOT NULL,
            lease_until DOUBLE PRECISION NOT NULL,
            UNIQUE (tenant, idempotency_key))""",
        # These indexes are for the frequent queries: turns without an owner, and old turns.
        "CREATE INDEX turns_live ON turns (status, lease_until) WHERE ended_at IS NULL",
        "CREATE INDEX turns_ended ON turns (ended_at) WHERE ended_at IS NOT NULL",
        "CREATE INDEX turns_group ON turns (group_id, position) WHERE group_id <> ''",
        """CREATE TABLE turn_events (
            turn_id TEXT NOT NULL REFERENCES turns (id) ON DELETE CASCADE,
            number INTEGER NOT NULL,
            event BYTEA NOT NULL,
            PRIMARY KEY (turn_id, number))""",
    ),
    (
        """CREATE TABLE files (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            purpose TEXT NOT NULL,
            name TEXT NOT NULL,
            num_bytes INTEGER NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            content BYTEA NOT NULL)""",
        """CREATE TABLE batches (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            is_live BOOLEAN NOT NULL,
            shown BYTEA NOT NULL)""",
        "CREATE INDEX files_tenant ON files (tenant, created_at)",
        "CREATE INDEX batches_tenant ON batches (tenant, created_at)",
    ),
    (
        "ALTER TABLE turns ADD COLUMN key_name TEXT NOT NULL DEFAULT ''",
        """CREATE TABLE usage (
            hour BIGINT NOT NULL,
            tenant TEXT NOT NULL,
            key_name TEXT NOT NULL,
            model TEXT NOT NULL,
            adapter TEXT NOT NULL,
            requests BIGINT NOT NULL,
            prompt_tokens BIGINT NOT NULL,
            cached_tokens BIGINT NOT NULL,
            generated_tokens BIGINT NOT NULL,
            reasoning_tokens BIGINT NOT NULL,
            PRIMARY KEY (hour, tenant, key_name, model, adapter))""",
        # This table has the number of each router's last part of usage, so that no part is added
        # twice.
        """CREATE TABLE usage_writers (
            writer TEXT PRIMARY KEY,
            number BIGINT NOT NULL,
            at DOUBLE PRECISION NOT NULL)""",
    ),
    ("ALTER TABLE batches ADD COLUMN key_name TEXT NOT NULL DEFAULT ''",),
    (
        # Each query of live turns reads an index in order, and only as much of it as it needs. A
        # row may be large, so the conditions of these queries are columns of the indexes, too.
        "DROP INDEX turns_live",
        "CREATE INDEX turns_owned ON turns (owner) WHERE ended_at IS NULL AND owner <> ''",
        """CREATE INDEX turns_single ON turns
            (priority DESC, created_at, position, lease_until, model)
            WHERE ended_at IS NULL AND group_id = ''""",
        """CREATE INDEX turns_grouped ON turns
            (tenant, model, priority DESC, created_at, position, lease_until)
            WHERE ended_at IS NULL AND group_id <> ''""",
        """CREATE INDEX turns_group_live ON turns (group_id, position)
            WHERE ended_at IS NULL AND group_id <> ''""",
        """CREATE TABLE turn_groups (
            id TEXT PRIMARY KEY,
            completed BIGINT NOT NULL,
            failed BIGINT NOT NULL,
            result_bytes BIGINT NOT NULL,
            requests BIGINT NOT NULL,
            prompt_tokens BIGINT NOT NULL,
            cached_tokens BIGINT NOT NULL,
            generated_tokens BIGINT NOT NULL,
            reasoning_tokens BIGINT NOT NULL)""",
        """INSERT INTO turn_groups SELECT group_id,
            sum(CASE status WHEN 'completed' THEN 1 ELSE 0 END),
            sum(CASE status WHEN 'failed' THEN 1 ELSE 0 END),
            coalesce(sum(length(result)), 0), 0, 0, 0, 0, 0
            FROM turns WHERE group_id <> '' GROUP BY group_id""",
    ),
    (
        "ALTER TABLE files ADD COLUMN expires_at DOUBLE PRECISION",
        "ALTER TABLE files ADD COLUMN idempotency_key TEXT",
        "ALTER TABLE files ADD COLUMN fingerprint BYTEA",
        "ALTER TABLE batches ADD COLUMN output_expires_s DOUBLE PRECISION",
        "ALTER TABLE batches ADD COLUMN idempotency_key TEXT",
        "ALTER TABLE batches ADD COLUMN fingerprint BYTEA",
        "CREATE UNIQUE INDEX files_key ON files (tenant, idempotency_key)",
        "CREATE UNIQUE INDEX batches_key ON batches (tenant, idempotency_key)",
        "CREATE INDEX files_expiring ON files (expires_at) WHERE expires_at IS NOT NULL",
    ),
)
"""Entry i has the statements that upgrade the schema from version i to version i + 1.

Version 0 is an empty database. Released statements never change.

SQLite and PostgreSQL both accept these statements, although the types are those of PostgreSQL:
SQLite accepts any type name and stores bytes unchanged.
"""


def open_database(place: str) -> Database:
    """Return the database that `place`, the value of `--turn-store`, names; do not connect yet."""
    if place.startswith(("postgresql://", "postgres://")):
        from router.stored_turns.postgres import PostgresConnection  # noqa: PLC0415 - an extra

        return Database(lambda: PostgresConnection(place))
    return Database(lambda: SqliteConnection(Path(place)))
