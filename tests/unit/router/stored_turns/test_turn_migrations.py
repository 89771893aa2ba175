"""A store that an older version has written is upgraded with all that it contains."""

import time
from dataclasses import fields
from pathlib import Path

import pytest

from contract.codec.outputs import event_to_proto
from contract.outputs import FinishReason, OutputDelta, OutputFinished, Usage
from router.http.batches.store import BatchStore, File
from router.http.listing import PageQuery
from router.live.usage import Used
from router.stored_turns.database import MIGRATIONS, SqliteConnection
from router.stored_turns.fair_claims import Models
from router.stored_turns.groups import GroupCounts
from router.stored_turns.postgres import PostgresConnection
from router.stored_turns.turn import TurnStatus
from router.stored_turns.usage import read_usage

EVENTS = OutputDelta(0, 0, (1, 2), ""), OutputFinished(0, FinishReason.STOP), Usage(3, 2, 1)
VERSIONS = range(1, len(MIGRATIONS))


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, path):
    if request.param == "sqlite":
        return str(path)
    return request.getfixturevalue("postgres").new_database()


def turn(turn_id, status, group="", position=0, result=None):
    return {
        "id": turn_id,
        "tenant": "t",
        "kind": "response",
        "body": b"{}",
        "created_at": 1.0,
        "model": "m",
        "group_id": group,
        "position": position,
        "priority": 0,
        "fingerprint": b"f",
        "status": status,
        "result": result,
        "owner": "",
        "ended_at": None if result is None else 2.0,
        "lease_until": 0.0,
    }


# For each version, the rows of tables that are new in it.
ROWS = {
    1: [
        ("turns", turn("done", "completed", result=b'{"a": 1}')),
        ("turns", turn("live", "running")),
        ("turns", turn("l1", "completed", "batch_1", 1, b"12345")),
        ("turns", turn("l2", "failed", "batch_1", 2, b"678")),
        ("turns", turn("l3", "queued", "batch_1", 3)),
        *(
            ("turn_events", {"turn_id": "done", "number": i, "event": event})
            for i, event in enumerate(
                event_to_proto("", each).SerializeToString() for each in EVENTS
            )
        ),
    ],
    2: [
        (
            "files",
            {
                "id": "file-1",
                "tenant": "t",
                "purpose": "batch",
                "name": "in.jsonl",
                "num_bytes": 4,
                "created_at": 1.0,
                "content": b"text",
            },
        ),
        (
            "batches",
            {
                "id": "batch_1",
                "tenant": "t",
                "created_at": 1.0,
                "is_live": True,
                "shown": b'{"status": "in_progress", "input_file_id": "file-1"}',
            },
        ),
    ],
    3: [
        (
            "usage",
            {
                "hour": 3600,
                "tenant": "t",
                "key_name": "",
                "model": "m",
                "adapter": "",
                "requests": 1,
                "prompt_tokens": 2,
                "cached_tokens": 0,
                "generated_tokens": 3,
                "reasoning_tokens": 0,
            },
        )
    ],
    5: [
        (
            "turn_groups",
            {
                "id": "batch_1",
                "completed": 1,
                "failed": 1,
                "result_bytes": 8,
                **dict.fromkeys((each.name for each in fields(Used)), 0),
            },
        )
    ],
}


def write_as(version, place):
    """Makes the schema of an older version, with rows."""

    def work(cursor):
        cursor.execute("CREATE TABLE turn_schema (version INTEGER NOT NULL)")
        for number, statements in enumerate(MIGRATIONS[:version], 1):
            for statement in statements:
                cursor.execute(statement)
            cursor.execute("INSERT INTO turn_schema VALUES (?)", (number,))
        for number in range(1, version + 1):
            for table, row in ROWS.get(number, ()):
                places = ", ".join("?" * len(row))
                names = ", ".join(row)
                cursor.execute(
                    f"INSERT INTO {table} ({names}) VALUES ({places})", tuple(row.values())
                )

    is_postgres = place.startswith("postgres")
    connection = PostgresConnection(place) if is_postgres else SqliteConnection(Path(place))
    connection.transaction(work)
    connection.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_older_store_keeps_its_rows(version, place, new_store):
    write_as(version, place)
    store = new_store()
    done = await store.find("t", "done")
    assert (done.status, done.result, done.ended_at) == (TurnStatus.COMPLETED, b'{"a": 1}', 2.0)
    assert tuple(await store.events("done")) == EVENTS
    assert [each.id for each in await store.list_group("t", "batch_1")] == ["l1", "l2", "l3"]
    assert await store.count_group("batch_1") == GroupCounts(1, 1, 8)
    assert await store.is_group_live("batch_1")
    claimed = await store.claim(9, 9, Models(("m",)))
    assert [each.id for each in claimed] == ["live", "l3"]
    batches = BatchStore(store.database)
    if version >= 2:
        assert await batches.file("t", "file-1") == File("file-1", "t", "batch", "in.jsonl", 4, 1.0)
        assert await batches.content("t", "file-1") == b"text"
        (batch,) = await batches.live_batches()
        assert (batch.id, batch.file_id, batch.key_name) == ("batch_1", "file-1", "")
    else:
        assert not await batches.files("t", PageQuery(1))
    rows = await read_usage(store.database, 0.0, None, ("model",))
    assert [row.used for row in rows] == ([Used(1, 2, 0, 3, 0)] if version >= 3 else [])
    # What is new works, too: a turn ends, and old ones are swept.
    assert await store.sweep(time.time() - 3.0, 10**12) == 1
    assert await store.find("t", "done") is None
