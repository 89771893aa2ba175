"""Simulates paged KV, and contiguous reservations of the maximal length in the same memory.

    python bench/fragmentation.py [--quick] [--json FILE]

The real scheduler core allocates the blocks; a time model gives the durations of steps. Each client
sends its next request when its last one has ended. Requests share no prefix, one step is in flight,
and preempted requests are recomputed. There are three scenarios:

    a  1,000 clients, requests of at most 8,192 tokens
    b  500 clients, each request with a different limit: 1,024 to 16,384 tokens, log-uniform
    c  three models that share a device and take turns, a step each: 300, 200 and 100 clients with
       limits as in b. Each model has a third of the memory, paged or not: blocks do not move from
       one model to another.

Lengths are log-normal with sigma 1, and cut at the limit. `chat` has the means of ShareGPT in the
paper on PagedAttention, 161 tokens in and 338 out. `long` has the medians of Azure's conversations
of 2023, 1,020 in and 129 out, which need about twice as much KV. The gain of paging depends on the
lengths: a request that fills its limit gains nothing. In the JSON file, names of numbers of `chat`
end in the scenario, such as `_a`, and those of `long` in `_a_long`.

    no room    share of the requests that had to wait when their turn came, or were preempted,
               because too little memory was free
    no run     share of the requests that had to wait because the free memory, although enough,
               was not in one run
    fragmentation
               1 - longest free run / free memory, mean over time; paged memory needs no run.
               `defragmented` checks the fragmentation each second, and from 0.2 on moves blocks
               together, which takes no time
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from math import exp
from statistics import mean

import numpy as np
from harness.case import Results, Table, arguments, main
from kv.paged import PagedEngine
from kv.replay import Engine, Job, replay
from kv.reservations import ReservingEngine

from sim_worker.time_model import TimeModel

KV_BYTES = 80e9
KV_BYTES_PER_TOKEN = 2 * 80 * 8 * 128 * 2  # K and V, layers, kv heads, head dim, bf16: 320 KiB
NUM_SLOTS = int(KV_BYTES // KV_BYTES_PER_TOKEN)
# Four devices of 3.35 TB/s and 989 TFLOP/s, simulated as one device with 140 GB of weights and the
# KV.
MODEL = TimeModel(70e9, KV_BYTES_PER_TOKEN, 4 * 3.35e12, 4 * 989e12)

Limits = Callable[[np.random.Generator], int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths of prompts and outputs, in tokens."""

    median_in: float
    median_out: float

    def jobs(self, limits: Limits, seed: int) -> Iterator[Job]:
        """Yield random requests endlessly; each prompt leaves room for one output token or more."""
        rng = np.random.default_rng(seed)
        while True:
            max_len = limits(rng)
            for_in, for_out = rng.lognormal(0, 1, 2).tolist()
            prompt = min(max(1, round(self.median_in * for_in)), max_len - 1)
            output = min(max(1, round(self.median_out * for_out)), max_len - prompt)
            yield Job(prompt, max_len, output)


LENGTHS = {
    "chat": Lengths(161 * exp(-0.5), 338 * exp(-0.5)),  # the mean is exp(1/2) times the median
    "long": Lengths(1020, 129),
}


def alike(_: np.random.Generator) -> int:
    return 8192


def mixed(rng: np.random.Generator) -> int:
    return int(1024 * 16 ** rng.random())


SCENARIOS: dict[str, tuple[Limits, tuple[int, ...]]] = {
    "a": (alike, (1000,)),
    "b": (mixed, (500,)),
    "c": (mixed, (300, 200, 100)),
}
"""How limits are drawn, and how many clients each model has."""

KINDS: dict[str, Callable[[Iterator[Job], int, int], Engine]] = {
    "paged": PagedEngine,
    "defragmented": partial(PagedEngine, defragments=True),
    "contiguous": ReservingEngine,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a replay, or the means of several replays."""

    concurrency: float
    """Requests that run, mean over time."""
    throughput: float
    """Output tokens per second."""
    no_room: float
    """`no room` in the module's docstring; `refused` is `no run`. Both are shares of the requests
    whose turn came."""
    refused: float
    fragmentation: float


def play(kind: str, scenario: str, lengths: Lengths, seed: int, measured_s: float) -> Outcome:
    """Replay a scenario for `measured_s`, after a warm-up of half that time."""
    limits, clients = SCENARIOS[scenario]
    num_slots = NUM_SLOTS // len(clients)
    engines = [
        KINDS[kind](lengths.jobs(limits, 100 * seed + model), count, num_slots)
        for model, count in enumerate(clients)
    ]
    result = replay(engines, MODEL, measured_s / 2, measured_s)
    num_tried = sum(len(each.started | each.no_room | each.no_run) for each in engines)
    return Outcome(
        concurrency=result.num_running,
        throughput=result.tokens_per_s,
        no_room=sum(len(each.no_room) for each in engines) / num_tried,
        refused=sum(len(each.no_run) for each in engines) / num_tried,
        fragmentation=result.fragmentation,
    )


def mean_of(outcomes: Sequence[Outcome]) -> Outcome:
    return Outcome(*(mean(values) for values in zip(*map(astuple, outcomes), strict=True)))


def metrics(outcomes: dict[str, Outcome]) -> dict[str, float]:
    paged, contiguous = outcomes["paged"], outcomes["contiguous"]
    values = {
        "concurrency_ratio": paged.concurrency / contiguous.concurrency,
        "throughput_ratio": paged.throughput / contiguous.throughput,
    }
    for name in ("refused", "no_room", "fragmentation"):
        values |= {f"{name}_{kind}": getattr(each, name) for kind, each in outcomes.items()}
    return values


def measure(given: argparse.Namespace) -> Results:
    measured_s, seeds = (60, 1) if given.quick else (120, 5)
    print(f"Memory: {KV_BYTES / 1e9:.0f} GB, {NUM_SLOTS:,} tokens of {KV_BYTES_PER_TOKEN:,} bytes.")
    print(f"Measured: {measured_s} s of the device's time, {seeds} x, each with other requests.\n")
    table = Table(
        *("case:<4", "lengths:<7", "memory:<12", "running:.0f", "tokens/s:.0f"),
        *("no room:.1%", "no run:.1%", "fragmentation:.2f"),
    )
    results: dict[str, float] = {}
    for scenario in SCENARIOS:
        for name, lengths in LENGTHS.items():
            outcomes: dict[str, Outcome] = {}
            for kind in KINDS:
                drawn = [play(kind, scenario, lengths, seed, measured_s) for seed in range(seeds)]
                outcomes[kind] = mean_of(drawn)
                table.row(scenario, name, kind, *astuple(outcomes[kind]))
            suffix = f"_{scenario}" if name == "chat" else f"_{scenario}_{name}"
            values = metrics(outcomes)
            results |= {key + suffix: value for key, value in values.items()}
            ratios = (values["concurrency_ratio"], values["throughput_ratio"])
            print("      paged ÷ contiguous: concurrency {:.1f}, throughput {:.1f}".format(*ratios))
    return results


if __name__ == "__main__":
    main(arguments(__doc__, quick="a tenth of the time; under 60 s").parse_args(), measure)
