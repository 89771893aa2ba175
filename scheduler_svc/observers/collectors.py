"""Prometheus metrics read at each scrape: loads, queues and block space of the workers."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.core.compact.fragmentation import Fragmentation, FragmentationLevel, SpaceReport
from scheduler_svc.core.interface.config import SchedulerLoad

MAX_TENANTS = 20
"""The limit on tenants that have a metric series of their own. There may be many tenants, because
clients choose their names."""
OTHER_TENANTS = "other"
_LEVELS = tuple(FragmentationLevel)


class LoadCollector(Collector):
    """Collects the load of each worker."""

    def __init__(
        self,
        loads: Callable[[], Mapping[str, SchedulerLoad | None]],
        unloaded: Callable[[], Collection[str]],
    ) -> None:
        """Make a collector that calls its arguments at each scrape.

        Args:
            loads: Returns the load of each worker, or None for a worker that is not attached.
            unloaded: Returns the names of the workers whose model is unloaded.
        """
        self._loads = loads
        self._unloaded = unloaded

    def collect(self) -> Iterable[Metric]:
        loads = self._loads()
        attached = GaugeMetricFamily(
            "quire_worker_attached", "1 if the worker is attached, else 0.", labels=["worker"]
        )
        for worker, load in loads.items():
            attached.add_metric([worker], 1.0 if load is not None else 0.0)
        yield attached
        unloaded = GaugeMetricFamily(
            "quire_worker_model_unloaded",
            "1 if the worker is not attached because its model is unloaded, else 0.",
            labels=["worker"],
        )
        without_model = self._unloaded()
        for worker in loads:
            unloaded.add_metric([worker], 1.0 if worker in without_model else 0.0)
        yield unloaded
        for name, help_text, gauge in _GAUGES:
            yield _fill(GaugeMetricFamily(name, help_text, labels=["worker"]), loads, gauge)
        for name, help_text, counter in _COUNTERS:
            yield _fill(CounterMetricFamily(name, help_text, labels=["worker"]), loads, counter)


class SpaceCollector(Collector):
    """Collects how well each attached worker uses its blocks.

    A scrape takes time proportional to the number of blocks.
    """

    def __init__(self, spaces: Callable[[], Mapping[str, SpaceReport]]) -> None:
        """`spaces` returns a report for each attached worker."""
        self._spaces = spaces

    def collect(self) -> Iterable[Metric]:
        spaces = self._spaces()
        for name, help_text, read in _SPACE_GAUGES:
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


class QueueCollector(Collector):
    """Collects waiting sequences by tenant, and the ages of the oldest steps in flight."""

    def __init__(
        self,
        queued_by_tenant: Callable[[], Counter[str]],
        oldest_step_ages_s: Callable[[], Mapping[str, float]],
        num_unplaced: Callable[[], int],
    ) -> None:
        """Make a collector that calls its arguments at each scrape.

        Args:
            queued_by_tenant: Returns how many sequences of each tenant wait, at all workers.
            oldest_step_ages_s: Returns, for each attached worker, the age of its oldest step in
                flight.
            num_unplaced: Returns how many sequences have not been placed at a worker yet.
        """
        self._queued_by_tenant = queued_by_tenant
        self._oldest_step_ages_s = oldest_step_ages_s
        self._num_unplaced = num_unplaced

    def collect(self) -> Iterable[Metric]:
        queued = GaugeMetricFamily(
            "quire_num_requests_waiting_by_tenant",
            f"Waiting sequences of each of the {MAX_TENANTS} tenants with the most, and of all"
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
            "How long the oldest step has been in flight; 0 if none is.",
            labels=["worker"],
        )
        for worker, age_s in self._oldest_step_ages_s().items():
            ages.add_metric([worker], age_s)
        yield ages
        yield GaugeMetricFamily(
            "quire_num_requests_unplaced",
            "Sequences that wait for a worker to be attached or loaded, or for a copy of their"
            " prefix.",
            self._num_unplaced(),
        )


_Read = Callable[[SchedulerLoad], float]

_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    (
        "quire_num_requests_running",
        "Running sequences, which hold device blocks.",
        lambda load: load.num_running,
    ),
    (
        "quire_num_requests_waiting",
        "Sequences that wait for admission.",
        lambda load: load.num_waiting,
    ),
    (
        "quire_kv_cache_usage_perc",
        "Share of the device blocks that sequences or pins hold, in [0, 1].",
        lambda load: 1 - (load.num_free_blocks + load.num_cached_blocks) / load.num_blocks,
    ),
    (
        "quire_memory_level",
        "Memory pressure: 0 none; 1 warning, no more sequences run than before; 2 critical, fewer.",
        lambda load: load.memory_level.value,
    ),
    ("quire_kv_blocks", "Device blocks.", lambda load: load.num_blocks),
    ("quire_kv_free_blocks", "Device blocks without content.", lambda load: load.num_free_blocks),
    (
        "quire_kv_cached_blocks",
        "Device blocks that only the prefix cache holds.",
        lambda load: load.num_cached_blocks,
    ),
    (
        "quire_kv_pinned_blocks",
        "Device blocks that pins keep in the prefix cache.",
        lambda load: load.num_pinned_blocks,
    ),
    (
        "quire_num_requests_swapped",
        "Sequences that wait for admission with their KV in host or disk blocks.",
        lambda load: load.num_swapped,
    ),
    ("quire_kv_host_blocks", "Host blocks.", lambda load: load.num_host_blocks),
    (
        "quire_kv_free_host_blocks",
        "Host blocks without content.",
        lambda load: load.num_free_host_blocks,
    ),
    (
        "quire_kv_cached_host_blocks",
        "Host blocks that only the prefix cache holds.",
        lambda load: load.num_cached_host_blocks,
    ),
    ("quire_kv_disk_blocks", "Disk blocks.", lambda load: load.num_disk_blocks),
    (
        "quire_kv_free_disk_blocks",
        "Disk blocks without content.",
        lambda load: load.num_free_disk_blocks,
    ),
    (
        "quire_kv_cached_disk_blocks",
        "Disk blocks that only the prefix cache holds.",
        lambda load: load.num_cached_disk_blocks,
    ),
)

_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    (
        "quire_prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        lambda load: load.prefix_cache_queries,
    ),
    (
        "quire_prefix_cache_hits",
        "Tokens found in the prefix cache.",
        lambda load: load.prefix_cache_hits,
    ),
    ("quire_num_preemptions", "Sequences preempted.", lambda load: load.num_preemptions),
    (
        "quire_recomputed_tokens",
        "Tokens computed again after a preemption, or after a move to another worker or scheduler.",
        lambda load: load.num_recomputed_tokens,
    ),
    (
        "quire_adopted_tokens",
        "Tokens of an earlier scheduler's sequences whose KV the worker still held.",
        lambda load: load.num_adopted_tokens,
    ),
    (
        "quire_kv_swapped_out_blocks",
        "Blocks copied from device to host, including demoted ones.",
        lambda load: load.num_swapped_out_blocks,
    ),
    (
        "quire_kv_swapped_in_blocks",
        "Blocks copied from host to device, including promoted ones.",
        lambda load: load.num_swapped_in_blocks,
    ),
    (
        "quire_kv_demoted_blocks",
        "Cached blocks copied to the host when the device evicted them.",
        lambda load: load.num_demoted_blocks,
    ),
    (
        "quire_kv_promoted_blocks",
        "Blocks that admission found on the host.",
        lambda load: load.num_promoted_blocks,
    ),
    (
        "quire_kv_moved_blocks",
        "Device blocks moved by defragmentation; an exchange of two counts as two.",
        lambda load: load.num_moved_blocks,
    ),
    (
        "quire_kv_defragmentations",
        "Completed passes of defragmentation.",
        lambda load: load.num_defragmentations,
    ),
    (
        "quire_kv_stored_blocks",
        "Blocks stored on the disk, including spilled ones.",
        lambda load: load.num_stored_blocks,
    ),
    (
        "quire_kv_loaded_blocks",
        "Blocks loaded from the disk.",
        lambda load: load.num_loaded_blocks,
    ),
    (
        "quire_kv_failed_disk_moves",
        "Stores to and loads from the disk that failed.",
        lambda load: load.num_failed_disk_moves,
    ),
    (
        "quire_kv_spilled_blocks",
        "Blocks of swapped sequences moved to the disk to make room on the host.",
        lambda load: load.num_spilled_blocks,
    ),
    (
        "quire_memory_preemptions",
        "Sequences preempted because the worker's memory was critical.",
        lambda load: load.num_memory_preemptions,
    ),
    ("quire_steps", "Steps scheduled.", lambda load: load.num_steps),
)

_SPACE_GAUGES: tuple[tuple[str, str, Callable[[Fragmentation], float]], ...] = (
    (
        "quire_kv_fragmentation_rate",
        "1 - longest run of free blocks / free blocks; cached blocks count as free.",
        lambda fragmentation: fragmentation.rate,
    ),
    (
        "quire_kv_longest_free_run_blocks",
        "The longest run of adjacent free blocks.",
        lambda fragmentation: fragmentation.longest_free_run,
    ),
    (
        "quire_kv_fragmentation_level",
        "0 low (rate below 0.2), 1 medium, 2 high (0.5 and more).",
        lambda fragmentation: _LEVELS.index(fragmentation.level),
    ),
)


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily,
    loads: Mapping[str, SchedulerLoad | None],
    read: _Read,
) -> Metric:
    for worker, load in loads.items():
        if load is not None:
            family.add_metric([worker], read(load))
    return family
