from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    """Benchmarks import each other from their own folder, as Python starts them."""
    monkeypatch.syspath_prepend(str(BENCH))
