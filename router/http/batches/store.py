"""Stores files and batches in the database of turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, BinaryIO, Final

from pydantic_core import from_json

from router.http.answers.objects import Json
from router.http.idempotency import CallKey
from router.http.listing import PageQuery
from router.http.strict_json import json_bytes
from router.stored_turns.database import Cursor, Database, DatabaseConnection
from router.stored_turns.store import OF_GROUP, insert_turn
from router.stored_turns.turn import Turn

VALIDATING: Final = "validating"
"""A batch's status while its lines are made into turns."""
SLICE: Final = 500
"""Limit on the turns that one transaction writes or deletes."""

_FILE: Final = "id, tenant, purpose, name, num_bytes, created_at, expires_at"
_BATCH: Final = "id, tenant, created_at, is_live, shown, key_name, output_expires_s"
_IS_KEPT: Final = "(expires_at IS NULL OR expires_at > ?)"


@dataclass(frozen=True, slots=True)
class File:
    """A stored file's fields, without its contents."""

    id: str
    tenant: str
    purpose: str
    name: str
    num_bytes: int
    created_at: float
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A stored batch."""

    id: str
    tenant: str
    created_at: float
    is_live: bool
    shown: Json
    """The batch as its client sees it, except that `request_counts` and `usage` are out of date
    while the batch is live. The client gets values that were just computed from the turns."""
    key_name: str = ""
    """The name of the API key that created the batch."""
    output_expires_s: float | None = None
    """How long the result files are kept."""

    @property
    def file_id(self) -> str:
        """The id of the input file."""
        return str(self.shown["input_file_id"])


class BatchStore:
    """The files and batches of all tenants; any call may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- files ----------------------------------------------------------------------------------

    async def add_file(self, file: File, content: BinaryIO, call: CallKey | None = None) -> str:
        """Store a file; the thread of the database reads `content`, from the beginning.

        Returns:
            The file's id, or the id of the file that `call` stored at an earlier attempt.

        Raises:
            AlreadyExistsError: A different call has the same idempotency key.
        """

        def work(cursor: Cursor, db: DatabaseConnection) -> str:
            content.seek(0)
            if call is not None:
                cursor.execute(
                    "DELETE FROM files WHERE tenant = ? AND idempotency_key = ?"
                    " AND expires_at <= ?",
                    (file.tenant, call.key, db.now(cursor)),
                )
            return _insert_once(cursor, "files", _file_row(file, content.read()), call)

        return await self._database.run(work)

    async def file_bytes(self, tenant: str) -> int:
        """Return the size of all files of a tenant."""

        def work(cursor: Cursor, db: DatabaseConnection) -> int:
            cursor.execute(
                f"SELECT coalesce(sum(num_bytes), 0) FROM files WHERE tenant = ? AND {_IS_KEPT}",  # noqa: S608 - constants
                (tenant, db.now(cursor)),
            )
            return int(cursor.fetchone()[0])

        return await self._database.run(work)

    async def has_file_with_key(self, tenant: str, idempotency_key: str) -> bool:
        def work(cursor: Cursor, db: DatabaseConnection) -> bool:
            cursor.execute(
                f"SELECT 1 FROM files WHERE tenant = ? AND idempotency_key = ? AND {_IS_KEPT}",  # noqa: S608 - constants
                (tenant, idempotency_key, db.now(cursor)),
            )
            return cursor.fetchone() is not None

        return await self._database.run(work)

    async def files(
        self, tenant: str, wanted: PageQuery, purpose: str | None = None
    ) -> Sequence[File]:
        """Return a page of the tenant's files, and one file more if there is a next page.

        Raises:
            InvalidArgumentError: There is no file with the id `after`.
        """

        def work(cursor: Cursor, db: DatabaseConnection) -> list[File]:
            chosen: dict[str, object] = {_IS_KEPT: db.now(cursor)}
            if purpose is not None:
                chosen["purpose = ?"] = purpose
            rows = _page(cursor, "files", _FILE, tenant, wanted, chosen)
            return [File(*row) for row in rows]

        return await self._database.run(work)

    async def file(self, tenant: str, file_id: str) -> File | None:
        def work(cursor: Cursor, db: DatabaseConnection) -> File | None:
            cursor.execute(
                f"SELECT {_FILE} FROM files WHERE tenant = ? AND id = ? AND {_IS_KEPT}",  # noqa: S608 - constants
                (tenant, file_id, db.now(cursor)),
            )
            row = cursor.fetchone()
            return None if row is None else File(*row)

        return await self._database.run(work)

    async def content(self, tenant: str, file_id: str) -> bytes | None:
        def work(cursor: Cursor, db: DatabaseConnection) -> bytes | None:
            cursor.execute(
                f"SELECT content FROM files WHERE tenant = ? AND id = ? AND {_IS_KEPT}",  # noqa: S608 - constants
                (tenant, file_id, db.now(cursor)),
            )
            row = cursor.fetchone()
            return None if row is None else bytes(row[0])

        return await self._database.run(work)

    async def delete_file(self, tenant: str, file_id: str) -> bool:
        def work(cursor: Cursor, _: DatabaseConnection) -> bool:
            cursor.execute("DELETE FROM files WHERE tenant = ? AND id = ?", (tenant, file_id))
            return cursor.rowcount > 0

        return await self._database.run(work)

    # --- batches --------------------------------------------------------------------------------

    async def create(self, batch: Batch, call: CallKey | None = None) -> str:
        """Store a batch; `fill` adds the batch's turns.

        Returns the batch's id, or the id of the batch that `call` created at an earlier attempt.

        Raises:
            AlreadyExistsError: A different call has the same idempotency key.
        """
        row = {
            "id": batch.id,
            "tenant": batch.tenant,
            "created_at": batch.created_at,
            "is_live": batch.is_live,
            "shown": json_bytes(batch.shown),
            "key_name": batch.key_name,
            "output_expires_s": batch.output_expires_s,
        }
        return await self._database.run(
            lambda cursor, _: _insert_once(cursor, "batches", row, call)
        )

    async def created_by(self, tenant: str, call: CallKey) -> str | None:
        """Return the id of the batch that `call` created at an earlier attempt, if any.

        Raises:
            AlreadyExistsError: A different call has the same idempotency key.
        """
        return await self._database.run(
            lambda cursor, _: _with_key(cursor, "batches", tenant, call)
        )

    async def last_position(self, batch: Batch) -> int:
        """Return the number of the last line of the input file that has a turn; 0: no line has."""

        def work(cursor: Cursor, _: DatabaseConnection) -> int:
            cursor.execute(
                f"SELECT max(position) FROM turns WHERE {OF_GROUP}",  # noqa: S608 - constants
                (batch.id,),
            )
            (last,) = cursor.fetchone()
            return last or 0

        return await self._database.run(work)

    async def fill(self, batch: Batch, turns: Sequence[Turn]) -> bool:
        """Store more turns of a batch.

        Returns False, and stores none, if the batch is no longer `VALIDATING`, or if another router
        is changing it at this moment.

        `turns` should have at most `SLICE` turns. While a longer transaction ran, other stored
        calls could not be written, and their clients would wait.
        """

        def work(cursor: Cursor, db: DatabaseConnection) -> bool:
            cursor.execute(  # the lock on the row prevents another router from ending the batch
                "SELECT shown FROM batches WHERE tenant = ? AND id = ? AND is_live = ?"  # noqa: S608 - constants
                + db.skips_locked,
                (batch.tenant, batch.id, True),
            )
            row = cursor.fetchone()
            if row is None or from_json(bytes(row[0]))["status"] != VALIDATING:
                return False
            for turn in turns:
                insert_turn(cursor, turn, "", 0.0)
            return True

        return await self._database.run(work)

    async def batches(self, tenant: str, wanted: PageQuery) -> Sequence[Batch]:
        """Return a page of the tenant's batches, and one batch more if there is a next page.

        Raises:
            InvalidArgumentError: There is no batch with the id `after`.
        """

        def work(cursor: Cursor, _: DatabaseConnection) -> list[Batch]:
            return [*map(_batch, _page(cursor, "batches", _BATCH, tenant, wanted))]

        return await self._database.run(work)

    async def live_batches(self) -> Sequence[Batch]:
        """Return all tenants' batches that have not ended, newest first."""

        def work(cursor: Cursor, _: DatabaseConnection) -> list[Batch]:
            cursor.execute(
                f"SELECT {_BATCH} FROM batches WHERE is_live = ? ORDER BY created_at DESC, id",  # noqa: S608 - constants
                (True,),
            )
            return [*map(_batch, cursor.fetchall())]

        return await self._database.run(work)

    async def batch(self, tenant: str, batch_id: str) -> Batch | None:
        def work(cursor: Cursor, _: DatabaseConnection) -> Batch | None:
            return _find(cursor, tenant, batch_id)

        return await self._database.run(work)

    async def change(self, batch: Batch, change: Callable[[Json], Json]) -> None:
        """Change a batch that has not ended."""

        def work(cursor: Cursor, _: DatabaseConnection) -> None:
            # This locks the row, to serialize concurrent changes.
            cursor.execute("UPDATE batches SET is_live = is_live WHERE id = ?", (batch.id,))
            now = _find(cursor, batch.tenant, batch.id)
            if now is not None and now.is_live:
                cursor.execute(
                    "UPDATE batches SET shown = ? WHERE id = ? AND is_live = ?",
                    (json_bytes(change(now.shown)), batch.id, True),
                )

        await self._database.run(work)

    async def end_queued(self, batch: Batch) -> None:
        """Cancel each turn of a batch, unless a router has started the turn."""

        def work(cursor: Cursor, db: DatabaseConnection) -> int:
            now = db.now(cursor)
            cursor.execute(
                "UPDATE turns SET status = 'cancelled', ended_at = ? WHERE id IN (SELECT id"  # noqa: S608 - constants
                f" FROM turns WHERE {OF_GROUP} AND ended_at IS NULL"
                f" AND record IS NULL AND lease_until < ? LIMIT ?{db.skips_locked})",
                (now, batch.id, now, SLICE),
            )
            return cursor.rowcount

        while await self._database.run(work) == SLICE:
            pass

    async def end(
        self, batch: Batch, shown: Json, files: Sequence[tuple[File, bytes | bytearray]]
    ) -> None:
        """End a batch and store its result files, unless another router has ended it."""

        def work(cursor: Cursor, _: DatabaseConnection) -> None:
            cursor.execute(
                "UPDATE batches SET shown = ?, is_live = ? WHERE id = ? AND is_live = ?",
                (json_bytes(shown), False, batch.id, True),
            )
            if cursor.rowcount:
                for file, content in files:
                    _insert(cursor, "files", _file_row(file, content))

        await self._database.run(work)

    async def clear(self, batch: Batch) -> None:
        """Delete the turns of a batch that has ended."""
        await self._clear(OF_GROUP, batch.id)
        await self._database.run(
            lambda cursor, _: cursor.execute("DELETE FROM turn_groups WHERE id = ?", (batch.id,))
        )

    async def clear_all(self) -> None:
        """Delete the turns of all batches that have ended."""
        ended = "id NOT IN (SELECT id FROM batches WHERE is_live = ?)"
        await self._clear(f"group_id <> '' AND group_{ended}", True)
        await self._database.run(
            lambda cursor, _: cursor.execute(f"DELETE FROM turn_groups WHERE {ended}", (True,))  # noqa: S608 - constants
        )

    async def _clear(self, condition: str, value: object) -> None:
        def work(cursor: Cursor, db: DatabaseConnection) -> int:
            cursor.execute(
                f"DELETE FROM turns WHERE id IN (SELECT id FROM turns WHERE {condition}"  # noqa: S608 - constants
                f" LIMIT ?{db.skips_locked})",
                (value, SLICE),
            )
            return cursor.rowcount

        while await self._database.run(work) == SLICE:
            pass

    async def sweep(self, retention_s: float) -> None:
        """Delete files and ended batches older than `retention_s`, and files that have expired."""

        def work(cursor: Cursor, db: DatabaseConnection) -> None:
            before = db.now(cursor) - retention_s
            cursor.execute("DELETE FROM files WHERE created_at < ?", (before,))
            cursor.execute("DELETE FROM files WHERE expires_at <= ?", (db.now(cursor),))
            cursor.execute(
                "DELETE FROM batches WHERE created_at < ? AND is_live = ?", (before, False)
            )

        await self._database.run(work)


def _page(
    cursor: Cursor,
    table: str,
    columns: str,
    tenant: str,
    wanted: PageQuery,
    chosen: Mapping[str, object] = MappingProxyType({}),
) -> list[Any]:
    """Return the rows of a page of `table`, and one row more if there is a next page.

    Raises InvalidArgumentError if no row has the id `wanted.after`.

    `chosen` maps further SQL conditions, such as "purpose = ?", to their values.
    """
    conditions = " AND ".join(["tenant = ?", *chosen])
    values = [tenant, *chosen.values()]
    if wanted.after is not None:
        cursor.execute(
            f"SELECT created_at, id FROM {table} WHERE tenant = ? AND id = ?",  # noqa: S608 - constants
            (tenant, wanted.after),
        )
        if (last := cursor.fetchone()) is None:
            raise wanted.missing()
        conditions += f" AND (created_at, id) {'>' if wanted.is_ascending else '<'} (?, ?)"
        values += last
    order = "ASC" if wanted.is_ascending else "DESC"
    cursor.execute(
        f"SELECT {columns} FROM {table} WHERE {conditions}"  # noqa: S608 - constants
        f" ORDER BY created_at {order}, id {order} LIMIT ?",
        (*values, wanted.limit + 1),
    )
    return cursor.fetchall()


def _file_row(file: File, content: bytes | bytearray) -> Mapping[str, Any]:
    return {**asdict(file), "content": content}


def _insert(cursor: Cursor, table: str, row: Mapping[str, Any]) -> bool:
    """Insert a row; return False if the tenant already has a row with its idempotency key."""
    cursor.execute(
        f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"  # noqa: S608 - constants
        " ON CONFLICT DO NOTHING",
        (*row.values(),),
    )
    return cursor.rowcount > 0


def _insert_once(cursor: Cursor, table: str, row: Mapping[str, Any], call: CallKey | None) -> str:
    """Insert a row, and return its id.

    If `call` inserted a row at an earlier attempt, only return the id of the earlier row.
    """
    if call is not None:
        row = {**row, "idempotency_key": call.key, "fingerprint": call.fingerprint}
    row_id = str(row["id"])
    if _insert(cursor, table, row):
        return row_id
    assert call is not None, "ids are unique"
    return _with_key(cursor, table, row["tenant"], call) or row_id


def _with_key(cursor: Cursor, table: str, tenant: str, call: CallKey) -> str | None:
    cursor.execute(
        f"SELECT id, fingerprint FROM {table} WHERE tenant = ? AND idempotency_key = ?",  # noqa: S608 - constants
        (tenant, call.key),
    )
    if (row := cursor.fetchone()) is None:
        return None
    row_id, fingerprint = row
    call.check(bytes(fingerprint))
    return str(row_id)


def _find(cursor: Cursor, tenant: str, batch_id: str) -> Batch | None:
    cursor.execute(
        f"SELECT {_BATCH} FROM batches WHERE tenant = ? AND id = ?",  # noqa: S608 - constants
        (tenant, batch_id),
    )
    row = cursor.fetchone()
    return None if row is None else _batch(row)


def _batch(row: Sequence[Any]) -> Batch:
    batch_id, tenant, created_at, is_live, shown, *rest = row
    return Batch(batch_id, tenant, created_at, bool(is_live), from_json(bytes(shown)), *rest)
