"""A short run of `bench/chaos.py`: processes of each kind are killed under live streams."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_no_token_is_lost_repeated_or_changed_whatever_is_killed(tmp_path: Path):
    report = tmp_path / "chaos.json"
    flags = ["--quick", "--kills=6", "--scheduler-kills=1", "--streams=16", "--seed=3"]
    result = subprocess.run(
        [sys.executable, ROOT / "bench" / "chaos.py", *flags, f"--json={report}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    numbers = json.loads(report.read_text())
    assert numbers["kills"] == 7
    assert numbers["tokens"] > 0
