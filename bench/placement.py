"""Where requests go: by prefix, to the least loaded worker, or in turn; on real scheduler cores.

Four workers serve tenants whose requests each begin with the tenant's own long prompt. The prompts
of all tenants together do not fit into one worker's prefix cache, but into those of all. Scheduling
and block accounting are the service's own; the time of a step is a roofline (8B parameters on a
device of 3.35 TB/s and 400 TFLOPS). Arrivals are Poisson, the tenants' shares follow Zipf's law.

    python bench/placement.py [--quick] [--sweep] [--json FILE]
"""

import argparse
import heapq
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contract.hashing import BlockHash, extend_chain, root_hash
from contract.step import Plan
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.handover.moves import Replica
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.journal.simulated_worker import Draw, SimulatedWorker
from scheduler_svc.workers.placement import Placement, Placer, WorkerLoad
from sim_worker.time_model import TimeModel

NUM_WORKERS = 4
NUM_TENANTS = 96
BLOCK_SIZE = 16
NUM_BLOCKS = 8192  # 128k tokens: at 8B, 16 GiB
TIME_MODEL = TimeModel(8e9, 131_072, 3.35e12, 4e14)
LAUNCH_S = 0.001


@dataclass(frozen=True)
class Arrival:
    """A request of the trace."""

    time: float
    request: Request


def make_trace(num_requests: int, requests_per_s: float, seed: int = 0) -> list[Arrival]:
    """Draw the trace."""
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
    """A core and its worker, one step after another."""

    def __init__(self) -> None:
        self.core = Replica(
            SchedulerConfig(
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                max_num_seqs=128,
                max_num_batched_tokens=2048,
                max_model_len=8192,
                max_waiting=100_000,
            )
        )
        self.block_size = BLOCK_SIZE
        self.worker = SimulatedWorker(lambda _: Draw(7))
        self.plan: Plan | None = None

    def placement_load(self) -> WorkerLoad:
        """See `placement.Worker`."""
        load = self.core.load()
        return WorkerLoad(
            load.num_running, load.num_waiting, 100_000, 8192, self.core.num_queued_tokens
        )

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """See `placement.Worker`."""
        return self.core.num_cached_blocks(hashes)

    def begin_step(self, now: float) -> float | None:
        """Begin a step if there is anything to do; return when it will be done."""
        if (plan := self.core.schedule(now)) is None:
            return None
        self.plan = plan
        self.outcome = self.worker.execute(plan)
        step_s = TIME_MODEL.step_s(plan.num_scheduled_tokens, self.worker.num_context_tokens)
        return now + step_s + LAUNCH_S


def simulate(trace: Sequence[Arrival], placer: Placer) -> dict[str, float]:
    """Serve a trace; return the hit rate and times to first token.

    `max_share` is the most prompt tokens that one worker got, over an even share.
    """
    replicas = [SimulatedReplica() for _ in range(NUM_WORKERS)]
    order = itertools.count()  # among events at one time
    events: list[tuple[float, int, Arrival | SimulatedReplica]] = [
        (arrival.time, next(order), arrival) for arrival in trace
    ]
    heapq.heapify(events)
    arrived = {arrival.request.first_seq_key: arrival.time for arrival in trace}
    first_tokens: dict[int, float] = {}
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Arrival):
            choice = placer.choose(event.request, replicas, can_refuse=False)
            assert choice is not None
            replica = replicas[choice.index]
            replica.core.submit(event.request, now)
            if replica.plan is not None:
                continue
        else:
            replica = event
            news = replica.core.update(replica.outcome)
            replica.plan = None
            for key in news.seq_keys.tolist():
                first_tokens.setdefault(key, now)
        if (done := replica.begin_step(now)) is not None:
            heapq.heappush(events, (done, next(order), replica))
    ttft = np.array([first_tokens[key] - time for key, time in arrived.items()])
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
    """Return the hit rate of one cache without end: no block is computed twice."""
    seen: set[BlockHash] = set()
    hits = total = 0
    for arrival in trace:
        hashes: list[BlockHash] = []
        extend_chain(hashes, root_hash(""), arrival.request.prompt_token_ids[:-1], BLOCK_SIZE)
        hits += BLOCK_SIZE * sum(block in seen for block in hashes)
        total += len(arrival.request.prompt_token_ids)
        seen.update(hashes)
    return hits / total


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a shorter trace; under a minute")
    parser.add_argument("--sweep", action="store_true", help="also other weights of a sequence")
    parser.add_argument("--rate", type=float, default=45.0, help="requests per second")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()
    trace = make_trace(1500 if args.quick else 6000, args.rate)
    placers = {str(placement): Placer(placement) for placement in reversed(Placement)}
    if args.sweep:
        for weight in (0, 16, 64, 256, 1024):
            placers[f"prefix, {weight}"] = Placer(Placement.PREFIX, weight)
    results: dict[str, float] = {"hit_rate_ceiling": ceiling(trace)}
    print(f"{NUM_WORKERS} workers, {len(trace)} requests, {args.rate:g} per second")
    print(
        f"{'placement':>14} {'hit rate':>9} {'mean TTFT':>10} {'p50':>8} {'p99':>8} "
        f"{'max share':>10}"
    )
    for name, placer in placers.items():
        measured = simulate(trace, placer)
        print(
            f"{name:>14} {measured['hit_rate']:9.1%} {measured['ttft_mean_s']:8.3f} s "
            f"{measured['ttft_p50_s']:6.3f} s {measured['ttft_p99_s']:6.3f} s "
            f"{measured['max_share']:9.2f}x"
        )
        prefix = name.replace("-", "_").replace(", ", "_")
        results |= {f"{prefix}_{key}": value for key, value in measured.items()}
    print(f"one cache without end: {results['hit_rate_ceiling']:.1%}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
