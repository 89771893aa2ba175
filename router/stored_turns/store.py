"""Stores turns (responses and lines of batches) and their events.

A turn can belong to a *group*: the lines of a batch, for example, are one group.

Every call raises `StoreError` if the database fails.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, Final

from contract.codec.outputs import event_from_proto, event_to_proto
from contract.errors import InvalidArgumentError
from contract.outputs import Event
from quire.v1 import inference_pb2
from router.live.usage import UsageRows
from router.stored_turns.database import Cursor, Database, DatabaseConnection
from router.stored_turns.fair_claims import ALL_MODELS, Models, Shares, find_grouped, find_single
from router.stored_turns.groups import GroupCounts, add_counts, counts_of, read_counts
from router.stored_turns.turn import Turn, TurnEnd, TurnStatus
from router.stored_turns.usage import add_once, add_usage, sweep_usage

SWEEP_LIMIT: Final = 1000
"""Maximum number of turns that one call of `TurnStore.sweep` deletes."""
LEASE_S: Final = 5.0
"""How long a router owns a turn after its last write; later any router may take the turn over."""

_FIELDS: Final = tuple(field.name for field in fields(Turn))
_COLUMNS: Final = ", ".join("group_id" if name == "group" else name for name in _FIELDS)
_PLACES: Final = ", ".join("?" * (len(_FIELDS) + 2))
_OF_TURN: Final = ", ".join(
    "NULL" if name == "record" else f"turns.{column}"
    for name, column in zip(_FIELDS, _COLUMNS.split(", "), strict=True)
)
"""A turn's columns except `record`, which contains the whole prompt."""
MAX_CHAIN: Final = 1024
"""Maximum number of turns of one conversation."""


@dataclass(slots=True)
class TurnProgress:
    """The new part of a running turn."""

    turn_id: str
    first_number: int
    """The number of the event `events[0]`: how many events of the turn are already stored."""
    events: Sequence[Event] = ()
    record: bytes | None = None
    """The turn's new `Turn.record`. None: the turn was not submitted yet, or its record is already
    stored."""
    end: TurnEnd | None = None


@dataclass(slots=True)
class TurnChanges:
    """The changes that one transaction writes."""

    accepted: list[Turn] = field(default_factory=list)
    """New turns, which this router computes."""
    progress: list[TurnProgress] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    """Turns to leave to other routers."""
    usage: tuple[int, UsageRows] = (0, {})
    """A number, then new usage of requests that are not turns. If the same usage is written again,
    it has the same number, and `add_once` does not add it a second time."""


OF_GROUP: Final = "group_id = ? AND group_id <> ''"
"""The condition for a group's turns. It repeats the condition of the index `turns_group`, because
otherwise SQLite would not use this index."""
NO_TURNS: Final[Mapping[str, int]] = {}


class TurnStore:
    """The turns of all tenants. At any time, at most one router owns a turn."""

    def __init__(self, database: Database, owner: str) -> None:
        """`owner` identifies this router; no other process ever has the same `owner`."""
        self.database = database
        self._owner = owner
        self._last_tenant = ""
        """See `Shares.last_tenant`."""

    # --- for the owner --------------------------------------------------------------------------

    async def write(self, changes: TurnChanges) -> set[str]:
        """Write changes atomically, and renew the leases of this router's turns.

        Returns the ids of all turns of this router. Turns of `changes.accepted` and
        `changes.progress` whose ids are missing were not written: another turn has the same
        idempotency key, another router owns them, or they were deleted.
        """
        return await self.database.run(lambda cursor, db: self._write(cursor, db, changes))

    def _write(self, cursor: Cursor, db: DatabaseConnection, changes: TurnChanges) -> set[str]:
        now = db.now(cursor)
        lease_until = now + LEASE_S
        cursor.execute(
            "UPDATE turns SET lease_until = ? WHERE owner = ? AND owner <> '' AND ended_at IS NULL"
            " RETURNING id",
            (lease_until, self._owner),
        )
        own = {turn_id for (turn_id,) in cursor.fetchall()}
        own |= {
            turn.id
            for turn in changes.accepted
            if insert_turn(cursor, turn, self._owner, lease_until)
        }
        group_to_counts: defaultdict[str, GroupCounts] = defaultdict(GroupCounts)
        for progress in changes.progress:
            if progress.turn_id not in own:
                continue
            _write_progress(cursor, progress)
            if (end := progress.end) is not None and (group := _write_end(cursor, progress, end)):
                group_to_counts[group] += counts_of(end)
        add_counts(cursor, group_to_counts)
        for turn_id in changes.released:
            cursor.execute(
                "UPDATE turns SET owner = '', lease_until = 0 WHERE id = ? AND owner = ?",
                (turn_id, self._owner),
            )
        number, used = changes.usage
        if used:
            add_once(cursor, now, self._owner, number, used)
        return own

    async def claim(
        self,
        limit: int,
        group_limit: int = 0,
        models: Models = ALL_MODELS,
        num_running: Mapping[str, int] = NO_TURNS,
    ) -> Sequence[Turn]:
        """Take over turns without an owner: by priority, then from oldest to newest.

        Takes over at most `limit` turns that are in no group, and at most `group_limit` turns that
        are in a group. Among turns of equal priority that are in a group, the next one is always of
        the tenant with the fewest running turns: `num_running` has each tenant's number before this
        call, and each turn that this call takes over from a group adds 1 to its tenant's number.
        """

        def work(cursor: Cursor, db: DatabaseConnection) -> list[Turn]:
            now = db.now(cursor)
            ids: list[str] = []
            if limit:
                ids += [each.id for each in find_single(cursor, db, now, limit, models)]
            if group_limit:
                shares = Shares(num_running, self._last_tenant)
                turns_of_groups, self._last_tenant = find_grouped(
                    cursor, db, now, group_limit, models, shares
                )
                ids += [each.id for each in turns_of_groups]
            turns = []
            for turn_id in ids:
                cursor.execute(
                    "UPDATE turns SET owner = ?, lease_until = ? WHERE id = ?"  # noqa: S608 - constants
                    f" RETURNING {_COLUMNS}",
                    (self._owner, now + LEASE_S, turn_id),
                )
                turns.append(_turn(cursor.fetchone()))
            return turns

        return await self.database.run(work)

    async def sweep(
        self, retention_s: float, usage_retention_s: float, limit: int = SWEEP_LIMIT
    ) -> int:
        """Delete old turns that have no group, and old usage; return how many turns were deleted.

        Turns are old if they ended more than `retention_s` ago; at most `limit` are deleted. Usage
        is old after `usage_retention_s`.
        """

        def work(cursor: Cursor, db: DatabaseConnection) -> int:
            sweep_usage(cursor, db.now(cursor), usage_retention_s)
            cursor.execute(
                "DELETE FROM turns WHERE id IN"
                " (SELECT id FROM turns WHERE ended_at < ? AND group_id = '' LIMIT ?)",
                (db.now(cursor) - retention_s, limit),
            )
            return cursor.rowcount

        return await self.database.run(work)

    # --- for a tenant ---------------------------------------------------------------------------

    async def find(self, tenant: str, turn_id: str) -> Turn | None:
        """Return a turn of this tenant."""
        return await self._one("id = ?", tenant, turn_id)

    async def find_by_key(self, tenant: str, idempotency_key: str) -> Turn | None:
        """Return the tenant's turn with this idempotency key."""
        return await self._one("idempotency_key = ?", tenant, idempotency_key)

    async def _one(self, condition: str, tenant: str, value: str) -> Turn | None:
        def work(cursor: Cursor, _: DatabaseConnection) -> Turn | None:
            cursor.execute(
                f"SELECT {_COLUMNS} FROM turns WHERE tenant = ? AND {condition}",  # noqa: S608 - constants
                (tenant, value),
            )
            row = cursor.fetchone()
            return None if row is None else _turn(row)

        return await self.database.run(work)

    async def conversation(self, tenant: str, turn_id: str, max_bytes: int) -> Sequence[Turn]:
        """Return a turn and the turns that it continues, oldest first, without their records.

        Returns an empty list if one of these turns is missing. Raises InvalidArgumentError if there
        are more than `MAX_CHAIN` turns, or more than `max_bytes` bytes of bodies and results.
        """
        chain = (
            "WITH RECURSIVE chain (id, previous_id, depth) AS ("
            " SELECT id, previous_id, 1 FROM turns WHERE tenant = ? AND id = ?"
            " UNION ALL SELECT turns.id, turns.previous_id, depth + 1"
            " FROM turns JOIN chain ON turns.id = chain.previous_id"
            " WHERE turns.tenant = ? AND depth <= ?)"
        )
        of_chain = "FROM chain JOIN turns ON turns.id = chain.id"
        asked = (tenant, turn_id, tenant, MAX_CHAIN)

        def work(cursor: Cursor, _: DatabaseConnection) -> list[Turn]:
            cursor.execute(
                f"{chain} SELECT count(*), sum(length(body) + coalesce(length(result), 0))"
                f" {of_chain}",
                asked,
            )
            num, num_bytes = cursor.fetchone()
            for what, value, most in (
                ("turns", num, MAX_CHAIN),
                ("bytes", num_bytes or 0, max_bytes),
            ):
                if value > most:
                    raise InvalidArgumentError(
                        "previous_response_id",
                        f"continues a conversation of {value} {what} or more; it must have at most"
                        f" {most}",
                    )
            cursor.execute(f"{chain} SELECT {_OF_TURN} {of_chain} ORDER BY depth DESC", asked)
            turns = [_turn(row) for row in cursor.fetchall()]
            return turns if turns and turns[0].previous_id is None else []

        return await self.database.run(work)

    async def events(self, turn_id: str, first_number: int = 0) -> Sequence[Event]:
        """Return a turn's events from number `first_number` on."""

        def work(cursor: Cursor, _: DatabaseConnection) -> list[Event]:
            cursor.execute(
                "SELECT event FROM turn_events WHERE turn_id = ? AND number >= ? ORDER BY number",
                (turn_id, first_number),
            )
            return [_event(event) for (event,) in cursor.fetchall()]

        return await self.database.run(work)

    async def end(self, tenant: str, turn_id: str, end: TurnEnd, events: Sequence[Event]) -> bool:
        """End a live turn of any owner, with its last events; return False if it was not live."""

        def work(cursor: Cursor, _: DatabaseConnection) -> bool:
            cursor.execute(
                "UPDATE turns SET status = ?, result = ?, ended_at = ?, owner = ''"
                " WHERE tenant = ? AND id = ? AND ended_at IS NULL RETURNING group_id",
                (end.status.value, end.result, end.at, tenant, turn_id),
            )
            if (row := cursor.fetchone()) is None:
                return False
            if group := row[0]:
                add_counts(cursor, {group: counts_of(end)})
            cursor.execute("SELECT count(*) FROM turn_events WHERE turn_id = ?", (turn_id,))
            (first,) = cursor.fetchone()
            _write_events(cursor, turn_id, first, events)
            add_usage(cursor, end.usage)
            return True

        return await self.database.run(work)

    async def delete(self, tenant: str, turn_id: str) -> bool:
        """Delete a turn; return whether it existed.

        The router that owns the turn notices the deletion within a second or two.
        """

        def work(cursor: Cursor, _: DatabaseConnection) -> bool:
            cursor.execute("DELETE FROM turns WHERE tenant = ? AND id = ?", (tenant, turn_id))
            return cursor.rowcount > 0

        return await self.database.run(work)

    # --- for a group ----------------------------------------------------------------------------

    async def count_group(self, group: str) -> GroupCounts:
        """Return a group's counts, which are stored because counting turns is slow."""
        return await self.database.run(lambda cursor, _: read_counts(cursor, group))

    async def is_group_live(self, group: str) -> bool:
        """Return whether at least one turn of a group has not ended."""

        def work(cursor: Cursor, _: DatabaseConnection) -> bool:
            cursor.execute(
                f"SELECT 1 FROM turns WHERE {OF_GROUP} AND ended_at IS NULL LIMIT 1",  # noqa: S608 - constants
                (group,),
            )
            return cursor.fetchone() is not None

        return await self.database.run(work)

    async def list_group(
        self,
        tenant: str,
        group: str,
        *,
        first_position: int = 0,
        limit: int = 1000,
        max_bytes: int = 16 * 2**20,
    ) -> Sequence[Turn]:
        """Return a group's turns in order, from `first_position` on.

        Returns at most `limit` turns, with at most `max_bytes` in total, but at least one turn.
        """
        of_group = f"FROM turns WHERE tenant = ? AND {OF_GROUP} AND position >= ?"
        in_order = "ORDER BY position LIMIT ?"
        asked = tenant, group, first_position

        def work(cursor: Cursor, _: DatabaseConnection) -> list[Turn]:
            cursor.execute(
                "SELECT length(body) + coalesce(length(record), 0) + coalesce(length(result), 0)"
                f" {of_group} {in_order}",
                (*asked, limit),
            )
            totals = accumulate(num_bytes for (num_bytes,) in cursor.fetchall())
            num = max(1, sum(1 for total in totals if total <= max_bytes))
            cursor.execute(f"SELECT {_COLUMNS} {of_group} {in_order}", (*asked, num))
            return [_turn(row) for row in cursor.fetchall()]

        return await self.database.run(work)


def insert_turn(cursor: Cursor, turn: Turn, owner: str, lease_until: float) -> bool:
    """Insert a turn; return False if a stored turn has its id or its idempotency key."""
    cursor.execute(
        f"INSERT INTO turns ({_COLUMNS}, owner, lease_until) VALUES ({_PLACES})"  # noqa: S608 - constants
        " ON CONFLICT DO NOTHING",
        (*_values(turn), owner, lease_until),
    )
    return cursor.rowcount > 0


def _write_progress(cursor: Cursor, progress: TurnProgress) -> None:
    _write_events(cursor, progress.turn_id, progress.first_number, progress.events)
    if progress.record is not None:
        cursor.execute(
            "UPDATE turns SET status = 'running', record = ? WHERE id = ?",
            (progress.record, progress.turn_id),
        )


def _write_end(cursor: Cursor, progress: TurnProgress, end: TurnEnd) -> str:
    """Write the end of a turn; return the turn's group."""
    cursor.execute(
        "UPDATE turns SET status = ?, result = ?, ended_at = ?, owner = '' WHERE id = ?"
        " RETURNING group_id",
        (end.status.value, end.result, end.at, progress.turn_id),
    )
    (group,) = cursor.fetchone()
    add_usage(cursor, end.usage)
    return str(group)


def _write_events(cursor: Cursor, turn_id: str, first: int, events: Sequence[Event]) -> None:
    for number, event in enumerate(events, first):
        cursor.execute(
            "INSERT INTO turn_events VALUES (?, ?, ?)"
            # A write whose confirmation was lost is repeated, with more tokens.
            " ON CONFLICT (turn_id, number) DO UPDATE SET event = excluded.event",
            (turn_id, number, event_to_proto("", event).SerializeToString()),
        )


def _event(event: bytes) -> Event:
    return event_from_proto(inference_pb2.GenerateResponse.FromString(bytes(event)))


def _values(turn: Turn) -> Iterator[Any]:
    for name in _FIELDS:
        value = getattr(turn, name)
        yield value.value if isinstance(value, TurnStatus) else value


def _turn(row: Sequence[Any]) -> Turn:
    values = dict(zip(_FIELDS, row, strict=True))
    for name in ("body", "fingerprint", "record", "result"):
        if values[name] is not None:
            values[name] = bytes(values[name])
    return Turn(**values | {"status": TurnStatus(values["status"])})
