"""A long run has no time limit, and every run prints its number of rule steps."""

import sys

import pytest
from hypothesis import settings


def pytest_collection_modifyitems(items):
    if settings.get_current_profile_name() == "long":
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


def pytest_terminal_summary(terminalreporter):
    module = sys.modules.get("tests.property.test_scheduler")
    if module is not None and (counts := module.SchedulerMachine.num_rule_steps):
        parts = ", ".join(f"{count:,} in the {name}" for name, count in sorted(counts.items()))
        terminalreporter.write_line(f"rule steps: {parts}; {counts.total():,} in all")
