"""Stores of turns: SQLite files, and databases of a PostgreSQL server."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from router.stored_turns.database import open_database
from router.stored_turns.store import TurnStore
from tests.postgres_server import PostgresServer, postgres_server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns.sqlite"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def place(path: Path) -> str:
    """The value of `--turn-store`; a test file may choose another one."""
    return str(path)


@pytest.fixture
async def new_store(place: str) -> AsyncIterator[Callable[[], TurnStore]]:
    """Makes stores in one place, as separate routers do."""
    databases = []
    names = itertools.count()

    def make() -> TurnStore:
        databases.append(open_database(place))
        return TurnStore(databases[-1], f"router-{next(names)}")

    yield make
    for database in databases:
        with contextlib.suppress(RuntimeError):  # its test has closed it
            await database.close()
