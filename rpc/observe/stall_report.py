"""Reports how late the event loop runs (a metric), and each stall (log line, metric and span)."""

import time

import structlog
from opentelemetry.context import Context
from prometheus_client import Counter, Histogram

from rpc.observe import telemetry
from rpc.observe.loop_watch import Stall

LAG = Histogram(
    "quire_event_loop_lag_seconds",
    "How late the event loop ran a callback that is posted every --loop-stall-s / 2.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
STALLED_SECONDS = Counter(
    "quire_event_loop_stalled_seconds",
    "Time in which the event loop did not run for --loop-stall-s or longer.",
)

log = structlog.get_logger()


def report_stall(stall: Stall) -> None:
    """Log a stall; if it is over, also add it to STALLED_SECONDS and record a span."""
    lasted_s, cpu_s = round(stall.lasted_s, 3), round(stall.cpu_s, 3)
    if not stall.is_over:
        log.error("the event loop is blocked", lasted_s=lasted_s, cpu_s=cpu_s, stack=stall.stack)
        return
    STALLED_SECONDS.inc(stall.lasted_s)
    log.warning("the event loop was blocked", lasted_s=lasted_s, cpu_s=cpu_s, stack=stall.stack)
    now = time.time()
    telemetry.record_span(
        telemetry.STALL_SPAN,
        Context(),
        now - stall.lasted_s,
        now,
        {"quire.cpu_s": cpu_s, "code.stacktrace": stall.stack},
    )
