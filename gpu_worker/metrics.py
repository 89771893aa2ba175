"""The worker's Prometheus metrics."""

from prometheus_client import Counter, Gauge, Histogram

STEP_SECONDS = Histogram(
    "quire_worker_step_seconds",
    "Time from starting a step to having its result.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
DEVICE_BUSY_SECONDS = Counter(
    "quire_worker_device_busy_seconds",
    "Time that the device worked on steps, by its own clock; the rest of the time it was idle.",
)
OUT_OF_MEMORY = Counter(
    "quire_worker_out_of_memory",
    "Steps, or parts of steps, that did not fit in the device's memory and were split.",
)
COMPUTED_TOKENS = Counter("quire_worker_computed_tokens", "Tokens that went through the model.")
SAMPLED_TOKENS = Counter("quire_worker_sampled_tokens", "Tokens sampled and reported.")
FAILED_ROWS = Counter("quire_worker_failed_rows", "Sequences whose logits were not finite.")
ROWS_USED = Gauge("quire_worker_rows_used", "Rows that hold a sequence.")
UNLOADED = Gauge(
    "quire_worker_unloaded", "1 while the model is unloaded or being loaded again, else 0."
)
KV_BYTES = Gauge("quire_worker_kv_bytes", "Size of the KV pool.")
SPEC_DECODE_DRAFTS = Counter(
    "quire_worker_spec_decode_num_drafts",
    "How often tokens were guessed for a row; 1 + accepted / drafts is the mean gain in tokens.",
)
SPEC_DECODE_DRAFT_TOKENS = Counter(
    "quire_worker_spec_decode_num_draft_tokens", "Tokens that were guessed and verified."
)
SPEC_DECODE_ACCEPTED_TOKENS = Counter(
    "quire_worker_spec_decode_num_accepted_tokens",
    "Guessed tokens that were right; their share of all guessed tokens is the acceptance rate.",
)
DEVICE_MEMORY_BYTES = Gauge(
    "quire_worker_device_memory_bytes",
    "The device's memory: total and free by its driver, reserved and allocated by torch's"
    " allocator; for a CPU, total and free memory that the process may use.",
    ["kind"],
)
DEVICE_MEMORY_FRAGMENTATION = Gauge(
    "quire_worker_device_memory_fragmentation",
    "Share of the memory reserved by torch's allocator that is free between tensors.",
)
DEVICE_MEMORY_LEVEL = Gauge(
    "quire_worker_device_memory_level",
    "How short the device's memory is: 0 enough; 1 less than --memory-warning-share is available;"
    " 2 less than --memory-critical-share. The scheduler then runs fewer sequences.",
)
DISK_MOVES = Counter(
    "quire_worker_disk_moves",
    "Blocks stored on, or loaded from, the disk.",
    ["move", "outcome"],
)
FAR_BLOCKS = Counter(
    "quire_worker_far_blocks",
    "Blocks stored in the far tier's store, loaded from there, or deleted to make room (sweep).",
    ["move", "outcome"],
)
_MOVED = ["tier", "direction"]
KV_TRANSFER_BYTES = Counter(
    "quire_worker_kv_transfer_bytes",
    "KV moved out to host or disk, or in from there, in bytes of the encoding used there.",
    _MOVED,
)
KV_TRANSFER_SECONDS = Counter(
    "quire_worker_kv_transfer_seconds",
    "Duration of moves of KV to and from host or disk; simultaneous moves are added up.",
    _MOVED,
)
KV_PULLED_BYTES = Counter(
    "quire_worker_kv_pulled_bytes",
    "KV pulled from other workers; means is grpc or nixl.",
    ["means"],
)
MEMORY_AVAILABLE = Gauge(
    "quire_worker_memory_available_bytes",
    "Free memory of the device; for a CPU, the memory that the worker may still take.",
)
_CODED = ["tier", "codec", "direction"]
CODEC_PLAIN_BYTES = Counter("quire_worker_kv_codec_plain_bytes", "KV before encoding.", _CODED)
CODEC_CODED_BYTES = Counter("quire_worker_kv_codec_coded_bytes", "KV after encoding.", _CODED)
CODEC_SECONDS = Counter(
    "quire_worker_kv_codec_seconds",
    "Time spent encoding and decoding, summed over threads; a GPU's time is not counted.",
    _CODED,
)


def count_transfer(tier: str, direction: str, num_bytes: int, seconds: float) -> None:
    """Count KV that moved; `direction` is "out" or "in", seen from the device."""
    KV_TRANSFER_BYTES.labels(tier, direction).inc(num_bytes)
    KV_TRANSFER_SECONDS.labels(tier, direction).inc(seconds)


def count_coded(
    tier: str, codec: str, direction: str, plain_bytes: int, coded_bytes: int, seconds: float
) -> None:
    """Count a codec's work; `direction` is "encode" or "decode"."""
    labels = (tier, codec, direction)
    CODEC_PLAIN_BYTES.labels(*labels).inc(plain_bytes)
    CODEC_CODED_BYTES.labels(*labels).inc(coded_bytes)
    CODEC_SECONDS.labels(*labels).inc(seconds)
