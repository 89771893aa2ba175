"""The reference in docs/reference equals the generated one, and is complete."""

from pathlib import Path

from docs.generate import metrics
from docs.generate.__main__ import stale
from docs.generate.flags import PROCESSES, commands

ROOT = Path(__file__).parents[2]


def test_the_committed_reference_is_what_the_code_says():
    assert stale() == [], "run `make docs`"


def test_every_entry_points_flags_are_listed():
    told = PROCESSES.keys() | commands().keys()
    for script in ("router", "scheduler", "worker", "sim-worker"):
        assert f"quire-{script}" in told
    parsing = {
        path.stem
        for path in (ROOT / "quire" / "cli" / "commands").rglob("*.py")
        if "parse_settings(" in path.read_text()
    }
    assert {name.removeprefix("quire ").replace("-", "_") for name in commands()} == parsing


def test_every_metric_of_the_code_is_listed():
    told = {name.removesuffix("_total") for name in metrics.names()}
    for package in ("rpc", "router", "scheduler_svc", "gpu_worker"):
        for path in (ROOT / package).rglob("*metrics.py"):
            for line in path.read_text().split('"'):
                if line.startswith("quire_") and line.replace("_", "").isalnum():
                    assert line in told, path
