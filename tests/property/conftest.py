"""A long run has no time limit."""

import pytest
from hypothesis import settings


def pytest_collection_modifyitems(items):
    if settings.get_current_profile_name() == "long":
        for item in items:
            item.add_marker(pytest.mark.timeout(0))
