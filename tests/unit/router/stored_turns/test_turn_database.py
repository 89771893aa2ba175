"""The databases when they fail: a full disk, another version, a server that is lost."""

from dataclasses import replace

import pytest

from router.stored_turns.database import MIGRATIONS, SqliteConnection, migrate, open_database
from router.stored_turns.store import TurnChanges, TurnStore
from router.stored_turns.turn import StoreError, Turn, TurnStatus

TURN = Turn(
    id="resp_1", tenant="t", kind="response", body=b"{}", created_at=1.0, status=TurnStatus.RUNNING
)


async def test_a_full_disk_is_an_error_that_says_so_and_loses_nothing(new_store, path):
    store = new_store()
    await store.write(TurnChanges([TURN]))
    await store.database.run(lambda cursor, _: cursor.execute("PRAGMA max_page_count = 1") and None)
    big = replace(TURN, id="big", body=b"x" * 1_000_000)
    with pytest.raises(StoreError, match="turns cannot be stored now: database or disk is full"):
        await store.write(TurnChanges([big]))
    # The connection is opened again, and the limit with it is gone.
    assert await store.find("t", big.id) is None
    assert await store.write(TurnChanges([big])) == {TURN.id, big.id}
    assert path.stat().st_mode & 0o077 == 0


async def test_a_schema_of_a_newer_version_is_refused(new_store, path):
    connection = SqliteConnection(path)
    migrate(connection)
    migrate(connection)  # a second time changes nothing
    version = len(MIGRATIONS) + 1
    connection.transaction(
        lambda cursor: cursor.execute("INSERT INTO turn_schema VALUES (?)", (version,)) and None
    )
    connection.close()
    with pytest.raises(StoreError, match=f"has version {version} of its schema"):
        await new_store().find("t", "x")


async def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="turns cannot be stored in"):
        SqliteConnection(tmp_path / "file" / "turns.sqlite")


async def test_a_server_that_is_lost_is_found_again(postgres):
    store = TurnStore(open_database(postgres.new_database()), "router")
    await store.write(TurnChanges([TURN]))
    with pytest.raises(StoreError, match="terminating connection"):
        await store.database.run(
            lambda cursor, _: cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        )
    assert await store.find("t", TURN.id) == TURN
    await store.database.close()


async def test_a_server_that_is_not_there_is_an_error_without_a_password(tmp_path):
    place = f"postgresql://me:secret@/x?host={tmp_path}"
    store = TurnStore(open_database(place), "router")
    with pytest.raises(StoreError, match="cannot be reached") as refused:
        await store.find("t", "x")
    assert "secret" not in str(refused.value)


async def test_a_large_value_has_more_time_to_be_written(postgres):
    def limit(cursor, value):
        cursor.execute("SELECT length(?)", (value,))
        cursor.execute("SHOW statement_timeout")
        return cursor.fetchone()[0]

    database = open_database(postgres.new_database())
    values = b"x" * 2**21, b"x"
    limits = [
        await database.run(lambda cursor, _, value=value: limit(cursor, value)) for value in values
    ]
    await database.close()
    assert limits == ["12s", "10s"]
