"""The dashboard and the alert rules are valid, and use existing metrics."""

import re
import shutil
import subprocess

import pytest
import yaml

from docs.generate import metrics
from tests.observe.expressions import (
    ROOT,
    RULES,
    alerts,
    metrics_in,
    of_dashboard,
    panels,
)

PROMTOOL = shutil.which("promtool")
EXPRESSIONS = {**of_dashboard(), **{name: rule["expr"] for name, rule in alerts().items()}}
ALERT_TESTS = ROOT / "tests" / "observe" / "alerts_test.yml"


def samples() -> set[str]:
    """The names that scrapes have."""
    kinds = metrics.kinds()
    names = {name for name, kind in kinds.items() if kind != "histogram"}
    histograms = {name for name, kind in kinds.items() if kind == "histogram"}
    return names | {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_metric_asked_for_is_exported(name):
    asked = metrics_in(EXPRESSIONS[name])
    assert asked <= samples()
    assert asked or "up{" in EXPRESSIONS[name]


def test_every_row_of_the_dashboard_has_panels_that_do_not_overlap():
    places = set()
    for panel in panels():
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert x < 24
                assert (x, y) not in places, panel["title"]
                places.add((x, y))
    rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert rows == [
        *("Service level", "Queues", "KV tiers and fragmentation", "Steps and RPC"),
        *("Swaps", "Workers"),
    ]
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_every_alert_says_how_bad_it_is_and_is_explained():
    page = (ROOT / "docs" / "observability.md").read_text()
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "description"}
        assert f"`{name}`" in page


def test_every_span_is_explained():
    page = (ROOT / "docs" / "observability.md").read_text()
    recorded = re.compile(r'(?:record|_record|record_span|start_span)\(\s*\*?\(?"(\w+)"')
    sources = (
        "router/request/admission.py",
        "router/request/inference.py",
        "scheduler_svc/observers/spans.py",
        "gpu_worker/step/spans.py",
    )
    found = {name for path in sources for name in recorded.findall((ROOT / path).read_text())}
    assert found >= {"request", "tokenize", "queue", "step", "prefill", "prefill_chunk", "decode"}
    for name in (*found, "preempted", "kv_transfer"):
        assert f"`{name}`" in page


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: `make observe-test` fetches it")
def test_prometheus_takes_the_rules_and_they_fire():
    assert PROMTOOL is not None
    for arguments in (["check", "rules", RULES], ["test", "rules", ALERT_TESTS]):
        command = [PROMTOOL, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried():
    tests = yaml.safe_load(ALERT_TESTS.read_text())["tests"]
    tried = {case["alertname"] for test in tests for case in test["alert_rule_test"]}
    assert tried == alerts().keys()
