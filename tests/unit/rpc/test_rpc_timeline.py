"""A process's timeline; each test runs a process, because it is configured once per process."""

import json
import subprocess
import sys

from rpc.observe import timeline

RECORD = """
import sys, threading, time
from pathlib import Path
from rpc.observe import timeline

assert not timeline.is_on()
with timeline.span("before"):
    pass
timeline.configure("worker", Path(sys.argv[1]))
with timeline.span("outer"):
    with timeline.span("inner"):
        pass
began = time.monotonic_ns()
thread = threading.Thread(target=lambda: timeline.add("step", "lane", began, step_id=7))
thread.start(); thread.join()
timeline.write()
"""


def record(directory) -> None:
    subprocess.run([sys.executable, "-c", RECORD, str(directory)], check=True, timeout=60)


def test_spans_are_written_with_their_lanes_and_nest(tmp_path):
    record(tmp_path / "made")
    (path,) = (tmp_path / "made").glob("worker-*.json")
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert spans.keys() == {"outer", "inner", "step"}
    assert {name: lanes[e["tid"]] for name, e in spans.items()} == {
        "outer": "MainThread",
        "inner": "MainThread",
        "step": "lane",
    }
    assert spans["step"]["args"] == {"step_id": 7}
    outer, inner = spans["outer"], spans["inner"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_the_files_of_several_processes_are_one_timeline(tmp_path):
    record(tmp_path)
    record(tmp_path)
    events = timeline.merge(tmp_path)["traceEvents"]
    assert sorted(e["name"] for e in events if e["ph"] == "X") == sorted(
        ["outer", "inner", "step"] * 2
    )
    assert len({e["pid"] for e in events}) == 2


def test_a_process_records_no_timeline_by_default():
    timeline.configure("none", None)
    with timeline.span("nothing"):
        assert not timeline.is_on()
    timeline.write()
