"""Stored counts of each group's ended turns, so that no call has to read all turns of a group."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from typing import Final

from router.live.usage import Used
from router.stored_turns.database import Cursor
from router.stored_turns.turn import TurnEnd, TurnStatus


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Counts of a group's ended turns."""

    completed: int = 0
    failed: int = 0
    result_bytes: int = 0
    """Total bytes of the results."""
    used: Used = field(default_factory=Used)

    def __add__(self, other: "GroupCounts") -> "GroupCounts":
        return GroupCounts(
            self.completed + other.completed,
            self.failed + other.failed,
            self.result_bytes + other.result_bytes,
            self.used + other.used,
        )


_NAMES: Final = (
    *("completed", "failed", "result_bytes"),
    *(each.name for each in fields(Used)),
)
_COLUMNS: Final = ", ".join(_NAMES)
_PLACES: Final = ", ".join("?" * (1 + len(_NAMES)))
_ADDED: Final = ", ".join(f"{name} = turn_groups.{name} + excluded.{name}" for name in _NAMES)


def counts_of(end: TurnEnd) -> GroupCounts:
    """Return the counts of one ended turn."""
    return GroupCounts(
        int(end.status is TurnStatus.COMPLETED),
        int(end.status is TurnStatus.FAILED),
        len(end.result),
        end.used,
    )


def add_counts(cursor: Cursor, group_to_counts: Mapping[str, GroupCounts]) -> None:
    """Add counts to the stored ones, in the order of the groups' ids.

    All routers use this order, so their transactions never deadlock.
    """
    for group, counts in sorted(group_to_counts.items()):
        values = counts.completed, counts.failed, counts.result_bytes, *astuple(counts.used)
        cursor.execute(
            f"INSERT INTO turn_groups (id, {_COLUMNS}) VALUES ({_PLACES})"  # noqa: S608 - constants
            f" ON CONFLICT (id) DO UPDATE SET {_ADDED}",
            (group, *values),
        )


def read_counts(cursor: Cursor, group: str) -> GroupCounts:
    cursor.execute(f"SELECT {_COLUMNS} FROM turn_groups WHERE id = ?", (group,))  # noqa: S608 - constants
    row = cursor.fetchone()
    if row is None:
        return GroupCounts()
    completed, failed, result_bytes, *used = row
    return GroupCounts(completed, failed, result_bytes, Used(*used))
