"""bench/gpu.sh works: with tiny shapes on a CPU, and with parts that fail."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from gpu import rows, wheels
from gpu.suite import __main__ as suite
from gpu.suite import outputs, parts, report

ROOT = Path(__file__).parents[3]


def python(code, *arguments):
    return (sys.executable, "-c", code, *arguments)


@pytest.mark.e2e
@pytest.mark.parametrize("call", [1, 2, 3])
def test_every_part_runs_with_tiny_shapes(call, tmp_path):
    out, kept = tmp_path / "out", tmp_path / "kept"
    done = subprocess.run(
        ["bench/gpu.sh", "--cpu-smoke", "--call", str(call), "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "QUIRE_BENCH_KEPT": str(kept)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in out.iterdir()} == set(outputs.NAMES)
    assert (kept / "ceilings.json").exists()
    read = json.loads((out / "gpu.json").read_text())["parts"]
    assert {part["error"] for part in read} == {None}
    found = {part["name"]: part["results"] for part in read}
    assert set(found) == {"ceilings", *(part.name for part in parts.smoke()[call - 1])}
    {1: check_first, 2: check_second, 3: check_third}[call](found, out)
    assert "targets" in done.stdout


def check_first(found, out):
    exact = found["exact"]["numbers"]
    assert exact["wrong_float32"] == exact["failed"] == 0
    kinds = {name.partition(",")[0] for name in exact["rows"]}
    assert kinds >= {"plain", "swaps and forks", "adapters", "experts", "drafts", "int8 KV"}
    assert exact["rows"]["plain, float32: eager, transformers"]["of"] > 0
    engine = found["engine"]["numbers"]
    assert engine["compiled_after_warm_up"] == 0
    for kind in ("graphs", "eager"):
        for step in ("3 x 32", "3 x 32 + 16 prompt tokens", "3 x 32 top-p"):
            assert engine["rows"][f"{kind}, {step}"]["ms"] > 0
    assert (out / "junit.xml").read_text().count("<testsuite ") == 2


def check_second(found, out):
    served = found["serve smoke"]["numbers"]
    assert served["output_tok_s_c1"] > 0
    assert served["bandwidth_share_c1"] > 0
    assert served["open_output_tok_s"] > 0
    assert found["engine loads"]["numbers"]["rows"]["2 streams"]["output_tok_s"] > 0
    assert json.loads((out / "kernels.json").read_text())["rows"]
    with tarfile.open(out / "traces.tgz") as traces:
        assert len(traces.getnames()) == 3
    with tarfile.open(out / "logs.tgz") as logs:
        assert "serve-smoke/worker-0.txt" in logs.getnames()


def check_third(found, _):
    formats = found["formats"]["numbers"]
    assert formats["rows"]["steps, batch-invariant"]["ms_1"] > 0
    assert 0.9 < formats["perplexity_int4_over_bf16"] < 1.2
    assert found["elastic"]["numbers"]["wrong"] == 0
    assert found["swap"]["numbers"]["decode_ms"] > 0
    tuned = found["tuning"]["tuned"]
    assert tuned["tuned"]["device"] == "interpreter"
    assert all("measured" in tuned["kernels"][kernel][0] for kernel in ("decode", "prefill"))
    transformers = found["transformers smoke"]["numbers"]
    assert isinstance(transformers["generate_tok_s_c2"], float)


def test_parts_that_fail_hang_or_have_no_time_are_lines_and_the_others_go_on(tmp_path):
    numbers = "import json, sys; json.dump({'payload_over_memcpy': 0.97}, open(sys.argv[1], 'w'))"
    damaged = "import sys; open(sys.argv[1], 'w').write('{')"
    work, out = tmp_path / "work", tmp_path / "out"
    out.mkdir()
    given = (
        parts.Part("fails", python("import sys; print('no such GPU'); sys.exit(3)"), 60),
        parts.Part("swap", python(numbers, "{out}/numbers.json"), 60),
        parts.Part("damaged", python(damaged, "{out}/numbers.json"), 60),
        parts.Part("missing", ("/no/such/program",), 60),
    )
    outcomes = []
    suite.run_all(given, outcomes, work, out, 600)
    errors = {outcome.name: outcome.error for outcome in outcomes}
    assert "ended with 3: no such GPU" in errors["fails"]
    assert errors["swap"] is None
    assert errors["damaged"].startswith("numbers.json: ")
    assert "No such file" in errors["missing"]
    table = report.table(outcomes)
    assert "FAILED" in table
    assert "0.970 met" in table
    assert "1B: idle" not in table, "that part was not run"
    assert len(json.loads((out / "gpu.json").read_text())["parts"]) == 4


def test_a_part_that_is_stopped_keeps_its_rows_and_is_interrupted_first(tmp_path):
    hangs = (
        "import json, sys, time\n"
        "try:\n"
        "    json.dump({'rows': {'a': {'ms': 1.0}}}, open(sys.argv[1], 'w'))\n"
        "    open(sys.argv[1]).close()\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    open(sys.argv[2], 'w').write('{}')\n"
    )
    part = parts.Part("hangs", python(hangs, "{out}/numbers.json", "{out}/end.json"), 60)

    def start(part, directory):
        process = suite._Process(part, directory)

        def wait(_):
            while "ready" not in (directory / "log.txt").read_text():
                process.wait(0.05)

        return SimpleNamespace(wait=wait, stop=process.stop)

    outcomes = []
    suite.run_all((part,), outcomes, tmp_path, tmp_path, 600, start=start)
    (outcome,) = outcomes
    assert outcome.error == "took longer than 590 s"
    assert outcome.results == {"numbers": {"rows": {"a": {"ms": 1.0}}}, "end": {}}


def test_an_interrupted_call_keeps_the_rows_of_the_part_that_ran(tmp_path):
    def start(_, directory):
        def wait(_):
            (directory / "numbers.json").write_text('{"rows": {"a": {"ms": 1.0}}}')
            raise KeyboardInterrupt

        return SimpleNamespace(wait=wait, stop=lambda: None)

    outcomes = [report.Outcome("before", 1.0, None, {})]
    given = (parts.Part("engine", (), 60), parts.Part("never", (), 60))
    with pytest.raises(KeyboardInterrupt):
        suite.run_all(given, outcomes, tmp_path, tmp_path, 600, start=start)
    before, engine = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert before["name"] == "before"
    assert (engine["name"], engine["error"]) == ("engine", "interrupted")
    assert engine["results"] == {"numbers": {"rows": {"a": {"ms": 1.0}}}}


class FakeMachine:
    """A clock, and parts that take the seconds that a test says."""

    def __init__(self, **seconds):
        self.seconds = seconds
        self.now_s = 100.0
        self.stopped = []

    def now(self):
        return self.now_s

    def start(self, part, directory):
        del directory

        def wait(limit_s):
            taken_s = self.seconds[part.name]
            self.now_s += min(taken_s, limit_s)
            return None if taken_s > limit_s else 0

        def stop():
            if self.seconds[part.name] > 1e6:  # it does not end by itself
                self.stopped.append(part.name)
                self.now_s += suite._STOP_S

        return SimpleNamespace(wait=wait, stop=stop)

    def run(self, out, budget_s, **shares):
        given = tuple(parts.Part(name, (), share) for name, share in shares.items())
        outcomes = []
        suite.run_all(given, outcomes, out, out, budget_s, self.now, self.start)
        return {outcome.name: (outcome.seconds, outcome.error) for outcome in outcomes}


def test_a_part_that_overruns_is_stopped_so_that_the_next_ones_have_their_turn(tmp_path):
    machine = FakeMachine(a=1e9, b=50, c=1e9, d=20)
    found = machine.run(tmp_path, 400, a=100, b=100, c=100, d=100)
    assert found["a"] == (100, "took longer than 90 s")
    assert found["b"] == (50, None)
    assert found["c"] == (150, "took longer than 140 s"), "it may use what b has saved"
    assert found["d"] == (20, None)
    assert machine.stopped == ["a", "c"]
    assert machine.now_s - 100 <= 400


def test_parts_for_which_no_time_is_left_are_not_started(tmp_path):
    machine = FakeMachine(a=1e9, b=1, c=1)
    found = machine.run(tmp_path, 108, a=100, b=100, c=100)
    assert found["a"][1] == "took longer than 90 s"
    assert found["b"] == found["c"] == (0.0, "no time was left")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_call_whose_parts_all_hang_ends_in_nine_minutes(index, tmp_path):
    call = (parts.ceilings(), *parts.whole(4e12)[index])
    machine = FakeMachine(**{part.name: 1e9 for part in call})
    outcomes = []
    suite.run_all(call, outcomes, tmp_path, tmp_path, parts.MOST_S, machine.now, machine.start)
    assert all(outcome.error.startswith("took longer") for outcome in outcomes)
    assert machine.now_s - 100 <= 9 * 60


def test_the_plan_names_each_part_s_seconds_and_their_sum():
    text = suite.plan_text((parts.Part("a", (), 100), parts.Part("b", (), 50)), 540)
    assert text.split() == ["a", "100", "s", "b", "50", "s", "in", "all", "150", "of", "540", "s"]


def test_one_call_runs_only_its_parts(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(suite, "run_all", lambda given, *_: ran.extend(given))
    monkeypatch.setattr(sys, "argv", ["gpu", "--cpu-smoke", "--call", "2", "--out", str(tmp_path)])
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    assert suite._main() == 0
    assert [part.name for part in ran] == ["ceilings", "engine loads", "serve smoke", "kernels"]


def test_targets_name_parts_that_are_run():
    names = {part.name for call in parts.whole(4e12) for part in call} | {"ratios"}
    assert {target.part for target in report.TARGETS} <= names


def test_too_large_a_cache_of_kernels_leaves_out_what_tells_least(tmp_path, monkeypatch):
    work, cache, out = tmp_path / "work", tmp_path / "cache", tmp_path / "out"
    for directory in (work, cache, out):
        directory.mkdir()
    (cache / "a.cubin").write_bytes(b"1")
    (cache / "a.llir").write_bytes(os.urandom(3000))
    monkeypatch.setattr(outputs, "_MAX_BYTES", 2000)
    outputs.pack(work, cache, out)
    with tarfile.open(out / "triton-cache.tgz") as archive:
        assert archive.getnames() == ["a.cubin"]


def test_a_checkout_that_is_too_large_with_its_wheels_is_refused(tmp_path):
    with (tmp_path / "a.whl").open("wb") as wheel:
        wheel.truncate(2**20)
    wheels.check_sizes(tmp_path)
    with (tmp_path / "b.whl").open("wb") as wheel:
        wheel.truncate(64 * 2**20)
    with pytest.raises(SystemExit, match=r"65\.0 MiB: together at most 64 MiB"):
        wheels.check_sizes(tmp_path)


class TestRows:
    def test_a_row_that_fails_is_a_row_and_each_is_written_at_once(self, tmp_path):
        file = tmp_path / "numbers.json"
        table = rows.Rows(file)
        seen = []

        def fails():
            seen.append(json.loads(file.read_text())["rows"])
            raise RuntimeError("out of\nmemory")

        table.run("a", lambda: {"ms": 1.0})
        table.run("b", fails)
        table.write(total=3)
        read = json.loads(file.read_text())
        assert seen == [{"a": {"ms": 1.0}}]
        assert read["rows"]["b"] == {"error": "RuntimeError: out of memory"}
        assert table.errors == {"b": "RuntimeError: out of memory"}
        assert read["total"] == 3

    def test_after_a_device_fault_a_new_process_runs_the_rows_that_are_left(
        self, tmp_path, monkeypatch
    ):
        file = tmp_path / "numbers.json"
        restarts = []

        def lost():
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        table = rows.Rows(file, restart=lambda: restarts.append(True))
        table.run("a", lambda: {"ms": 1.0})
        assert not restarts
        table.run("b", lost)
        assert restarts
        monkeypatch.setenv(rows._CONTINUES, "1")
        after, ran = rows.Rows(file), []
        for name in ("a", "b", "c"):
            after.run(name, lambda name=name: ran.append(name) or {"ms": 2.0})
        assert ran == ["c"]
        assert set(json.loads(file.read_text())["rows"]) == {"a", "b", "c"}
        assert rows.Rows(file).rows == {}, "only a process that continues reads the file"

    def test_a_device_that_fails_at_every_start_ends_the_part(self, tmp_path, monkeypatch):
        file = tmp_path / "numbers.json"

        def lost():
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        restarts = []
        rows.Rows(file, restart=lambda: restarts.append(True)).start(lost)
        assert restarts
        monkeypatch.setenv(rows._CONTINUES, "1")
        with pytest.raises(SystemExit, match="failed at the start"):
            rows.Rows(file).start(lost)
        assert "illegal" in json.loads(file.read_text())["rows"]["start"]["error"]

    def test_each_process_starts_again_after_a_fault_of_another_row(self, tmp_path, monkeypatch):
        file = tmp_path / "numbers.json"
        table = rows.Rows(file)
        table.start(lambda: {"error": "graphs: not captured"})
        table.run("a", lambda: 1 / 0)
        monkeypatch.setenv(rows._CONTINUES, "1")
        after = rows.Rows(file)
        after.start(lambda: {"s": 2.0})
        assert after.rows["start"] == {"s": 2.0}

    def test_an_error_that_leaves_the_device_alive_restarts_nothing(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        restarts = []
        table = rows.Rows(None, restart=lambda: restarts.append(True))
        table.run("a", lambda: 1 / 0)
        assert table.errors
        assert not restarts

    def test_the_new_process_has_the_same_command(self, tmp_path):
        file = tmp_path / "numbers.json"
        program = (
            "import sys; sys.path.insert(0, 'bench')\n"
            "from gpu import rows\n"
            f"table = rows.Rows(__import__('pathlib').Path({str(file)!r}))\n"
            "rows.is_lost = lambda: True\n"
            "table.run('a', lambda: {'ms': 1.0})\n"
            "table.run('b', lambda: 1 / 0)\n"
            "table.run('c', lambda: {'ms': 3.0})\n"
        )
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
        assert list(json.loads(file.read_text())["rows"]) == ["a", "b", "c"]


def test_a_kernel_that_is_compiled_or_read_from_the_disk_is_listed(tmp_path):
    kernel = tmp_path / "a_kernel.py"
    kernel.write_text(
        "import triton\n"
        "import triton.language as tl\n"
        "@triton.jit\n"
        "def store_one(out):\n"
        "    tl.store(out, 1.0)\n"
    )
    program = (
        f"import sys; sys.path[:0] = ['bench', {str(tmp_path)!r}]\n"
        "import triton\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.compiler import ASTSource\n"
        "from a_kernel import store_one\n"
        "from gpu.compilations import Compilations\n"
        "def compile():\n"
        "    source = ASTSource(store_one, {'out': '*fp32'}, {})\n"
        "    triton.compile(source, target=GPUTarget('cuda', 90, 32))\n"
        "with Compilations() as first:\n"
        "    compile()\n"
        "with Compilations() as again:\n"
        "    compile()\n"
        "compile()\n"
        "print(first.kernels, again.kernels)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "['store_one'] ['store_one']", done.stderr
