"""What is run against a real Prometheus is for `make observe-test` only."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path == _HERE / "test_prometheus.py":
            item.add_marker(pytest.mark.observe)
