"""What the worker tells Prometheus."""

from prometheus_client import Counter, Gauge, Histogram

STEP_SECONDS = Histogram(
    "quire_worker_step_seconds",
    "Time from taking a step up to having its result.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
COMPUTED_TOKENS = Counter("quire_worker_computed_tokens", "Tokens that went through the model.")
SAMPLED_TOKENS = Counter("quire_worker_sampled_tokens", "Tokens sampled and reported.")
FAILED_ROWS = Counter("quire_worker_failed_rows", "Sequences whose logits were not finite.")
ROWS_USED = Gauge("quire_worker_rows_used", "Rows that hold a sequence.")
KV_BYTES = Gauge("quire_worker_kv_bytes", "Size of the KV pool.")
