"""The router's Prometheus metrics."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.samples import Sample

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_SLOW_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_MODEL: Final = ("model_name",)
"""The label with the model's name."""
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)


class BatchedHistogram(Histogram):
    """A histogram that counts its values in batches, because some metrics get a value per token."""

    _MOST = 4096

    def _metric_init(self) -> None:
        super()._metric_init()
        self._values: list[float] = []

    def observe_all(self, amounts: Iterable[float]) -> None:
        """Observe the values of a step."""
        self._values += amounts
        if len(self._values) >= self._MOST:
            self._count()

    def _count(self) -> None:
        values, self._values = np.array(self._values), []
        places = np.searchsorted(self._upper_bounds, values)  # the bounds are inclusive
        for place, num in enumerate(np.bincount(places)):
            self._buckets[place].inc(int(num))
        self._sum.inc(float(values.sum()))

    def _child_samples(self) -> Iterable[Sample]:
        self._count()
        return super()._child_samples()


NUM_REQUESTS_LIVE = Gauge(
    "quire_num_requests_live",
    "Admitted requests that have not been read to the end.",
    labelnames=_MODEL,
)
REQUEST_SUCCESS = Counter(
    "quire_request_success",
    "Finished outputs, by finish reason.",
    labelnames=(*_MODEL, "finished_reason"),
)
REQUESTS_REFUSED = Counter(
    "quire_requests_refused",
    "Refused requests, by status; `model_name` is empty if the model is unknown.",
    labelnames=(*_MODEL, "code"),
)
PROMPT_TOKENS = Counter(
    "quire_prompt_tokens", "Prompt tokens of submitted requests.", labelnames=_MODEL
)
GENERATION_TOKENS = Counter("quire_generation_tokens", "Tokens produced.", labelnames=_MODEL)
REQUEST_PROMPT_TOKENS = Histogram(
    "quire_request_prompt_tokens",
    "Prompt tokens of each submitted request.",
    labelnames=_MODEL,
    buckets=_TOKENS,
)
REQUEST_GENERATION_TOKENS = Histogram(
    "quire_request_generation_tokens",
    "Tokens of each finished output.",
    labelnames=_MODEL,
    buckets=_TOKENS,
)
TIME_TO_FIRST_TOKEN = Histogram(
    "quire_time_to_first_token_seconds",
    "Time from submitting a request to the first token of its first output.",
    labelnames=_MODEL,
    buckets=_SLOW_S,
)
INTER_TOKEN_LATENCY = BatchedHistogram(
    "quire_inter_token_latency_seconds",
    "Time between two tokens of one output.",
    labelnames=_MODEL,
    buckets=_FAST_S,
)
TIME_PER_OUTPUT_TOKEN = Histogram(
    "quire_request_time_per_output_token_seconds",
    "Mean time between two tokens of each finished output.",
    labelnames=_MODEL,
    buckets=_FAST_S,
)
E2E_REQUEST_LATENCY = Histogram(
    "quire_e2e_request_latency_seconds",
    "Time from the submission of a request to the end of its last output.",
    labelnames=_MODEL,
    buckets=_SLOW_S,
)
SCHEDULER_CONNECTED = Gauge(
    "quire_scheduler_connected",
    "Schedulers that the router is connected to.",
    labelnames=_MODEL,
)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The metrics of one model, looked up once because some are updated for every token."""

    model_name: str
    num_requests_live: Gauge
    prompt_tokens: Counter
    generation_tokens: Counter
    request_prompt_tokens: Histogram
    request_generation_tokens: Histogram
    time_to_first_token: Histogram
    inter_token_latency: BatchedHistogram
    time_per_output_token: Histogram
    e2e_request_latency: Histogram
    scheduler_connected: Gauge

    def succeeded(self, finish_reason: str) -> None:
        """Count an output that has ended."""
        REQUEST_SUCCESS.labels(self.model_name, finish_reason).inc()


@cache
def of_model(model_name: str) -> ModelMetrics:
    """Return the metrics of the model that the router's flags name `model_name`."""
    return ModelMetrics(
        model_name,
        NUM_REQUESTS_LIVE.labels(model_name),
        PROMPT_TOKENS.labels(model_name),
        GENERATION_TOKENS.labels(model_name),
        REQUEST_PROMPT_TOKENS.labels(model_name),
        REQUEST_GENERATION_TOKENS.labels(model_name),
        TIME_TO_FIRST_TOKEN.labels(model_name),
        INTER_TOKEN_LATENCY.labels(model_name),
        TIME_PER_OUTPUT_TOKEN.labels(model_name),
        E2E_REQUEST_LATENCY.labels(model_name),
        SCHEDULER_CONNECTED.labels(model_name),
    )


AUDIT_LINES_LOST = Counter("quire_audit_lines_lost", "Requests not written to --audit-log.")
