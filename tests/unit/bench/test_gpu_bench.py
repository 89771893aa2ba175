"""bench/gpu.sh works: with tiny shapes on a CPU, and with parts that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return pytest.importorskip("gpu.suite")


def python(code):
    return (sys.executable, "-c", code)


@pytest.mark.e2e
def test_every_part_runs_with_tiny_shapes(tmp_path):
    done = subprocess.run(
        ["bench/gpu.sh", "--cpu-smoke", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {
        part["name"]: part for part in json.loads((tmp_path / "gpu.json").read_text())["parts"]
    }
    assert {part["error"] for part in parts.values()} == {None}
    exact = parts["exact"]["results"]["numbers"]
    assert exact["wrong_float32"] == 0
    assert {name for name in exact if "graphs" in name} >= {
        f"{kind}_float32_graphs_wrong" for kind in ("plain", "adapters", "experts", "drafts")
    }
    served = parts["serve smoke"]["results"]["numbers"]
    assert served["output_tok_s_c1"] > 0
    assert served["three_over_one_c2"] > 0
    assert 0 < served["bandwidth_share_c1"] < 1
    assert parts["swap"]["results"]["numbers"]["decode_ms"] > 0
    assert isinstance(parts["transformers smoke"]["results"]["numbers"]["generate_tok_s_c2"], float)
    assert "passed" in parts["kernel tests"]["results"]["summary"][0]
    assert "targets" in done.stdout


def test_parts_that_fail_hang_or_have_no_time_are_lines_and_the_others_go_on(gpu, tmp_path):
    numbers = "import json, sys; json.dump({'payload_over_memcpy': 0.97}, open(sys.argv[1], 'w'))"
    parts = (
        gpu.Part("fails", (python("import sys; print('no such GPU'); sys.exit(3)"),), 60),
        gpu.Part("hangs", (python("import time; time.sleep(600)"),), 0.2),
        gpu.Part("swap", ((*python(numbers), "{out}/numbers.json"),), 60),
        gpu.Part("damaged", ((*python("import sys; open(sys.argv[1], 'w').write('{')"),
                              "{out}/numbers.json"),), 60),
    )  # fmt: skip
    outcomes = gpu.run_all(parts, tmp_path, 600)
    errors = {outcome.name: outcome.error for outcome in outcomes}
    assert "ended with 3: no such GPU" in errors["fails"]
    assert errors["hangs"] == "took longer than 0 s"
    assert errors["swap"] is None
    assert errors["damaged"].startswith("numbers.json: ")
    table = gpu.table(outcomes)
    assert "fails" in table
    assert "FAILED" in table
    assert "0.970 met" in table
    assert "not measured" in table
    assert len(json.loads((tmp_path / "gpu.json").read_text())["parts"]) == 4


def test_without_time_nothing_is_started(gpu, tmp_path):
    part = gpu.Part("late", (python("open('started', 'w')"),), 60)
    (outcome,) = gpu.run_all((part,), tmp_path, 0)
    assert outcome.error == "no time was left"
    assert outcome.results == {}


def test_each_call_takes_less_than_nine_minutes_and_the_first_tests(gpu):
    probe_s = 40  # of the bandwidth
    calls = gpu.whole(4e12)
    assert len(calls) == len(gpu.smoke()) == 3
    assert all(probe_s + sum(part.limit_s for part in call) < 9 * 60 for call in calls)
    assert [part.name for part in calls[0]] == [
        *("kernel tests", "exact", "graphs on the device", "elastic pool")
    ]


def test_one_call_runs_only_its_parts(gpu, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(gpu, "run_all", lambda parts, *_: ran.extend(parts) or [])
    monkeypatch.setattr(sys, "argv", ["gpu", "--cpu-smoke", "--call", "2", "--out", str(tmp_path)])
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    assert gpu._main() == 0
    assert [part.name for part in ran] == ["kernels", "serve smoke"]


def test_targets_name_parts_that_are_run(gpu):
    names = {part.name for call in gpu.whole(4e12) for part in call} | {"ratios"}
    assert {target.part for target in gpu._TARGETS} <= names
