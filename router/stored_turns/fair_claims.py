"""Chooses which turns a router claims: turns without an owner, which the router then takes over.

A *turn* is a stored call with its output (`turn.py`). It can belong to a *group*, such as a batch.
The choice is fair to all tenants. `TurnStore.claim` makes the router the owner of the chosen turns.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Final, NamedTuple

from router.stored_turns.database import Cursor, DatabaseConnection

MAX_QUEUES: Final = 1000
"""Limit on the queues that one claim looks at. A queue has the turns of one tenant and model."""
MAX_MODELS: Final = 100
"""Limit on how many of the `MAX_QUEUES` queues belong to one tenant. A tenant could have very many
queues, because each unknown model that its turns name makes a queue."""

_ORDER: Final = "ORDER BY priority DESC, created_at, position"
# Each of these is the condition of a partial index, which has the turns in the order of the query.
_LIVE: Final = "ended_at IS NULL AND group_id = ''"
_LIVE_GROUPED: Final = "ended_at IS NULL AND group_id <> ''"


@dataclass(frozen=True, slots=True)
class Models:
    """A set of models: `names` or, if `are_left_out`, all models except `names`."""

    names: tuple[str, ...]
    are_left_out: bool = False

    def __contains__(self, model: str) -> bool:
        return (model in self.names) is not self.are_left_out


ALL_MODELS: Final = Models((), are_left_out=True)


class Waiting(NamedTuple):
    """A turn without an owner. Turns are taken over in the order of these tuples."""

    negative_priority: int
    created_at: float
    position: int
    id: str


@dataclass(frozen=True, slots=True)
class Shares:
    """What decides which tenants' turns a claim takes first."""

    num_running: Mapping[str, int]
    """How many turns of each tenant run; turns without a group do not count."""
    last_tenant: str = ""
    """The tenant of the turn that was claimed last; if the last claim found no turns, the tenant of
    the last queue that the claim looked at."""


def find_single(
    cursor: Cursor, db: DatabaseConnection, now: float, limit: int, models: Models
) -> list[Waiting]:
    """Return at most `limit` ownerless turns without a group, in the order to claim them."""
    chosen = ""
    if models.names:
        places = ", ".join("?" * len(models.names))
        chosen = f" AND model {'NOT ' if models.are_left_out else ''}IN ({places})"
    cursor.execute(
        f"SELECT -priority, created_at, position, id FROM turns WHERE {_LIVE}"  # noqa: S608 - constants
        f" AND lease_until < ?{chosen} {_ORDER} LIMIT ?{db.skips_locked}",
        (now, *models.names, limit),
    )
    return [Waiting(*row) for row in cursor.fetchall()]


def find_grouped(
    cursor: Cursor, db: DatabaseConnection, now: float, limit: int, models: Models, shares: Shares
) -> tuple[list[Waiting], str]:
    """Return at most `limit` ownerless turns that have a group, and a tenant.

    The caller must pass this tenant to the next claim, as `Shares.last_tenant`.

    An index keeps the turns of each tenant and model in order, as a queue. So a claim reads only
    the first turns of each queue.
    """
    tenant_to_queues: defaultdict[str, list[list[Waiting]]] = defaultdict(list)
    last = shares.last_tenant
    for last, model in _queues(cursor, shares.last_tenant):
        if model not in models:
            continue
        cursor.execute(
            f"SELECT -priority, created_at, position, id FROM turns WHERE {_LIVE_GROUPED}"  # noqa: S608 - constants
            f" AND tenant = ? AND model = ? AND lease_until < ? {_ORDER} LIMIT ?{db.skips_locked}",
            (last, model, now, limit),
        )
        if heads := [Waiting(*row) for row in cursor.fetchall()]:
            tenant_to_queues[last].append(heads)
    queues = {tenant: deque(merge(*each)) for tenant, each in tenant_to_queues.items()}
    shared = list(_share(queues, limit, shares))
    return [turn for _, turn in shared], shared[-1][0] if shared else last


def _queues(cursor: Cursor, last_tenant: str) -> Iterator[tuple[str, str]]:
    """Yield the tenant and model of each queue, beginning with the tenant after `last_tenant`."""
    conditions: Sequence[tuple[str, Sequence[str]]] = ((" AND tenant > ?", (last_tenant,)),)
    num_models: Counter[str] = Counter()
    before_wrap: Collection[str] | None = None
    for _ in range(MAX_QUEUES):
        row = _first_queue(cursor, conditions)
        if row is None and before_wrap is None:
            before_wrap = set(num_models)
            row = _first_queue(cursor, [("", ())])
        if row is None or row[0] in (before_wrap or ()):
            return
        tenant, model = row
        yield tenant, model
        num_models[tenant] += 1
        # With "(tenant, model) > (?, ?)", SQLite would read the whole queue of the last model.
        next_model = " AND tenant = ? AND model > ?", (tenant, model)
        next_tenant = " AND tenant > ?", (tenant,)
        has_more = num_models[tenant] < MAX_MODELS
        conditions = (next_model, next_tenant) if has_more else (next_tenant,)


def _first_queue(
    cursor: Cursor, conditions: Iterable[tuple[str, Sequence[str]]]
) -> tuple[str, str] | None:
    """Return the tenant and model of the first queue that fulfils one of `conditions`.

    An earlier condition has precedence over a later one.
    """
    for condition, values in conditions:
        cursor.execute(
            f"SELECT tenant, model FROM turns WHERE {_LIVE_GROUPED}{condition}"  # noqa: S608 - constants
            " ORDER BY tenant, model LIMIT 1",
            values,
        )
        if (row := cursor.fetchone()) is not None:
            tenant, model = row
            return tenant, model
    return None


def _share(
    queues: dict[str, deque[Waiting]], limit: int, shares: Shares
) -> Iterator[tuple[str, Waiting]]:
    """Yield at most `limit` turns, each with its tenant, in the order in which to claim them.

    A turn of higher priority always comes first. Among turns of equal priority, the next one
    belongs to the tenant with the fewest running turns. If several tenants have equally few, the
    next turn belongs to the tenant whose name follows that of the tenant served last.
    """
    num_running, last = Counter(shares.num_running), shares.last_tenant
    for _ in range(limit):
        if not queues:
            return
        tenant = min(
            queues, key=lambda each: (queues[each][0][0], num_running[each], each <= last, each)
        )
        yield tenant, queues[tenant].popleft()
        num_running[tenant] += 1
        last = tenant
        if not queues[tenant]:
            del queues[tenant]
