"""A real Prometheus scrapes a live service, and answers all queries of dashboard and alerts."""

from collections.abc import Iterator

import pytest

from docs.generate import metrics
from quire.cli.__main__ import main as quire
from quire.cli.up.layout import SHIPPED_MODEL
from tests.e2e.child import eventually
from tests.e2e.generation import generate_request, read
from tests.e2e.service import Service
from tests.observe.expressions import alerts, metrics_in, of_dashboard
from tests.observe.prometheus import PROMETHEUS, Prometheus

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="no prometheus, and `make observe-test` could not have it"
)

SILENT = {
    *("Errors and refusals: ended with an error", "Errors and refusals: refused {{code}}"),
    *("Lower tiers in use: disk {{worker}}", "Dropped for their deadline: {{stage}}"),
    *("Waiting by tenant: {{tenant}}",),
}
"""Panels without data in a healthy service without a disk tier."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    worker = ["--num-blocks=12", "--block-size=16", "--host-kv-memory-gb=0.01"]
    with Service(
        tmp_path_factory.mktemp("service"),
        SHIPPED_MODEL,
        worker=worker,
        scheduler=["--preemption-mode=swap"],
    ) as service:
        yield service


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    targets = {
        "router": service.router.http,
        "scheduler": service.scheduler.http,
        "worker": service.worker.http,
    }
    with Prometheus(tmp_path_factory.mktemp("prometheus"), targets) as prometheus:
        yield prometheus


@pytest.fixture(scope="module")
def loaded(service: Service, prometheus: Prometheus) -> Prometheus:
    """The service after requests that did not fit together, between two scrapes."""
    prometheus.wait_for('count(up{job="quire"} == 1) == 3')
    requests = [
        generate_request([i, *range(20, 59)], max_tokens=80, ignore_eos=True) for i in range(3)
    ]
    for stream in [service.stub.Generate(request) for request in requests]:
        read(stream)
    prometheus.wait_for('quire_request_success_total{finished_reason="length"} == 3')
    prometheus.wait_for("rate(quire_worker_sampled_tokens_total[1m]) > 0")
    prometheus.wait_for("rate(quire_steps_total[1m]) > 0")
    prometheus.wait_for("rate(quire_request_success_total[1m])")  # two samples of a new series
    return prometheus


@pytest.fixture(scope="module")
def shown(loaded: Prometheus) -> dict[str, list]:
    """The data of each panel, by its name."""
    return {name: loaded.query(expression) for name, expression in of_dashboard().items()}


@pytest.mark.parametrize("name", of_dashboard())
def test_panel_shows_something(shown: dict[str, list], name: str):
    assert shown[name] or name in SILENT


def test_rules_are_evaluated_without_an_error(loaded: Prometheus):
    def evaluated() -> list[dict] | None:
        rules = loaded.get("rules")["groups"][0]["rules"]
        return rules if all(rule["health"] != "unknown" for rule in rules) else None

    rules = eventually(evaluated, "all rules were evaluated")
    assert {rule["name"] for rule in rules} == alerts().keys()
    assert {rule["health"] for rule in rules} == {"ok"}


def test_nothing_is_scraped_that_the_reference_does_not_name(loaded: Prometheus):
    kinds = metrics.kinds()
    names = set(loaded.get("label/__name__/values"))
    for name in (name for name in names if name.startswith("quire_")):
        base = name
        for suffix in ("_bucket", "_sum", "_count", "_created"):
            base = base.removesuffix(suffix)
        assert {name, base, f"{base}_total"} & kinds.keys(), name


def test_every_metric_that_alerts_ask_for_is_scraped(loaded: Prometheus):
    names = set(loaded.get("label/__name__/values"))
    asked = set().union(*(metrics_in(rule["expr"]) for rule in alerts().values()))
    assert asked - names == {"quire_requests_refused_total"}, "of codes that were never given"


def test_unloaded_worker_is_shown_with_the_waiting_requests(loaded: Prometheus, shown, service):
    assert shown
    scheduler = ("--scheduler", f"unix:{service.uds['scheduler']}")
    assert quire(["unload", *scheduler]) == 0
    stream = service.stub.Generate(generate_request([5, 6, 7], max_tokens=3, ignore_eos=True))
    loaded.wait_for('ALERTS{alertname="QuireNoWorker",alertstate="pending"}')
    loaded.wait_for('absent(ALERTS{alertname="QuireWorkerLost"})')
    assert quire(["load", *scheduler]) == 0
    assert len(read(stream).outputs[0]) == 3
    loaded.wait_for("quire_worker_attached == 1", 60)
    loaded.wait_for('absent(ALERTS{alertname="QuireNoWorker"})')


def test_lost_worker_is_reported_soon(loaded: Prometheus, shown, service: Service):
    assert shown
    service.worker.kill()
    loaded.wait_for('ALERTS{alertname="QuireWorkerLost",alertstate="pending"}')
    service.start_worker()
    loaded.wait_for("quire_worker_attached == 1", 60)
