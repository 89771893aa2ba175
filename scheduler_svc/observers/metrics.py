"""What the scheduler exports to Prometheus.

What a core counts anyway is read when the metrics are asked for; a step itself pays for a few
histogram observations, whatever the number of sequences.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.core.config import SchedulerLoad

_STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
_CPU_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
_QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What one worker's engine observes as it happens."""

    schedule: Histogram
    update: Histogram
    step_rpc: Histogram
    step_execute: Histogram
    step_tokens: Histogram
    queue_time: Histogram
    expired: Counter
    """Sequences whose deadline passed while they waited."""
    refused_late: Counter
    """Requests that could not have met their deadline."""


class SchedulerMetrics:
    """The histograms of all engines, by worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help_text, ["worker"], buckets=buckets, registry=registry)

        self._schedule = histogram(
            "quire_schedule_seconds", "Time to plan a step and to encode it.", _CPU_BUCKETS_S
        )
        self._update = histogram(
            "quire_update_seconds",
            "Time to apply a step's result and to make the routers' messages.",
            _CPU_BUCKETS_S,
        )
        self._step_rpc = histogram(
            "quire_step_rpc_seconds",
            "Time from sending a step to having its result; steps overlap.",
            _STEP_BUCKETS_S,
        )
        self._step_execute = histogram(
            "quire_step_execute_seconds",
            "Time the worker spent on a step, as it says.",
            _STEP_BUCKETS_S,
        )
        self._queue_time = histogram(
            "quire_request_queue_time_seconds",
            "Time from a sequence's arrival until it left the queue.",
            _QUEUE_BUCKETS_S,
        )

        self._step_tokens = histogram(
            "quire_iteration_tokens", "Tokens that a step computes.", _TOKEN_BUCKETS
        )
        self._deadline_drops = Counter(
            "quire_deadline_drops",
            "Requests refused because they could not meet their deadline (stage refused), and"
            " sequences whose deadline passed while they waited (stage waiting).",
            ["worker", "stage"],
            registry=registry,
        )
        self.migrations = Counter(
            "quire_migrations",
            "Requests moved between workers with their KV, or not after all.",
            ["source", "target", "end"],
            registry=registry,
        )

    def of(self, worker: str) -> EngineMetrics:
        """Return the histograms of one worker."""
        return EngineMetrics(
            schedule=self._schedule.labels(worker),
            update=self._update.labels(worker),
            step_rpc=self._step_rpc.labels(worker),
            step_execute=self._step_execute.labels(worker),
            step_tokens=self._step_tokens.labels(worker),
            queue_time=self._queue_time.labels(worker),
            expired=self._deadline_drops.labels(worker, "waiting"),
            refused_late=self._deadline_drops.labels(worker, "refused"),
        )

    def forget(self, worker: str) -> None:
        """Export nothing of a worker any more: those of a cluster never have the same address."""
        for histogram in (
            self._schedule,
            self._update,
            self._step_rpc,
            self._step_execute,
            self._step_tokens,
            self._queue_time,
        ):
            histogram.remove(worker)
        for where in ("waiting", "refused"):
            self._deadline_drops.remove(worker, where)


class LoadCollector(Collector):
    """Reads the loads of the attached workers at each scrape."""

    def __init__(
        self,
        loads: Callable[[], Mapping[str, SchedulerLoad | None]],
        unloaded: Callable[[], Collection[str]],
    ) -> None:
        """`loads` gives each worker's load; None: not attached, as those without a model are."""
        self._loads = loads
        self._unloaded = unloaded

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each metric, with a sample for each worker."""
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


_Read = Callable[[SchedulerLoad], float]

_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    (
        "quire_num_requests_running",
        "Sequences that hold device blocks.",
        lambda load: load.num_running,
    ),
    (
        "quire_num_requests_waiting",
        "Sequences that wait for admission.",
        lambda load: load.num_waiting,
    ),
    (
        "quire_kv_cache_usage_perc",
        "Share of the device blocks that sequences hold, in [0, 1].",
        lambda load: 1 - (load.num_free_blocks + load.num_cached_blocks) / load.num_blocks,
    ),
    (
        "quire_memory_level",
        "How short the worker's memory is: 0 enough; 1 warning, no more run; 2 critical, fewer do.",
        lambda load: load.memory_level.value,
    ),
    ("quire_kv_blocks", "Device blocks.", lambda load: load.num_blocks),
    ("quire_kv_free_blocks", "Device blocks that hold nothing.", lambda load: load.num_free_blocks),
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
        "Host blocks that hold nothing.",
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
        "Disk blocks that hold nothing.",
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
        "Tokens computed again, of sequences preempted, or live at a worker or scheduler before.",
        lambda load: load.num_recomputed_tokens,
    ),
    (
        "quire_adopted_tokens",
        "Tokens of sequences of the scheduler before whose KV the worker still had.",
        lambda load: load.num_adopted_tokens,
    ),
    (
        "quire_kv_swapped_out_blocks",
        "Blocks copied from device to host, demoted ones included.",
        lambda load: load.num_swapped_out_blocks,
    ),
    (
        "quire_kv_swapped_in_blocks",
        "Blocks copied from host to device, promoted ones included.",
        lambda load: load.num_swapped_in_blocks,
    ),
    (
        "quire_kv_demoted_blocks",
        "Cached blocks copied to the host when the device needed their room.",
        lambda load: load.num_demoted_blocks,
    ),
    (
        "quire_kv_promoted_blocks",
        "Blocks that prompts found in the host's part of the prefix cache.",
        lambda load: load.num_promoted_blocks,
    ),
    (
        "quire_kv_moved_blocks",
        "Device blocks moved by defragmentation; two that change places are two.",
        lambda load: load.num_moved_blocks,
    ),
    (
        "quire_kv_defragmentations",
        "Passes of defragmentation that have ended.",
        lambda load: load.num_defragmentations,
    ),
    (
        "quire_kv_stored_blocks",
        "Blocks stored on the disk, spilled ones included.",
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
        "Sequences preempted so that fewer run, because the worker's memory was critical.",
        lambda load: load.num_memory_preemptions,
    ),
    ("quire_steps", "Steps scheduled.", lambda load: load.num_steps),
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
