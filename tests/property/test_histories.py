"""Long histories under pressure: they reach what Hypothesis, which likes short ones, seldom does.

As many as Hypothesis has examples: see `test_scheduler`. A failure names the seed to look into.
"""

from collections import Counter
from random import Random

from hypothesis import settings

from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.eviction import Eviction
from scheduler_svc.core.invariants import check
from tests.property.test_scheduler import SchedulerMachine

NUM_RULES = 250
MAX_LIVE = 6
COUNTERS = (
    "num_preemptions",
    "num_swapped_out_blocks",
    "num_swapped_in_blocks",
    "num_demoted_blocks",
    "num_promoted_blocks",
    "num_recomputed_tokens",
    "num_moved_blocks",
    "num_pinned_blocks",
)


def start(machine: SchedulerMachine, draw: Random) -> None:
    machine.start(
        num_blocks=draw.randint(2, 14),
        block_size=draw.randint(1, 4),
        max_num_seqs=draw.randint(1, 5),
        extra_budget=draw.randint(0, 10),
        caching=draw.random() < 0.7,
        chunk=draw.choice([None, None, 1, 2, 3]),
        watermark=draw.choice([0.0, 0.0, 0.2]),
        num_host_blocks=draw.choice([0, 1, 2, 4, 8, 16]),
        mode=draw.choice(list(PreemptionMode)),
        max_swap_blocks=draw.choice([1, 2, 3, 100]),
        policy=draw.choice(["fcfs", "priority+fair+deadline"]),
        long_prefill=draw.choice([None, 0, 4]),
        max_long_prefills=draw.randint(1, 2),
        eviction=draw.choice(list(Eviction)),
        pinned_share=draw.choice([0.25, 0.5, 1.0]),
        defragment_s=draw.choice([0, 0, 1, 5]),
        max_moves=draw.randint(1, 4),
    )


def submit(machine: SchedulerMachine, draw: Random) -> None:
    machine.submit(
        source=draw.randint(0, 1),
        prompt=[draw.randint(0, 1) for _ in range(draw.randint(1, 14))],
        n=draw.choice([1, 1, 1, 2, 3]),
        max_tokens=draw.randint(1, 10),
        salt=draw.choice(["", "", "", "other"]),
        priority=draw.randint(-2, 2),
        tenant=draw.choice(["", "other"]),
        patience=draw.choice([None, None, 20]),
        pin_s=draw.choice([None, None, None, 3, 30]),
    )


def live_through(seed: int) -> SchedulerMachine:
    """Submit, schedule, update, cancel and corrupt at random, then let all end."""
    draw = Random(seed)
    machine = SchedulerMachine()
    start(machine, draw)
    corruption, cancellation = draw.choice([0, 0.02, 0.1]), draw.choice([0, 0.02, 0.1])
    for _ in range(NUM_RULES):
        if len(machine.oracle.live) < MAX_LIVE and draw.random() < 0.5:
            submit(machine, draw)
        elif draw.random() < 0.55:
            machine.schedule()
        elif machine.unanswered:
            machine.update()
        if draw.random() < corruption:
            blocks = range(machine.config.num_host_blocks)
            machine.worker.corrupt_host([block for block in blocks if draw.random() < 0.5])
        if draw.random() < cancellation and machine.oracle.live:
            source, key = draw.choice(sorted(machine.oracle.live))
            machine.oracle.cancel((source, key), machine.core.cancel(source, [key]))
        if draw.random() < 0.002:
            machine.lose_worker()
        if draw.random() < 0.02:
            machine.core.defragment()
        check(machine.core)
    machine.teardown()
    return machine


def test_long_histories():
    reached: Counter[str] = Counter()
    for seed in range(settings().max_examples):
        try:
            machine = live_through(seed)
        except Exception as error:
            error.add_note(f"in the history of seed {seed}")
            raise
        load = machine.core.load()
        reached.update({name: getattr(load, name) > 0 for name in COUNTERS})
        reached["num_failed_swap_ins"] += machine.worker.failed_in > 0
        if not machine.config.num_host_blocks:
            assert load.num_swapped_out_blocks == load.num_swapped_in_blocks == 0
    for name in (*COUNTERS, "num_failed_swap_ins"):
        assert reached[name] >= 5, f"the histories seldom have {name}"
