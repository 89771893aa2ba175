"""`quire bench` measures a service that it starts, and shows the parts of a step's time."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire.cli", "bench", *flags],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "140"},
    )


def test_a_profile_has_every_process_and_every_step(tmp_path):
    profile = tmp_path / "timeline.json"
    load = ("--num-prompts=2", "--concurrency=2", "--input-len=20", "--output-len=6")
    result = bench(*load, "--profile", str(profile))
    assert result.returncode == 0, result.stderr + result.stdout
    assert "tokens/s" in result.stdout
    assert "where time goes" in result.stdout
    events = json.loads(profile.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"router", "scheduler", "worker"}
    spans = [e["name"] for e in events if e["ph"] == "X"]
    assert spans.count("forward") >= 7, "a prompt and five more tokens, warmed up and measured"
    assert spans.count("launch a step") == spans.count("a step, from sending to result")


def test_a_prompt_that_does_not_fit_the_context_is_refused():
    result = bench("--input-len=2000")
    assert result.returncode == 1
    assert "--input-len and --output-len are 2064 together" in result.stderr


def test_a_profile_that_cannot_be_written_is_an_error_before_measuring(tmp_path):
    result = bench("--profile", str(tmp_path / "no" / "file"))
    assert result.returncode == 1
    assert "--profile" in result.stderr
    assert "No such file or directory" in result.stderr
