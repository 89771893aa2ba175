"""Compares policies for computing prompts while other streams decode, on a simulated worker.

    python bench/pacing.py

The scheduler's core and its pacer are real; two steps are in flight. The time of a step is fitted
to a 125M Llama on two cores. It is the sum of a constant, a part for each sequence that decodes,
and a part for each prompt token; in a step of few rows, the first prompt tokens cost little. Each
load runs under four policies:
the default; the default with steps of 512 tokens; prompts as fast as they can be computed
(--max-decode-slowdown inf); and steps filled with prompts, first come, first served, like vLLM's.
The numbers do not depend on this machine. They help to choose a policy, and do not show how fast
the service is.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from harness.case import Results, Table, arguments, main
from harness.device import Clock, SimulatedWorker

from contract.step import Plan, Result
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.pacing import Pace, StepPacer
from scheduler_svc.core.reports.load import read_prompts
from scheduler_svc.core.scheduler import Scheduler

_STEP_S, _DECODE_S, _TOKEN_S = 8e-3, 0.8e-3, 0.55e-3
_SPARE_ROWS, _SPARE_TOKEN_S = 12, 0.1e-3
"""A step of fewer rows mostly waits for the weights: prompt tokens that fill it up to
`_SPARE_ROWS` rows cost only `_SPARE_TOKEN_S`."""
_NOISE = 0.05
"""Standard deviation of a step's time, as a share of it."""
_WIRE_S = 1e-3
"""Time between client and core, in each direction. A request takes an additional random time,
equally long on average."""
_CONFIG = SchedulerConfig(
    num_blocks=8192,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_model_len=4096,
    num_saturating_tokens=512,
    enable_prefix_caching=False,
)
_DEFAULT = Pace(max_decode_slowdown=1.4, max_prompt_step_s=2.0)

Lengths = Callable[[np.random.Generator], int]


@dataclass(frozen=True, slots=True)
class Policy:
    """How prompts are computed."""

    name: str
    pace: Pace
    config: SchedulerConfig = _CONFIG


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of the clients."""

    name: str
    num_requests: int
    num_clients: int = 0
    """Number of closed-loop clients; 0: arrivals are Poisson."""
    requests_per_s: float = 0.0
    prompt_len: Lengths = lambda _: 128
    output_len: Lengths = lambda _: 64


def _chat_prompt(draw: np.random.Generator) -> int:
    return int(np.clip(draw.lognormal(5.3, 1.0), 16, 1500))


def _chat_output(draw: np.random.Generator) -> int:
    return int(np.clip(draw.lognormal(4.3, 0.8), 4, 400))


POLICIES = (
    Policy("paced", _DEFAULT),
    Policy("512 a step", _DEFAULT, replace(_CONFIG, max_num_batched_tokens=512)),
    Policy("at once", replace(_DEFAULT, max_decode_slowdown=math.inf)),
    Policy("none is long", Pace(), replace(_CONFIG, long_prefill_threshold=0)),
)
LOADS = (
    Load("8 clients, 4 each", 32, num_clients=8),
    Load("8 clients, 32 each", 256, num_clients=8),
    Load("32 clients, 4 each", 128, num_clients=32),
    Load("32 clients, 32 each", 1024, num_clients=32),
    Load("4 a second", 300, requests_per_s=4.0),
    Load("6 a second", 300, requests_per_s=6.0),
    Load("chats", 300, 0, 1.6, _chat_prompt, _chat_output),
)


@dataclass(slots=True)
class Felt:
    """The latencies that clients see, in seconds."""

    num_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Times between the tokens of a stream."""
    ended: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name, with times in milliseconds."""
        p50, p99, most = np.percentile(self.gaps, [50, 99, 100]) * 1e3
        return {
            "output_tok_s": self.num_tokens / self.ended,
            "ttft_ms": float(np.mean(self.ttfts)) * 1e3,
            "ttft_p99_ms": float(np.percentile(self.ttfts, 99)) * 1e3,
            "itl_p50_ms": float(p50),
            "itl_p99_ms": float(p99),
            "itl_max_ms": float(most),
        }


class _Simulation:
    """One load, under one policy."""

    def __init__(self, policy: Policy, load: Load, seed: int) -> None:
        self._load = load
        self._rng = np.random.default_rng(seed)
        self._clock = Clock()
        self._core = Scheduler(policy.config)
        self._pacer = StepPacer(policy.pace, policy.config)
        self._worker = SimulatedWorker(policy.config.max_num_seqs)
        self._num_in_flight = 0
        self._free_at = 0.0
        """The time at which the worker will have done all steps in flight."""
        self._sent: list[float] = []
        """The time at which each request was sent."""
        self._last_token: dict[int, float] = {}
        """The time at which each request's last token came."""
        self._felt = Felt()

    def run(self) -> Felt:
        for _ in range(self._load.num_clients):
            self._send(0.0)
        if not self._load.num_clients:
            waits = self._rng.exponential(1 / self._load.requests_per_s, self._load.num_requests)
            for when in np.cumsum(waits).tolist():
                self._send(when)
        self._clock.run()
        return self._felt

    def _send(self, now: float) -> None:
        if (key := len(self._sent)) < self._load.num_requests:
            self._sent.append(now)
            arrives = now + _WIRE_S + self._rng.exponential(_WIRE_S)
            self._clock.at(arrives, lambda: self._submit(key))

    def _submit(self, key: int) -> None:
        prompt = np.zeros(self._load.prompt_len(self._rng), np.int32)
        num_outputs = self._load.output_len(self._rng)
        request = Request(SourceId(0), SeqKey(key), "", prompt, 1, num_outputs, b"")
        self._core.submit(request, self._clock.now)
        self._plan()

    def _plan(self) -> None:
        """Send steps to the worker until the next is due later, or nothing is left to schedule."""
        now = self._clock.now
        while True:
            due_at = self._pacer.next_due_s
            if now < due_at and self._num_in_flight == 1:
                self._clock.at(due_at, self._plan)
                return
            bound = self._pacer.max_paced_tokens(read_prompts(self._core))
            if (plan := self._core.schedule(now, bound, self._pacer.max_prompt_tokens)) is None:
                return
            self._pacer.on_sent(plan, now)
            execute_s = self._seconds(plan)
            self._free_at = max(now, self._free_at) + execute_s
            self._num_in_flight += 1
            outcome = self._worker.execute(plan)
            self._clock.at(
                self._free_at,
                lambda outcome=outcome, execute_s=execute_s: self._answer(outcome, execute_s),
            )

    def _answer(self, outcome: Result, execute_s: float) -> None:
        self._num_in_flight -= 1
        news = self._core.update(outcome)
        self._pacer.on_result(execute_s, self._clock.now)
        felt = self._felt
        felt.ended = self._clock.now + _WIRE_S
        for key in news.seq_keys.tolist():
            felt.num_tokens += 1
            if key in self._last_token:
                felt.gaps.append(felt.ended - self._last_token[key])
            else:
                felt.ttfts.append(felt.ended - self._sent[key])
            self._last_token[key] = felt.ended
        for _ in news.finished if self._load.num_clients else ():
            self._send(felt.ended)
        self._plan()

    def _seconds(self, plan: Plan) -> float:
        num_prompt_tokens = plan.num_scheduled_tokens - plan.num_decodes
        num_spare = min(max(0, _SPARE_ROWS - plan.num_decodes), num_prompt_tokens)
        seconds = _STEP_S + _DECODE_S * plan.num_decodes
        seconds += _SPARE_TOKEN_S * num_spare + _TOKEN_S * (num_prompt_tokens - num_spare)
        return seconds * float(np.exp(_NOISE * self._rng.standard_normal()))


def measure(given: argparse.Namespace) -> Results:
    table = Table(
        *("load:<20", "policy:<12", "out tok/s:.1f", "ttft ms:.0f", "p99:.0f"),
        *("itl p50 ms:.1f", "p99:.1f", "max:.1f"),
    )
    metrics: dict[str, float] = {}
    for load in LOADS[::2][:2] if given.quick else LOADS:
        for policy in POLICIES:
            felt = _Simulation(policy, load, given.seed).run().metrics()
            table.row(load.name, policy.name, *felt.values())
            name = f"{load.name} {policy.name}".replace(",", "").replace(" ", "_")
            metrics |= {f"{name}_{key}": value for key, value in felt.items()}
    return metrics


if __name__ == "__main__":
    parser = arguments(__doc__, quick="only the short loads of clients")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args(), measure)
