"""Compares placement by prefix, on the least loaded worker, and round robin, with real schedulers.

    python bench/placement.py [--quick] [--sweep] [--json FILE]

Four workers serve tenants whose requests each begin with the tenant's own long prompt. The prompts
of all tenants together do not fit into one worker's prefix cache, but fit into all workers' caches
together. Scheduling and block accounting are the service's own. The time of a step is that of a
roofline: 8B parameters on a device of 3.35 TB/s and 400 TFLOPS. Arrivals are Poisson; the tenants'
shares follow Zipf's law. The numbers do not depend on this machine.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from harness.case import Results, Table, arguments, main
from harness.device import Clock, SimulatedWorker

from contract.hashing import BlockHash, extend_chain, root_hash
from contract.info import Role
from contract.step import Result
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.workers.placement import PlacementMethod, Placer, WorkerLoad
from sim_worker.time_model import TimeModel

NUM_WORKERS = 4
NUM_TENANTS = 96
TIME_MODEL = TimeModel(8e9, 131_072, 3.35e12, 4e14)
LAUNCH_S = 0.001
CONFIG = SchedulerConfig(
    num_blocks=8192,  # 128k tokens: at 8B, 16 GiB
    block_size=16,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    max_model_len=8192,
    max_waiting=100_000,
)


@dataclass(frozen=True)
class Arrival:
    """A request of the trace."""

    time: float
    request: Request


def make_trace(num_requests: int, requests_per_s: float, seed: int = 0) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 32_000, rng.integers(1024, 6144)) for _ in range(NUM_TENANTS)]
    shares = 1 / np.arange(1, NUM_TENANTS + 1)
    tenants = rng.choice(NUM_TENANTS, num_requests, p=shares / shares.sum())
    times = np.cumsum(rng.exponential(1 / requests_per_s, num_requests))
    trace = []
    for key, (time, tenant) in enumerate(zip(times.tolist(), tenants.tolist(), strict=True)):
        own = rng.integers(0, 32_000, rng.integers(32, 512))
        prompt = np.concatenate([prompts[tenant], own]).astype(np.int32)
        max_tokens = int(rng.integers(32, 256))
        request = Request(SourceId(0), SeqKey(key), f"r{key}", prompt, 1, max_tokens, b"")
        trace.append(Arrival(time, request))
    return trace


class SimulatedReplica:
    """A `placement.Worker`: a scheduler core and a worker that computes one step after another."""

    block_size = CONFIG.block_size
    role = Role.BOTH

    def __init__(self, clock: Clock, first_token_s: dict[int, float]) -> None:
        """`first_token_s` gets the time of each sequence's first token."""
        self.core = Scheduler(CONFIG)
        self._clock = clock
        self._first_token_s = first_token_s
        self._worker = SimulatedWorker(CONFIG.max_num_seqs)
        self._is_idle = True

    def placement_load(self) -> WorkerLoad:
        load = self.core.load()
        return WorkerLoad(
            load.num_running, load.num_waiting, 100_000, 8192, self.core.num_queued_tokens
        )

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        return self.core.lookup.num_cached_blocks(hashes)

    def submit(self, request: Request) -> None:
        self.core.submit(request, self._clock.now)
        if self._is_idle:
            self._begin_step()

    def _begin_step(self) -> None:
        plan = self.core.schedule(self._clock.now)
        self._is_idle = plan is None
        if plan is not None:
            outcome = self._worker.execute(plan)
            num_context_tokens = self._worker.num_context_tokens
            step_s = TIME_MODEL.step_s(plan.num_scheduled_tokens, num_context_tokens)
            self._clock.at(self._clock.now + step_s + LAUNCH_S, lambda: self._end_step(outcome))

    def _end_step(self, outcome: Result) -> None:
        for key in self.core.update(outcome).seq_keys.tolist():
            self._first_token_s.setdefault(key, self._clock.now)
        self._begin_step()


def simulate(trace: Sequence[Arrival], placer: Placer) -> dict[str, float]:
    """Serve a trace; return the hit rate and times to first token.

    `max_share` is the most prompt tokens of one worker ÷ an even share.
    """
    clock = Clock()
    first_token_s: dict[int, float] = {}
    replicas = [SimulatedReplica(clock, first_token_s) for _ in range(NUM_WORKERS)]

    def place(request: Request) -> None:
        choice = placer.choose(request, replicas, can_refuse=False)
        assert choice is not None
        replicas[choice.index].submit(request)

    for arrival in trace:
        clock.at(arrival.time, lambda request=arrival.request: place(request))
    clock.run()
    ttft = np.array([first_token_s[a.request.first_seq_key] - a.time for a in trace])
    loads = [replica.core.load() for replica in replicas]
    hits, queries = (
        sum(getattr(load, name) for load in loads)
        for name in ("prefix_cache_hits", "prefix_cache_queries")
    )
    return {
        "hit_rate": hits / queries,
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p99_s": float(np.quantile(ttft, 0.99)),
        "preemptions": float(sum(load.num_preemptions for load in loads)),
        "max_share": max(load.prefix_cache_queries for load in loads) * NUM_WORKERS / queries,
    }


def ceiling(trace: Sequence[Arrival]) -> float:
    """Return the hit rate of one unlimited cache: no block is computed twice."""
    seen: set[BlockHash] = set()
    hits = total = 0
    for arrival in trace:
        hashes: list[BlockHash] = []
        token_ids = arrival.request.prompt_token_ids
        extend_chain(hashes, root_hash(""), token_ids[:-1], CONFIG.block_size)
        hits += CONFIG.block_size * sum(block in seen for block in hashes)
        total += len(token_ids)
        seen.update(hashes)
    return hits / total


def measure(given: argparse.Namespace) -> Results:
    trace = make_trace(1500 if given.quick else 6000, given.rate)
    placers = {str(placement): Placer(placement) for placement in reversed(PlacementMethod)}
    if given.sweep:
        for weight in (0, 16, 64, 256, 1024):
            placers[f"prefix, {weight}"] = Placer(PlacementMethod.PREFIX, weight)
    results: dict[str, float] = {"hit_rate_ceiling": ceiling(trace)}
    print(f"{NUM_WORKERS} workers, {len(trace)} requests, {given.rate:g} per second")
    table = Table(
        *("placement:<14", "hit rate:.1%", "mean TTFT, s:.3f", "p50:.3f", "p99:.3f"),
        "max share:.2f",
    )
    for name, placer in placers.items():
        measured = simulate(trace, placer)
        columns = ("hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "max_share")
        table.row(name, *(measured[column] for column in columns))
        prefix = name.replace("-", "_").replace(", ", "_")
        results |= {f"{prefix}_{key}": value for key, value in measured.items()}
    print(f"one endless cache: {results['hit_rate_ceiling']:.1%}")
    return results


if __name__ == "__main__":
    parser = arguments(__doc__, quick="a shorter trace; under a minute")
    parser.add_argument("--sweep", action="store_true", help="also other weights of a sequence")
    parser.add_argument("--rate", type=float, default=45.0, help="requests per second")
    main(parser.parse_args(), measure)
