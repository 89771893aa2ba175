"""The queries that are frequent while a batch is answered read the heads of indexes only."""

from dataclasses import replace

import pytest

from router.http.batches.store import Batch, BatchStore
from router.stored_turns.database import Database, SqliteConnection
from router.stored_turns.fair_claims import ALL_MODELS, Models
from router.stored_turns.store import TurnChanges, TurnProgress, TurnStore, insert_turn
from router.stored_turns.turn import Turn, TurnEnd, TurnStatus

LINE = Turn("g_1", "t", "batch line", b"{}", 1.0, model="m", group="g", priority=-100)
BATCH = Batch("g", "t", 1.0, True, {"status": "in_progress"})


class ExplainedConnection(SqliteConnection):
    """Notes how SQLite reads the tables for each statement."""

    def __init__(self, path, plans):
        super().__init__(path)
        self._plans = plans

    def transaction(self, work):
        return super().transaction(lambda cursor: work(ExplainedCursor(cursor, self._plans)))


class ExplainedCursor:
    def __init__(self, cursor, plans):
        self._cursor = cursor
        self._plans = plans

    def __getattr__(self, name):
        return getattr(self._cursor, name)

    def execute(self, statement, parameters=()):
        if statement.startswith(("SELECT", "UPDATE", "DELETE")):
            self._cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            self._plans += [detail for *_, detail in self._cursor.fetchall()]
        self._cursor.execute(statement, parameters)


@pytest.fixture
async def explained(path):
    plans = []
    database = Database(lambda: ExplainedConnection(path, plans))
    store = TurnStore(database, "router")
    await database.run(
        lambda cursor, _: [
            insert_turn(cursor, replace(LINE, id=f"g_{i}", position=i), "", 0.0) for i in range(9)
        ]
    )
    plans.clear()
    yield store, plans
    await database.close()


def slow(plans):
    """Return the plans that sort, or scan more than the few turns without a group."""
    fine = "SEARCH", "SCAN turns USING INDEX turns_single", "LIST SUBQUERY"
    first_queue = "SCAN turns USING INDEX turns_grouped"
    return [plan for plan in plans if not plan.startswith(fine) and plan != first_queue]


@pytest.mark.parametrize("models", [ALL_MODELS, Models(("m",)), Models(("x",), are_left_out=True)])
async def test_a_claim_reads_the_heads_of_queues(explained, models):
    store, plans = explained
    assert [turn.id for turn in await store.claim(9, 2, models)] == ["g_0", "g_1"]
    assert not slow(plans)
    begin = "SEARCH turns USING INDEX turns_grouped "
    read = {plan.removeprefix(begin) for plan in plans if plan.startswith(begin)}
    # With ((tenant,model)>(?,?)) it would read a whole queue.
    heads = {"(tenant=? AND model>?)", "(tenant>?)"}
    assert read == heads | {"(tenant=? AND model=?)"}


async def test_a_write_and_a_batch_s_state_read_neither_its_other_lines(explained):
    store, plans = explained
    await store.claim(0, 2)
    end = TurnEnd(TurnStatus.COMPLETED, b"{}", 9.0)
    plans.clear()
    await store.write(TurnChanges(progress=[TurnProgress("g_0", 0, record=b"", end=end)]))
    await store.count_group("g")
    await store.is_group_live("g")
    await store.list_group("t", "g")
    batches = BatchStore(store.database)
    await batches.last_position(BATCH)
    await batches.end_queued(BATCH)
    await batches.clear(BATCH)
    assert not slow(plans)
    for needed in (
        "turns_owned (owner=?)",
        "turns_group_live (group_id=?)",
        "turns_group (group_id=? AND position>?)",
    ):
        assert any(plan.endswith(needed) for plan in plans), needed
