"""Short runs of `bench/chaos.py` and `bench/exactness.py`: no fault changes a token."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def run(script: str, *flags: str, report: Path) -> tuple[int, str, Mapping[str, int]]:
    """Run a script of bench/; return its exit code, its output and its numbers."""
    result = subprocess.run(
        [sys.executable, ROOT / "bench" / script, *flags, f"--json={report}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    output = result.stdout + result.stderr
    assert report.exists(), output
    return result.returncode, output, json.loads(report.read_text())


@pytest.mark.parametrize("roles", [(), ("--roles",)])
def test_no_token_is_lost_repeated_or_changed_whatever_is_killed(
    roles: tuple[str, ...], tmp_path: Path
):
    flags = ["--quick", "--kills=6", "--scheduler-kills=1", "--streams=16", "--seed=3", *roles]
    code, output, numbers = run("chaos.py", *flags, report=tmp_path / "chaos.json")
    assert code == 0, output
    assert numbers["kills"] == 7
    assert numbers["tokens"] > 0


def test_an_agent_says_and_calls_the_same_whatever_is_killed(tmp_path: Path):
    flags = ["--quick", "--agent=8", "--turn-kills-every=0.7"]
    code, output, numbers = run("chaos.py", *flags, report=tmp_path / "agent.json")
    assert code == 0, output
    # one of a router for each API, and one of all processes
    assert numbers["kills"] >= 4, output
    assert numbers["turns"] == 2 * 8


@pytest.mark.parametrize("kv_format", ["bfloat16", "bfloat16+int8", "bfloat16+fp8"])
def test_streams_are_exact_in_each_kv_format(kv_format: str, tmp_path: Path):
    flags = [f"--formats={kv_format}", "--streams=100", "--cases=12", "--every=3"]
    _, output, numbers = run("exactness.py", *flags, report=tmp_path / "exactness.json")
    assert (numbers["wrong_outputs"], numbers["wrong_tokens"]) == (0, 0), output
    assert numbers["streams"] >= 100
    # A long run must meet every kind of disturbance; a run as short as this need not.
    key = kv_format.replace("+", "_")
    met = ("preempted", "recomputed_tokens", "swapped_out", "moved_requests", "orphaned")
    for disturbance in met:
        assert numbers[f"{key}_{disturbance}"] > 0, output
