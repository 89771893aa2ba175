"""Settings before any test module is imported; and each run prints its number of rule steps."""

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings

# A shell that starts the tests in the background ignores SIGINT, and every child would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)

if shutil.which("nvidia-smi") is None:  # transformers imports triton, which reads the variable
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Threads that wait for each other are slow when tests run on every core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_ANY_SPEED = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "short",
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=_ANY_SPEED,
)
settings.register_profile(
    "long",
    max_examples=20_000,
    stateful_step_count=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=_ANY_SPEED,
)
settings.register_profile(  # only whether a test fails matters
    "mutation", parent=settings.get_profile("short"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("short")

_NUM_RULE_STEPS: Counter[str] = Counter()
"""Those of the processes in which pytest-xdist ran the tests, each added when it ends."""


def _num_rule_steps() -> Counter[str]:
    """The rule steps of this process's property tests, by kind."""
    module = sys.modules.get("tests.property.test_scheduler")
    return Counter() if module is None else module.SchedulerMachine.num_rule_steps


@pytest.fixture(autouse=True)
def _keeps_the_level_of_logs() -> Iterator[None]:
    """Fail a test that configures logs and does not undo it: later tests would lose lines."""
    before = structlog.get_config()["wrapper_class"]
    yield
    assert structlog.get_config()["wrapper_class"] is before


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["num_rule_steps"] = dict(_num_rule_steps())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A process that crashed has no output.
    _NUM_RULE_STEPS.update(getattr(node, "workeroutput", {}).get("num_rule_steps", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if counts := _NUM_RULE_STEPS + _num_rule_steps():
        parts = ", ".join(f"{count:,} in the {name}" for name, count in sorted(counts.items()))
        terminalreporter.write_line(f"rule steps: {parts}; {counts.total():,} in all")
