"""The table of usage: sums by hour, key, tenant, model and adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Final

from contract.errors import InvalidArgumentError
from router.live.usage import HOUR_S, UsageRows, Used, hour_of
from router.stored_turns.database import Cursor, Database, DatabaseConnection

_DAY_S: Final = 24 * HOUR_S
GROUPS: Final[Mapping[str, str]] = {
    "hour": "hour",
    "day": f"hour / {_DAY_S} * {_DAY_S}",
    "tenant": "tenant",
    "key": "key_name",
    "model": "model",
    "adapter": "adapter",
}
"""The groupings of usage, each with its SQL expression. Days are in UTC."""
MAX_ROWS: Final = 10_000

_SUMS: Final = tuple(field.name for field in fields(Used))
_WRITER_S: Final = 86400
_NEVER: Final = 2.0**62


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The usage of one group, such as one tenant, or one tenant in one hour."""

    group: Mapping[str, str | int]
    """The value of each grouping. The value of an hour or a day is the Unix time of its start."""
    used: Used


def add_usage(cursor: Cursor, rows: UsageRows) -> None:
    """Add usage to the sums."""
    added = ", ".join(f"{name} = usage.{name} + excluded.{name}" for name in _SUMS)
    for (hour, key), used in rows.items():
        cursor.execute(
            f"INSERT INTO usage (hour, tenant, key_name, model, adapter, {', '.join(_SUMS)})"  # noqa: S608 - constants
            f" VALUES ({', '.join('?' * (5 + len(_SUMS)))})"
            f" ON CONFLICT (hour, tenant, key_name, model, adapter) DO UPDATE SET {added}",
            (hour, key.tenant, key.key, key.model, key.adapter, *astuple(used)),
        )


def add_once(cursor: Cursor, now: float, writer: str, number: int, rows: UsageRows) -> None:
    """Add a numbered part of a router's usage, unless that part was added before.

    A router sends a part again if the connection broke during the commit.
    """
    cursor.execute(
        "INSERT INTO usage_writers VALUES (?, ?, ?) ON CONFLICT (writer) DO UPDATE"
        " SET number = excluded.number, at = excluded.at"
        " WHERE usage_writers.number < excluded.number",
        (writer, number, now),
    )
    if cursor.rowcount > 0:
        add_usage(cursor, rows)


def sweep_usage(cursor: Cursor, now: float, retention_s: float) -> None:
    """Delete usage older than `retention_s`.

    Also deletes the numbers of routers that have added no usage for a day. Such a number is that of
    the last part that the router added (`add_once`).
    """
    cursor.execute("DELETE FROM usage WHERE hour < ?", (hour_of(now - retention_s),))
    cursor.execute("DELETE FROM usage_writers WHERE at < ?", (now - _WRITER_S,))


async def read_usage(
    database: Database, since: float, until: float | None, by: Sequence[str]
) -> Sequence[UsageRow]:
    """Return the usage of the hours that begin in [since, until), summed by the groupings `by`.

    `since` is rounded down to the hour.

    Raises:
        InvalidArgumentError: `by` has an unknown name, or a name twice, or there are more rows than
            `MAX_ROWS`.
        StoreError: The database cannot be read.
    """
    for name in by:
        if name not in GROUPS:
            raise InvalidArgumentError(
                "by", f"has {name[:64]!r}; it must have some of {', '.join(GROUPS)}"
            )
    if len(set(by)) < len(by):
        raise InvalidArgumentError("by", "has a name twice")
    columns = ", ".join(GROUPS[name] for name in by)
    sums = ", ".join(f"CAST(coalesce(sum({name}), 0) AS BIGINT)" for name in _SUMS)
    grouped = f" GROUP BY {columns} ORDER BY {columns}" if by else ""

    def work(cursor: Cursor, _: DatabaseConnection) -> list[UsageRow]:
        cursor.execute(
            f"SELECT {columns and columns + ', '}{sums} FROM usage"  # noqa: S608 - constants
            f" WHERE hour >= ? AND hour < ?{grouped} LIMIT {MAX_ROWS + 1}",
            (hour_of(since), _NEVER if until is None else until),
        )
        return [
            UsageRow(dict(zip(by, row, strict=False)), Used(*row[len(by) :]))
            for row in cursor.fetchall()
        ]

    rows = await database.run(work)
    if len(rows) > MAX_ROWS:
        raise InvalidArgumentError(
            "by", f"makes more than {MAX_ROWS} rows; group by less, or ask for a shorter time"
        )
    return rows
