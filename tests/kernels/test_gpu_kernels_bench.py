"""`bench/gpu_kernels.py` works: every case with tiny shapes, and a case that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*flags):
    return subprocess.run(
        [sys.executable, "bench/gpu_kernels.py", "--cpu-smoke", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_case_runs_with_tiny_shapes(tmp_path):
    out = tmp_path / "kernels.json"
    done = run("--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert not result["is_measured"]
    rows = result["rows"]
    assert len(rows) >= 24
    assert {row["error"] for row in rows} == {None}
    compared = [row for row in rows if "sdpa" in row["baselines_us"]]
    assert len(compared) >= 20
    for row in rows:
        assert all(isinstance(us, float) for us in row["baselines_us"].values()), row
    for row in compared:
        assert row["max_difference"] < 0.01, row
    decodes = [row["shape"] for row in rows if row["kernel"] == "decode"]
    for block_size in (16, 32, 64, 128):
        named = [shape for shape in decodes if f"P{block_size}" in shape]
        assert any("layer-major" in shape for shape in named)
        assert any("layer-major" not in shape for shape in named)
    of_a_model = [shape for shape in decodes if "32 layers" in shape]
    assert ["layer-major" in shape for shape in of_a_model] == [False, True]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return pytest.importorskip("gpu_kernels"), pytest.importorskip("gpu.kernel_cases")


def test_the_cases_that_matter_most_are_among_all(bench):
    _, cases = bench
    main = cases.main_cases(cases.TINY)
    assert len(main) == 15
    (long,) = (case for case in main if case.shape.startswith("1x128k"))
    assert set(long.prepare(torch.device("cpu")).baselines) == {"sdpa"}


def test_ceilings_are_kept_for_the_same_device(bench, tmp_path, monkeypatch):
    gpu_kernels, _ = bench
    measured = []

    def measure(*_):
        measured.append(gpu_kernels.Ceilings(1e9 * (1 + len(measured)), 1e12))
        return measured[-1]

    monkeypatch.setattr(gpu_kernels, "measure_ceilings", measure)
    file = tmp_path / "build" / "ceilings.json"
    first = gpu_kernels.kept_ceilings(file, "a GPU", (1, 2))
    assert gpu_kernels.kept_ceilings(file, "a GPU", (1, 2)) == first
    assert len(measured) == 1
    assert gpu_kernels.kept_ceilings(file, "another GPU", (1, 2)) != first


def test_after_a_device_fault_the_cases_that_are_left_run_in_a_new_process(bench, monkeypatch):
    gpu_kernels, cases = bench

    def fails(_):
        raise RuntimeError("an illegal memory access was encountered")

    class NewProcessError(Exception):
        pass

    def start_again():
        raise NewProcessError

    monkeypatch.setattr(gpu_kernels, "is_lost", iter([True, False]).__next__)
    monkeypatch.setattr(gpu_kernels, "start_again", start_again)
    fine = cases.Case("b", "2", lambda _: cases.Prepared(lambda: None, 1000, 10))
    given = [cases.Case("a", "1", fails), fine]
    said = []
    rest = torch.device("cpu"), gpu_kernels.Ceilings(1e9, 1e9), 1, said.append
    with pytest.raises(NewProcessError):
        gpu_kernels.run(given, *rest)
    assert [row.kernel for row in said[-1]] == ["a"], "its row is written before"
    rows = gpu_kernels.run(given, *rest, said[-1])
    assert [(row.kernel, row.error is None) for row in rows] == [("a", False), ("b", True)]


def test_a_kernel_that_fails_is_a_row_and_the_others_go_on(bench):
    gpu_kernels, cases = bench

    def fails(_):
        raise RuntimeError("out of\nmemory")

    def no_baseline():
        raise ValueError("not here")

    def fine(_):
        return cases.Prepared(lambda: None, 1000, 10, {"sdpa": no_baseline})

    said = []

    def say(rows):
        said.append([gpu_kernels.table_line(row) for row in rows])

    rows = gpu_kernels.run(
        [cases.Case("a", "1", fails), cases.Case("b", "2", fine)],
        torch.device("cpu"),
        gpu_kernels.Ceilings(1e9, 1e9),
        1,
        say,
    )
    assert rows[0].error == "RuntimeError: out of memory"
    assert rows[1].error is None
    assert rows[1].bound == "bytes"
    assert rows[1].baselines_us == {"sdpa": "ValueError: not here"}
    assert [len(lines) for lines in said] == [1, 2]  # each row is printed and written at once
    assert "FAILED" in said[0][0]
