"""What the scheduler exports to Prometheus of how well block space is used."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.core.compact.fragmentation import Fragmentation, FragmentationLevel, SpaceReport

_LEVELS = tuple(FragmentationLevel)

_GAUGES: tuple[tuple[str, str, Callable[[Fragmentation], float]], ...] = (
    (
        "quire_kv_fragmentation_rate",
        "1 - longest run of free blocks / free blocks; free is what nobody holds.",
        lambda fragmentation: fragmentation.rate,
    ),
    (
        "quire_kv_longest_free_run_blocks",
        "The longest run of neighbouring blocks that are all free.",
        lambda fragmentation: fragmentation.longest_free_run,
    ),
    (
        "quire_kv_fragmentation_level",
        "0 low (rate below 0.2), 1 medium, 2 high (0.5 and more).",
        lambda fragmentation: _LEVELS.index(fragmentation.level),
    ),
)


class SpaceCollector(Collector):
    """Looks at the blocks of each attached worker at each scrape."""

    def __init__(self, spaces: Callable[[], Mapping[str, SpaceReport]]) -> None:
        """`spaces` gives a report for each worker that is attached."""
        self._spaces = spaces

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each metric, with a sample for each worker and tier."""
        spaces = self._spaces()
        for name, help_text, read in _GAUGES:
            family = GaugeMetricFamily(name, help_text, labels=["worker", "tier"])
            for worker, space in spaces.items():
                for tier, fragmentation in (("device", space.device), ("host", space.host)):
                    family.add_metric([worker, tier], read(fragmentation))
            yield family
        occupancy = GaugeMetricFamily(
            "quire_kv_token_occupancy",
            "Share of the running sequences' token slots that hold a token's KV; 1 if none run.",
            labels=["worker"],
        )
        for worker, space in spaces.items():
            occupancy.add_metric([worker], space.occupancy)
        yield occupancy
