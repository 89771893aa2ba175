"""A router that keeps turns, with a scheduler that the tests play."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from router.turns.database import Database, SqliteConnection
from router.turns.store import TurnStore

TICK_S = 0.02


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns.sqlite"


@pytest.fixture
async def new_store(path: Path) -> AsyncIterator[Callable[[], TurnStore]]:
    """Makes stores of one file, each another router's."""
    databases = []
    names = itertools.count()

    def make() -> TurnStore:
        databases.append(Database(lambda: SqliteConnection(path)))
        return TurnStore(databases[-1], f"router-{next(names)}")

    yield make
    for database in databases:
        with contextlib.suppress(RuntimeError):  # closed by its test
            await database.close()
