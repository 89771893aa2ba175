"""Generates the page of metrics, from the collectors of every process."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

import gpu_worker.metrics
import router.metrics
import rpc.http_server
import rpc.observe.stall_report
from router.gateway_metrics import GatewayMetrics
from router.request.cells import Cells
from scheduler_svc.observers.collectors import LoadCollector, QueueCollector, SpaceCollector
from scheduler_svc.observers.metrics import SchedulerMetrics

_HEAD = """# Metrics

Each process answers `GET /metrics` on its HTTP port, in Prometheus' text format. Names follow
vLLM's where it has the same. Counters end in `_total`; histograms have `_bucket`, `_sum`, `_count`.
"""

Row = tuple[str, str, tuple[str, ...], str]
"""Name, kind, labels, description."""


def page() -> str:
    """Return the page, in Markdown."""
    parts = [_HEAD]
    for title, rows in (
        ("Every process", [*_of_module(rpc.observe.stall_report), *_of_module(rpc.http_server)]),
        ("Router", _of_router()),
        ("Scheduler", _of_scheduler()),
        ("Worker", _of_module(gpu_worker.metrics)),
    ):
        table = ["| metric | kind | labels | |", "|---|---|---|---|"]
        table += [f"| `{n}` | {k} | {', '.join(labels)} | {text} |" for n, k, labels, text in rows]
        parts += [f"## {title}\n", *table, ""]
    return "\n".join(parts)


def names() -> set[str]:
    """Return every metric's declared name."""
    return set(kinds())


def kinds() -> dict[str, str]:
    """Return every metric's kind, by name."""
    modules = (rpc.observe.stall_report, rpc.http_server, gpu_worker.metrics)
    rows = [*_of_router(), *_of_scheduler(), *(row for each in modules for row in _of_module(each))]
    return {name: kind for name, kind, *_ in rows}


def _of_module(module: object) -> list[Row]:
    metrics = [value for value in vars(module).values() if isinstance(value, MetricWrapperBase)]
    return sorted(map(_of_metric, metrics))


def _of_metric(metric: MetricWrapperBase) -> Row:
    # prometheus_client has no public API for a metric's description and labels.
    labels = tuple(metric._labelnames)  # noqa: SLF001
    return _name(metric._name, metric._type), metric._type, labels, metric._documentation  # noqa: SLF001


def _of_scheduler() -> list[Row]:
    registry = CollectorRegistry()
    made = SchedulerMetrics(registry)
    made.of("a worker")
    rows = [
        _of_metric(collector)
        for collector in registry._collector_to_names  # noqa: SLF001
        if isinstance(collector, MetricWrapperBase)
    ]
    collectors: list[Collector] = [
        LoadCollector(dict, tuple),
        SpaceCollector(dict),
        QueueCollector(Counter, dict, int),
    ]
    for collector in collectors:
        rows += _of_collector(collector)
    return sorted(rows)


def _of_router() -> list[Row]:
    nothing = cast("Cells", SimpleNamespace(all=(), admitted=()))
    return sorted([*_of_module(router.metrics), *_of_collector(GatewayMetrics(nothing))])


def _of_collector(collector: Collector) -> Iterator[Row]:
    for family in collector.collect():
        # Without a worker there are no samples from which to read the labels.
        labels = tuple(family._labelnames)  # type: ignore[attr-defined]  # noqa: SLF001
        yield _name(family.name, family.type), family.type, labels, family.documentation


def _name(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name
