"""Long histories under pressure, which Hypothesis seldom draws because it prefers short ones.

There are as many as Hypothesis has examples (`test_scheduler`). A failure names its seed.
"""

from collections import Counter
from random import Random

from hypothesis import settings

from contract.info import MemoryLevel
from contract.sampling import EarlyStopping
from contract.worker_limits import Chunk
from scheduler_svc.core.interface.config import Eviction, PreemptionMode
from scheduler_svc.core.interface.request import BeamParams
from tests.property.test_scheduler import SchedulerMachine
from tests.property.transitions import ALL, OF_MOVES, Transition, recorded_transitions

NUM_RULES = 250
MAX_LIVE = 6
MAX_CROWD = 12
COUNTERS = (
    "num_preemptions",
    "num_memory_preemptions",
    "num_swapped_out_blocks",
    "num_swapped_in_blocks",
    "num_demoted_blocks",
    "num_promoted_blocks",
    "num_recomputed_tokens",
    "num_moved_blocks",
    "num_pinned_blocks",
    "num_stored_blocks",
    "num_loaded_blocks",
    "num_failed_disk_moves",
    "num_spilled_blocks",
    "num_adopted_tokens",
)


WINDOWS = [
    *[(None,), (None,), (3,), (6,), (None, 4), (None, 3, 5), (None, 2)],
    *[(Chunk(6),), (None, Chunk(4))],
]
"""KV groups of the histories."""


def start(machine: SchedulerMachine, draw: Random, *, is_crowd: bool, has_searches: bool) -> None:
    machine.start(
        num_blocks=draw.randint(5, 16) if has_searches else draw.randint(2, 14),
        block_size=draw.randint(1, 2 if is_crowd else 4),
        max_num_seqs=draw.randint(4, 8) if is_crowd or has_searches else draw.randint(1, 5),
        extra_budget=draw.randint(0, 10),
        caching=draw.random() < 0.7,
        chunk=draw.choice([None, None, 1, 2, 3]),
        watermark=draw.choice([0.0, 0.0, 0.2]),
        num_host_blocks=draw.randint(2, 5) if is_crowd else draw.choice([0, 1, 2, 4, 8, 16]),
        num_disk_blocks=draw.choice([8, 16] if is_crowd else [0, 2, 8, 16, 32]),
        max_disk_moves=draw.choice([1, 2, 4, 100]),
        disk_failures=draw.choice([0.0, 0.0, 0.05, 0.2]),
        mode=PreemptionMode.SWAP if is_crowd else draw.choice(list(PreemptionMode)),
        max_swap_blocks=draw.choice([1, 2, 3, 100]),
        policy=draw.choice(["fcfs", "priority+fair+deadline"]),
        long_prefill=draw.choice([None, 0, 4]),
        max_long_prefills=draw.randint(1, 2),
        eviction=draw.choice(list(Eviction)),
        pinned_share=draw.choice([0.25, 0.5, 1.0]),
        defragment_s=draw.choice([0, 0, 1, 5]),
        max_moves=draw.randint(1, 4),
        num_draft_tokens=draw.choice([0, 0, 1, 3]),
        num_more_blocks=draw.choice([None, 2, 8, 16]),
        kv_windows=Random(f"windows {draw.random()}").choice(WINDOWS),
    )


def submit(machine: SchedulerMachine, draw: Random, *, is_crowd: bool) -> None:
    machine.submit(
        source=draw.randint(0, 1),
        prompt=[draw.randint(0, 1) for _ in range(draw.randint(1, 3 if is_crowd else 14))],
        n=draw.choice([1, 1, 1, 2, 3]),
        max_tokens=draw.randint(6 if is_crowd else 1, 10),
        salt=draw.choice(["", "", "", "other"]),
        priority=draw.choice([-100, -1, 0, 1, 2]),
        tenant=draw.choice(["", "other"]),
        patience=draw.choice([None, None, 20]),
        pin_s=draw.choice([None, None, None, 3, 30]),
    )


def search(machine: SchedulerMachine, draw: Random) -> None:
    machine.search(
        source=draw.randint(0, 1),
        prompt=[draw.randint(0, 1) for _ in range(draw.randint(1, 10))],
        n=draw.choice([1, 2, 3]),
        max_tokens=draw.randint(1, 10),
        min_tokens=draw.choice([0, 0, 2]),
        salt=draw.choice(["", "", "", "other"]),
        beam=BeamParams(
            width=draw.randint(2, 4),
            end_token_ids=draw.choice([(), (1,)]),
            length_penalty=draw.choice([-1.0, 0.0, 1.0]),
            early_stopping=draw.choice(list(EarlyStopping)),
        ),
        patience=draw.choice([None, None, 20]),
    )


def resize(machine: SchedulerMachine, draw: Random, reached: Counter[str]) -> None:
    if machine.shrinks_to:
        if machine.core.resizing.is_shrunk and draw.random() < 0.5:
            reached["num_shrunk_under_load"] += bool(machine.oracle.live)
            machine.end_shrinking(can_shrink=draw.random() < 0.8)
    elif machine.config.max_num_blocks and not machine.to_resubmit and draw.random() < 0.03:
        machine.resize(draw.random())


def live_through(seed: int, reached: Counter[str]) -> SchedulerMachine:
    """Submit, schedule, update, cancel and corrupt at random, then run until all have ended."""
    draw = Random(seed)
    machine = SchedulerMachine()
    is_crowd = draw.random() < 0.3
    """Whether there are many growing sequences, so that several are swapped, and some spill."""
    # a separate generator, so that other histories stay the same
    more_draw = Random(f"more {seed}")
    is_pressed = more_draw.random() < 0.3
    searches = draw.choice([0, 0, 0.5])
    start(machine, draw, is_crowd=is_crowd, has_searches=searches > 0)
    corruption, cancellation = draw.choice([0, 0.02, 0.1]), draw.choice([0, 0.02, 0.1])
    for _ in range(NUM_RULES):
        most = MAX_CROWD if is_crowd else MAX_LIVE
        if len(machine.oracle.live) < most and draw.random() < 0.5:
            if draw.random() < searches:
                search(machine, draw)
            else:
                submit(machine, draw, is_crowd=is_crowd)
        elif draw.random() < 0.55:
            machine.schedule()
        elif machine.unanswered:
            machine.update()
        if draw.random() < corruption:
            blocks = range(machine.config.num_host_blocks)
            machine.worker.corrupt_host([block for block in blocks if draw.random() < 0.5])
            blocks = range(machine.config.num_disk_blocks)
            machine.worker.disk.corrupt([block for block in blocks if draw.random() < 0.3])
        if draw.random() < 0.05:
            machine.worker.disk.ends_per_step = draw.choice([0, 1, 1, 2, 4])
        if draw.random() < cancellation and machine.oracle.live:
            source, key = draw.choice(sorted(machine.oracle.live))
            machine.cancel_one(source, key)
        if draw.random() < 0.002:
            machine.lose_worker()
        if draw.random() < 0.01:
            machine.lose_scheduler(draw.choice([None, None, 0, 1]), draw.randint(0, 2))
        if machine.to_resubmit and draw.random() < 0.2:
            machine.resubmit_all()
        if draw.random() < 0.02:
            machine.core.defragment()
        resize(machine, draw, reached)
        if is_pressed and more_draw.random() < 0.03:
            machine.press(more_draw.choice(list(MemoryLevel)))
        machine.check_books()
        machine.num_rule_steps["histories"] += 1
    machine.teardown()
    return machine


def test_long_histories():
    reached: Counter[str] = Counter()
    taken: set[Transition] = set()
    for seed in range(settings().max_examples):
        try:
            with recorded_transitions() as in_history:
                machine = live_through(seed, reached)
        except Exception as error:
            error.add_note(f"in the history of seed {seed}")
            raise
        taken |= in_history
        load = machine.core.load()
        reached.update({name: getattr(load, name) > 0 for name in COUNTERS})
        reached["num_failed_swap_ins"] += machine.worker.failed_in > 0
        if not machine.config.num_host_blocks:
            assert load.num_swapped_out_blocks == load.num_swapped_in_blocks == 0
    for name in (*COUNTERS, "num_failed_swap_ins", "num_shrunk_under_load"):
        assert reached[name] >= 5, f"the histories seldom have {name}"
    assert taken == ALL - OF_MOVES, "the table of transitions is not what the core does"


def test_a_history_that_once_broke_an_invariant():
    """A load for one sequence named a block whose last slot an adopted sequence writes again."""
    live_through(294, Counter())
