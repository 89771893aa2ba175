"""Compares prefill and decode on separate workers with both on all workers, by goodput.

    python bench/disaggregation.py --quick

The scheduler's cores, placement and hand-off are the real code of `scheduler_svc`. Devices and
clock are simulated: the devices are H200s with a model of 8 billion parameters in bf16 or of 70
billion in fp8, with links of --link-gbit between workers. Prompts and outputs have log-normal
lengths around the given means, no prefix is shared, and requests arrive at random (Poisson).

A request is good if its first token comes within one objective, and if the average gap between its
tokens is within a second one, which has a strict and an easy value. With --quantile 0.95, 95
of 100 gaps must be within the second objective, instead of their average. *Goodput* is the highest
rate, per worker, at which 90 of 100 requests are good. "2P+1D" means two workers that prefill and
one that decodes; "3" means three workers that do both. `--slowdown` is the scheduler's
--max-decode-slowdown, which affects workers that do both.
"""

import argparse
import asyncio
import logging
import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import structlog
from harness.case import Results, Table, arguments, main, progress
from harness.device import SimulatedWorker
from prometheus_client import CollectorRegistry

from contract.hashing import BlockHash
from contract.info import Role
from contract.step import Plan, Result
from scheduler_svc.core.interface.config import SchedulerConfig, SchedulerLoad
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.pacing import Pace, StepPacer
from scheduler_svc.core.reports.load import read_prompts
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observers.metrics import SchedulerMetrics
from scheduler_svc.operations.migration import Migrator
from scheduler_svc.operations.prefill_handoff import Handoff
from scheduler_svc.workers.crash_counter import CrashCounter
from scheduler_svc.workers.placement import Placer, WorkerLoad
from sim_worker.time_model import TimeModel

_BLOCK_SIZE = 16
_LAUNCH_S = 0.001
_GOOD_SHARE = 0.9
_SEARCH_STEPS = 6
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Model:
    """A model on one device, and its objectives."""

    name: str
    time_model: TimeModel
    num_blocks: int
    ttft_factor: float
    gaps_s: tuple[float, float]
    """Two objectives between tokens: a strict one, slightly more than a decode takes, and an easy
    one."""

    @property
    def block_bytes(self) -> int:
        return _BLOCK_SIZE * self.time_model.kv_bytes_per_token


MODELS = (
    Model(
        "8B",
        TimeModel(8e9, 131_072, 4.8e12, 8e14, swap_bytes_per_s=5e10),
        num_blocks=52_000,
        ttft_factor=1.0,
        gaps_s=(0.008, 0.015),
    ),
    Model(  # a byte per parameter, at twice the operations per second
        "70B",
        TimeModel(35e9, 327_680, 4.8e12, 8e14, swap_bytes_per_s=5e10),
        num_blocks=10_800,
        ttft_factor=3.0,
        gaps_s=(0.022, 0.045),
    ),
)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind."""

    name: str
    prompt: int
    """The average number of tokens in a prompt; `output` is the average in an output."""
    output: int
    ttft_s: float
    """The objective for the first token with the 8B model."""


LOADS = (
    Load("chat", 512, 256, ttft_s=0.5),
    Load("documents", 4096, 128, ttft_s=2.0),
    Load("writing", 512, 1024, ttft_s=0.5),
)


@dataclass(slots=True)
class History:
    """The arrival times of a request and of its tokens."""

    arrived_s: float
    num_tokens: int
    at_s: list[float] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.at_s) == self.num_tokens

    def is_good(self, ttft_s: float, gap_s: float, quantile: float | None) -> bool:
        if not self.is_complete or self.at_s[0] - self.arrived_s > ttft_s:
            return False
        if quantile is not None and self.num_tokens > 1:
            return float(np.quantile(np.diff(self.at_s), quantile)) <= gap_s
        return self.at_s[-1] - self.at_s[0] <= gap_s * (self.num_tokens - 1)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_NoWait(self))

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


class _NoWait(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self._loop.advance(timeout)
        return super().select(0)


class SimulatedSession:
    """A core on a simulated device: a `Session` as placement and hand-off see it."""

    block_size = _BLOCK_SIZE
    is_draining = False

    def __init__(
        self,
        model: Model,
        role: Role,
        pace: Pace,
        link_bytes_per_s: float,
        histories: dict[int, History],
    ) -> None:
        self._model = model
        num_host_blocks = int(64e9) // model.block_bytes
        config = SchedulerConfig(
            num_blocks=model.num_blocks,
            block_size=_BLOCK_SIZE,
            max_num_seqs=512,
            max_num_batched_tokens=2048,
            max_model_len=32_768,
            num_saturating_tokens=2048,
            max_waiting=100_000,
            num_host_blocks=num_host_blocks,
            bytes_per_block=model.block_bytes,
            swap_bytes_per_s=model.time_model.swap_bytes_per_s,
            prefill_tokens_per_s=model.time_model.operations_per_s
            / (2 * model.time_model.num_params),
        )
        self.core = Scheduler(config)
        self.role = role
        limits = SimpleNamespace(num_host_blocks=num_host_blocks)
        self.info = SimpleNamespace(
            worker_id=role, dtype="bf16", instance_id=1, takes_kv=True, role=role, limits=limits
        )
        self.crashes = CrashCounter()
        self.link = self
        self.paces_prompts = True
        self.busy_s = 0.0
        self.num_pulled_bytes = 0
        self._pacer = StepPacer(pace, config)
        self._worker = SimulatedWorker(config.max_num_seqs)
        self._histories = histories
        self._is_busy = False
        self._waits: list[tuple[Callable[[Scheduler], bool], asyncio.Future[None]]] = []
        self._link_bytes_per_s = link_bytes_per_s
        self._pulling = asyncio.Lock()

    # --- as a session ---------------------------------------------------------------------------

    def call(self, function: Callable[[Scheduler], _T]) -> _T:
        result = function(self.core)
        asyncio.get_running_loop().call_soon(self._plan)
        return result

    async def wait_until(self, condition: Callable[[Scheduler], bool]) -> None:
        if not condition(self.core):
            holds = asyncio.get_running_loop().create_future()
            self._waits.append((condition, holds))
            await holds

    async def pull_kv(
        self,
        source: str,  # noqa: ARG002 - each pair of workers has the same link
        instance_id: int,  # noqa: ARG002
        sources: Sequence[int],
        targets: Sequence[int],  # noqa: ARG002
    ) -> None:
        num_bytes = len(sources) * self._model.block_bytes
        self.num_pulled_bytes += num_bytes
        async with self._pulling:
            await asyncio.sleep(_LAUNCH_S + num_bytes / self._link_bytes_per_s)

    def check_alive(self) -> None:
        """Do nothing: a simulated worker is never lost."""

    def trouble(self) -> None:
        """Return None: a simulated worker never hangs."""

    def load(self) -> SchedulerLoad:
        return self.core.load()

    def placement_load(self) -> WorkerLoad:
        load = self.core.load()
        num_queued = self.core.num_queued_tokens
        length = self.core.max_request_len
        return WorkerLoad(load.num_running, load.num_waiting, 100_000, length, num_queued)

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        return self.core.lookup.num_cached_blocks(hashes)

    # --- steps ----------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self.call(lambda core: core.submit(request, asyncio.get_running_loop().time()))

    def _plan(self) -> None:
        if self._is_busy:
            return
        loop, pacer = asyncio.get_running_loop(), self._pacer
        prompts = read_prompts(self.core)
        paced = pacer.max_paced_tokens(prompts) if self.paces_prompts else None
        plan = self.core.schedule(loop.time(), paced, pacer.max_prompt_tokens)
        if plan is not None:
            self._is_busy = True
            pacer.on_sent(plan, loop.time())
            result = self._worker.execute(plan)
            step_s = _LAUNCH_S + self._step_s(plan)
            self.busy_s += step_s
            loop.call_later(step_s, self._end_step, result, step_s)
        self._resolve_waits()

    def _step_s(self, plan: Plan) -> float:
        size = self._model.block_bytes
        swapped = len(plan.swap_out_src_block_ids), len(plan.swap_in_src_block_ids)
        return self._model.time_model.step_s(
            plan.num_scheduled_tokens,
            self._worker.num_context_tokens,
            *(size * num_blocks for num_blocks in swapped),
        )

    def _end_step(self, result: Result, step_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        for key in self.core.update(result).seq_keys.tolist():
            self._histories[key].at_s.append(now_s)
        self._pacer.on_result(step_s, now_s)
        self._is_busy = False
        self._plan()

    def _resolve_waits(self) -> None:
        waits, self._waits = self._waits, []
        for condition, holds in waits:
            if condition(self.core):
                holds.set_result(None)
            else:
                self._waits.append((condition, holds))


@dataclass(eq=False)
class SimulatedEngine:
    """A worker that is always attached."""

    target: str
    session: SimulatedSession

    def attached_session(self) -> SimulatedSession:
        return self.session


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one simulation's requests."""

    good_shares: tuple[float, ...]
    """The share of good requests, for each objective between tokens."""
    ttft_p90_s: float
    gap_p95_s: float
    longest_gap_p50_s: float
    """The median of each request's longest gap, during which the request may have moved."""
    recomputed_share: float
    """Tokens computed twice ÷ tokens computed."""


async def serve(
    model: Model, load: Load, roles: Sequence[Role], rate: float, given: argparse.Namespace
) -> Outcome:
    """Serve requests at `rate` per second, and return the outcome."""
    loop = asyncio.get_running_loop()
    rng = np.random.default_rng(given.seed)
    histories: dict[int, History] = {}
    link_bytes_per_s = given.link_gbit * 1e9 / 8
    pace = Pace(given.slowdown, 2.0)
    engines: Any = tuple(
        SimulatedEngine(f"{i}", SimulatedSession(model, role, pace, link_bytes_per_s, histories))
        for i, role in enumerate(roles)
    )
    roster: Any = SimpleNamespace(engines=engines)
    sessions = [engine.session for engine in engines]
    migrations = SchedulerMetrics(CollectorRegistry()).migrations
    handoff = Handoff(roster, Migrator(roster, migrations))
    handing_off = asyncio.create_task(handoff.run())
    placer = Placer()
    output_s = load.output * model.gaps_s[-1]
    num_requests = int(rate * max(given.seconds, 2 * output_s))
    lengths = [
        np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, num_requests), 4, 4 * mean).astype(int)
        for mean in (load.prompt, load.output)
    ]
    for key, (prompt_len, max_tokens) in enumerate(zip(*lengths, strict=True)):
        await asyncio.sleep(rng.exponential(1 / rate))
        prompt = rng.integers(0, 32_000, prompt_len).astype(np.int32)
        request = Request(SourceId(0), SeqKey(key), f"r{key}", prompt, 1, int(max_tokens), b"")
        histories[key] = History(loop.time(), int(max_tokens))
        choice = placer.choose(request, sessions, can_refuse=False)
        assert choice is not None
        sessions[choice.index].submit(request)
    end_s = loop.time() + 5 * output_s  # requests that have not ended by then are not good
    while loop.time() < end_s and any(not each.is_complete for each in histories.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    handing_off.cancel()
    handoff.stop()
    await asyncio.gather(handing_off, return_exceptions=True)
    return _outcome(model, load, [*histories.values()], sessions, given.quantile)


def _outcome(
    model: Model,
    load: Load,
    histories: list[History],
    sessions: Sequence[SimulatedSession],
    quantile: float | None,
) -> Outcome:
    ttft_s = load.ttft_s * model.ttft_factor
    steady = histories[len(histories) // 3 :]  # skip the first requests, which find an idle service
    begun = [each for each in steady if each.at_s]
    gaps = [np.diff(each.at_s) for each in begun if len(each.at_s) > 1]
    loads = [session.core.load() for session in sessions]
    num_computed = sum(load.prefix_cache_queries for load in loads)
    return Outcome(
        good_shares=tuple(
            sum(each.is_good(ttft_s, gap_s, quantile) for each in steady) / len(steady)
            for gap_s in model.gaps_s
        ),
        ttft_p90_s=float(np.quantile([each.at_s[0] - each.arrived_s for each in begun], 0.9)),
        gap_p95_s=float(np.quantile(np.concatenate(gaps), 0.95)),
        longest_gap_p50_s=float(np.median([each.max() for each in gaps])),
        recomputed_share=sum(load.num_recomputed_tokens for load in loads) / max(1, num_computed),
    )


class Search:
    """Finds the goodput of a layout for each objective between tokens."""

    def __init__(
        self, model: Model, load: Load, roles: Sequence[Role], given: argparse.Namespace
    ) -> None:
        self._run = (model, load, roles)
        self._given = given
        self._outcomes: dict[float, Outcome] = {}  # by rate; both objectives share them

    def find(self, objective: int) -> tuple[float, Outcome | None]:
        """Return the highest rate at which enough requests are good, and the outcome at it."""
        model, load, roles = self._run
        least, most, best = 0.0, 2.0 * _bound(model, load) * len(roles), None
        for _ in range(self._given.search_steps):
            rate = (least + most) / 2
            outcome = self._outcome(rate)
            if outcome.good_shares[objective] >= _GOOD_SHARE:
                least, best = rate, outcome
            else:
                most = rate
        return least / len(roles), best

    def _outcome(self, rate: float) -> Outcome:
        if rate not in self._outcomes:
            with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
                self._outcomes[rate] = runner.run(serve(*self._run, rate, self._given))
        return self._outcomes[rate]


def _bound(model: Model, load: Load) -> float:
    """Return about how many requests per second one device could compute, by arithmetic alone."""
    times = model.time_model
    prompt_s = 2 * times.num_params * load.prompt / times.operations_per_s
    context_bytes = times.kv_bytes_per_token * (load.prompt + load.output / 2)
    return 1 / (prompt_s + load.output * context_bytes / times.bytes_per_s)


def layouts(num_workers: int) -> dict[str, tuple[Role, ...]]:
    """Return all ways to give `num_workers` their roles."""
    found: dict[str, tuple[Role, ...]] = {f"{num_workers}": (Role.BOTH,) * num_workers}
    for num_prefill in range(1, num_workers):
        num_decode = num_workers - num_prefill
        roles = (Role.PREFILL,) * num_prefill + (Role.DECODE,) * num_decode
        found[f"{num_prefill}P+{num_decode}D"] = roles
    return found


def measure(given: argparse.Namespace) -> Results:
    if given.quick:
        given = argparse.Namespace(**vars(given) | {"seconds": 10.0, "search_steps": 4})
    results: dict[str, float] = {}
    table = Table(
        *("model:<5", "load:<10", "gap, ms:.0f", "workers:<8", "goodput/worker:.2f"),
        *("TTFT p90, ms:.0f", "gap p95, ms:.1f", "longest gap p50, ms:.1f", "recomputed:.1%"),
    )
    for model in (each for each in MODELS if each.name in given.models):
        for load in (each for each in LOADS if each.name in given.loads):
            for num_workers in given.workers:
                for name, roles in layouts(num_workers).items():
                    progress(f"{model.name}, {load.name}, {name} ...")
                    search = Search(model, load, roles, given)
                    for objective, gap_s in enumerate(model.gaps_s):
                        goodput, found = search.find(objective)
                        columns = (None,) * 4 if found is None else _columns(found)
                        table.row(model.name, load.name, 1e3 * gap_s, name, goodput, *columns)
                        key = f"{model.name}_{load.name}_{name.replace('+', '_')}".lower()
                        results[f"goodput_{key}_{1e3 * gap_s:.0f}_ms"] = goodput
    return results


def _columns(outcome: Outcome) -> tuple[float, ...]:
    return (
        *(1e3 * outcome.ttft_p90_s, 1e3 * outcome.gap_p95_s),
        *(1e3 * outcome.longest_gap_p50_s, outcome.recomputed_share),
    )


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser = arguments(__doc__, quick="shorter simulations, and a coarser search")
    add = parser.add_argument
    add("--models", type=lambda text: text.split(","), default=[each.name for each in MODELS])
    add("--loads", type=lambda text: text.split(","), default=[each.name for each in LOADS])
    add(
        "--workers",
        type=lambda text: [*map(int, text.split(","))],
        default=[2, 3],
        help="numbers of workers",
    )
    add("--link-gbit", type=float, default=400.0, help="Gbit/s between two workers")
    add("--slowdown", type=float, default=1.4, help="--max-decode-slowdown of the scheduler")
    add("--seconds", type=float, default=30.0, help="seconds of arrivals in each simulation")
    add("--quantile", type=float, help="share of a request's gaps that must be good; default: mean")
    add("--search-steps", type=int, default=_SEARCH_STEPS, help="simulations for each goodput")
    add("--seed", type=int, default=0)
    main(parser.parse_args(), measure)
