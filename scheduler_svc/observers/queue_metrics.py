"""What the scheduler exports to Prometheus of who waits, and for how long nothing has moved."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

MAX_TENANTS = 20
"""So many have a series of their own at a time: a tenant may be whatever a client says."""
OTHER_TENANTS = "other"


class QueueCollector(Collector):
    """Looks at the queues at each scrape."""

    def __init__(
        self,
        queued_by_tenant: Callable[[], Counter[str]],
        oldest_step_ages_s: Callable[[], Mapping[str, float]],
        num_unplaced: Callable[[], int],
    ) -> None:
        """The first counts sequences at all workers, the last those at none.

        The second is by attached worker.
        """
        self._queued_by_tenant = queued_by_tenant
        self._oldest_step_ages_s = oldest_step_ages_s
        self._num_unplaced = num_unplaced

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each metric."""
        queued = GaugeMetricFamily(
            "quire_num_requests_waiting_by_tenant",
            f"Sequences that wait, of the {MAX_TENANTS} tenants with most of them, and of all"
            f" others ({OTHER_TENANTS}).",
            labels=["tenant"],
        )
        counts = self._queued_by_tenant()
        listed = counts.most_common(MAX_TENANTS)
        for tenant, count in listed:
            queued.add_metric([tenant], count)
        if num_others := counts.total() - sum(count for _, count in listed):
            queued.add_metric([OTHER_TENANTS], num_others)
        yield queued
        ages = GaugeMetricFamily(
            "quire_oldest_step_age_seconds",
            "How long the oldest step in flight has been so; 0 if none is.",
            labels=["worker"],
        )
        for worker, age_s in self._oldest_step_ages_s().items():
            ages.add_metric([worker], age_s)
        yield ages
        yield GaugeMetricFamily(
            "quire_num_requests_unplaced",
            "Sequences that wait for a worker to be attached, or to have its model loaded.",
            self._num_unplaced(),
        )
