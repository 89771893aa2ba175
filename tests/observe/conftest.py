"""Runs the tests with a real Prometheus only in `make observe-test`."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path == _HERE / "test_prometheus.py":
            item.add_marker(pytest.mark.observe)
