"""Runs a router with two more metrics, which show for how long its event loop was held.

    python -m engines.watched_router FLAGS

A heartbeat on the event loop measures how late it is, and how much processor time the loop's thread
took since the heartbeat before. The processor time shows for how long callbacks held the loop,
without the time of other threads and processes. Each scrape of /metrics reads the largest values
since the last scrape.
"""

import asyncio
import time
from dataclasses import dataclass

from prometheus_client import Gauge

from router.app import run_router
from router.settings import RouterSettings
from rpc.server import observe, run
from rpc.settings import parse_settings

GAP, CPU = "bench_loop_gap_seconds", "bench_loop_cpu_seconds"
_BEAT_S = 0.002


@dataclass(slots=True)
class Worst:
    """The largest values since they were last taken."""

    gap_s: float = 0.0
    cpu_s: float = 0.0

    def take_gap(self) -> float:
        gap_s, self.gap_s = self.gap_s, 0.0
        return gap_s

    def take_cpu(self) -> float:
        cpu_s, self.cpu_s = self.cpu_s, 0.0
        return cpu_s


async def _watch(worst: Worst) -> None:
    at_s, cpu_s = time.perf_counter(), time.thread_time()
    while True:
        await asyncio.sleep(_BEAT_S)
        now_s, now_cpu_s = time.perf_counter(), time.thread_time()
        worst.gap_s = max(worst.gap_s, now_s - at_s - _BEAT_S)
        worst.cpu_s = max(worst.cpu_s, now_cpu_s - cpu_s)
        at_s, cpu_s = now_s, now_cpu_s


async def _main(settings: RouterSettings) -> None:
    worst = Worst()
    Gauge(GAP, "Largest delay of the event loop.").set_function(worst.take_gap)
    Gauge(CPU, "Most processor time of the event loop at once.").set_function(worst.take_cpu)
    watch = asyncio.create_task(_watch(worst))
    try:
        await run_router(settings)
    finally:
        watch.cancel()


if __name__ == "__main__":
    parsed = parse_settings(RouterSettings, "engines.watched_router")
    observe("router", parsed)
    run(_main(parsed))
