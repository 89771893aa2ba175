"""Compares ways to compute prompts beside streams, at a worker that exists only in time.

    python bench/pacing.py

The scheduler's core and its pacer are real, two steps in flight; what a step takes is lines through
what a 125M Llama takes on two cores: a part of its own, one for each sequence that decodes, and one
for each prompt token, but little for the first few beside decodes. Each load meets four policies:
the default; the same with steps of 512 tokens; prompts as fast as they can be computed
(--max-decode-slowdown inf); and steps that are filled with prompts, first come, first served, as
vLLM's are. The same numbers come out on any machine, however busy: it is for choosing a policy, and
says nothing about how fast the service is.
"""

import argparse
import heapq
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from contract.step import Plan, Result
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.handover.moves import Replica
from scheduler_svc.core.reports.load import read_prompts
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.journal.simulated_worker import Draw, SimulatedWorker
from scheduler_svc.pacing.pacer import Pace, StepPacer

_STEP_S, _DECODE_S, _TOKEN_S = 8e-3, 0.8e-3, 0.55e-3
_SPARE_ROWS, _SPARE_TOKEN_S = 12, 0.1e-3
"""Up to so many tokens the step mostly waits for the weights: what one more of a prompt takes."""
_NOISE = 0.05
"""Standard deviation of what a step takes, as a share of it."""
_WIRE_S = 1e-3
"""Between a client and the core, each way; a request takes as long again on average, by chance."""
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
    """Who sends what."""

    name: str
    num_requests: int
    num_clients: int = 0
    """Each sends its next request when its last one is complete; 0: requests come by chance."""
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
    """What clients feel, in seconds."""

    num_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between the tokens of a stream."""
    ended: float = 0.0

    def metrics(self) -> dict[str, float]:
        """The numbers by name, times in milliseconds."""
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
        self._draw = np.random.default_rng(seed)
        self._core = Replica(policy.config)
        self._pacer = StepPacer(policy.pace, policy.config)
        self._worker = SimulatedWorker(lambda _: Draw(0))
        self._coming: list[tuple[float, int]] = []
        """Requests on their way, as a heap: when they are there, and which."""
        self._in_flight: deque[tuple[float, float, Result]] = deque()
        """When a step will be done, how long the worker takes, and what comes of it."""
        self._free_at = 0.0
        self._due_at: float | None = None
        """When the next step goes out; None: when something has happened."""
        self._sent: list[float] = []
        self._heard: dict[int, float] = {}  # when each request's last token came
        self._felt = Felt()

    def run(self) -> Felt:
        """Let all requests be answered."""
        for _ in range(self._load.num_clients):
            self._send(0.0)
        if not self._load.num_clients:
            waits = self._draw.exponential(1 / self._load.requests_per_s, self._load.num_requests)
            for when in np.cumsum(waits).tolist():
                self._send(when)
        while self._coming or self._in_flight:
            events = [each[0][0] for each in (self._coming, self._in_flight) if each]
            now = min([*events, self._due_at or math.inf])
            while self._coming and self._coming[0][0] <= now:
                self._submit(heapq.heappop(self._coming)[1], now)
            while self._in_flight and self._in_flight[0][0] <= now:
                self._answer(now)
            self._plan(now)
        return self._felt

    def _send(self, now: float) -> None:
        if len(self._sent) < self._load.num_requests:
            arrives = now + _WIRE_S + self._draw.exponential(_WIRE_S)
            heapq.heappush(self._coming, (arrives, len(self._sent)))
            self._sent.append(now)

    def _submit(self, key: int, now: float) -> None:
        prompt = np.zeros(self._load.prompt_len(self._draw), np.int32)
        num_outputs = self._load.output_len(self._draw)
        self._core.submit(Request(SourceId(0), SeqKey(key), "", prompt, 1, num_outputs, b""), now)

    def _answer(self, now: float) -> None:
        _, execute_s, outcome = self._in_flight.popleft()
        news = self._core.update(outcome)
        self._pacer.answered(execute_s, now)
        felt = self._felt
        felt.ended = now + _WIRE_S
        for key in news.seq_keys.tolist():
            felt.num_tokens += 1
            if key in self._heard:
                felt.gaps.append(felt.ended - self._heard[key])
            else:
                felt.ttfts.append(felt.ended - self._sent[key])
            self._heard[key] = felt.ended
        for _ in news.finished if self._load.num_clients else ():
            self._send(felt.ended)

    def _plan(self, now: float) -> None:
        while True:
            due_at = self._pacer.next_due_s
            self._due_at = due_at if now < due_at and len(self._in_flight) == 1 else None
            if self._due_at is not None:
                return
            bound = self._pacer.max_paced_tokens(read_prompts(self._core))
            if (plan := self._core.schedule(now, bound, self._pacer.max_prompt_tokens)) is None:
                return
            self._pacer.sent(plan, now)
            execute_s = self._seconds(plan)
            self._free_at = max(now, self._free_at) + execute_s
            self._in_flight.append((self._free_at, execute_s, self._worker.execute(plan)))

    def _seconds(self, plan: Plan) -> float:
        num_prompt_tokens = plan.num_scheduled_tokens - plan.num_decodes
        num_spare = min(max(0, _SPARE_ROWS - plan.num_decodes), num_prompt_tokens)
        seconds = _STEP_S + _DECODE_S * plan.num_decodes
        seconds += _SPARE_TOKEN_S * num_spare + _TOKEN_S * (num_prompt_tokens - num_spare)
        return seconds * float(np.exp(_NOISE * self._draw.standard_normal()))


def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the short loads of clients alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    given = parser.parse_args()
    print(
        f"{'':>20}  {'':>12}  {'out tok/s':>9}  {'ttft ms':>7}  {'p99':>6}  "
        f"{'itl p50 ms':>10}  {'p99':>6}  {'max':>6}"
    )
    metrics: dict[str, float] = {}
    for load in LOADS[::2][:2] if given.quick else LOADS:
        for policy in POLICIES:
            felt = _Simulation(policy, load, given.seed).run().metrics()
            tok_s, ttft, ttft_p99, p50, p99, most = felt.values()
            print(
                f"{load.name:>20}  {policy.name:>12}  {tok_s:>9.1f}  {ttft:>7.0f}  {ttft_p99:>6.0f}"
                f"  {p50:>10.1f}  {p99:>6.1f}  {most:>6.1f}",
                flush=True,
            )
            name = f"{load.name} {policy.name}".replace(",", "").replace(" ", "_")
            metrics |= {f"{name}_{key}": round(value, 3) for key, value in felt.items()}
    if given.json is not None:
        given.json.write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    _main()
