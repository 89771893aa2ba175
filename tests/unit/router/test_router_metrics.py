"""Metrics of the router with code of their own, beyond prometheus_client's."""

from prometheus_client import CollectorRegistry, Histogram

from router.metrics import BatchedHistogram


def test_a_batched_histogram_counts_what_a_histogram_counts():
    values = [0.0, 0.5, 0.75, 1.0, 3.0, 100.0] * 1000
    samples = []
    for kind in (BatchedHistogram, Histogram):
        registry = CollectorRegistry()
        histogram = kind("quire_test", "", buckets=(0.5, 1.0, 4.0), registry=registry)
        for part in (values[:5], values[5:]):
            if kind is BatchedHistogram:
                histogram.observe_all(part)
            else:
                for value in part:
                    histogram.observe(value)
            list(registry.collect())
        (family,) = registry.collect()
        samples.append(
            [(s.name, s.labels, s.value) for s in family.samples if not s.name.endswith("_created")]
        )
    assert samples[0] == samples[1]
