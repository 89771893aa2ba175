"""Prometheus metrics that steps and requests update, such as histograms of the times of steps.

Other counters are kept by the cores; `collectors.py` reads those counters at each scrape.
"""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from scheduler_svc.observers.steps import AnsweredStep, SentStep

_STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
_CPU_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
_QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The metrics of one worker; a `StepObserver`."""

    schedule: Histogram
    update: Histogram
    step_rpc: Histogram
    step_execute: Histogram
    step_tokens: Histogram
    queue_time: Histogram
    expired: Counter
    """Counts sequences whose deadline passed while they were waiting."""
    refused_late: Counter
    """Counts requests that were refused because they could not meet their deadline."""

    def on_sent(self, step: SentStep) -> None:
        self.schedule.observe(step.took_s)
        self.step_tokens.observe(step.plan.num_scheduled_tokens)

    def on_answered(self, step: AnsweredStep) -> None:
        self.update.observe(step.update_s)
        self.step_rpc.observe(step.rpc_s)
        self.step_execute.observe(step.execute_s)


class SchedulerMetrics:
    """The histograms and counters of all workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histograms: list[Histogram] = []

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, help_text, ["worker"], buckets=buckets, registry=registry)
            self._histograms.append(made)
            return made

        self._schedule = histogram(
            "quire_schedule_seconds", "Time to plan a step and to encode it.", _CPU_BUCKETS_S
        )
        self._update = histogram(
            "quire_update_seconds",
            "Time to apply a step's result and to write the routers' messages.",
            _CPU_BUCKETS_S,
        )
        self._step_rpc = histogram(
            "quire_step_rpc_seconds",
            "Time from sending a step to receiving its result; steps overlap.",
            _STEP_BUCKETS_S,
        )
        self._step_execute = histogram(
            "quire_step_execute_seconds",
            "Time that the worker spent on a step, by its own measurement.",
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
            "Moves of live requests between workers, by end: arrived, ended or failed.",
            ["source", "target", "end"],
            registry=registry,
        )

    def of(self, worker: str) -> EngineMetrics:
        """Return the metrics of one worker."""
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
        """Stop exporting the metrics of a worker that has left the fleet."""
        for histogram in self._histograms:
            histogram.remove(worker)
        for stage in ("waiting", "refused"):
            self._deadline_drops.remove(worker, stage)
