"""The simulated worker's blocks: right histories pass, and errors name each wrong block."""

import asyncio
import random
from collections import deque
from dataclasses import fields, replace

import numpy as np
import pytest

from contract.errors import InconsistentPlanError
from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan, Result
from contract.worker_limits import Limits
from quire.v1 import common_pb2
from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from sim_worker.steps import SimulatedSteps
from sim_worker.time_model import TimeModel

CANDIDATES = {name for name in Result.__slots__ if name.startswith("candidate_")}
"""Fields of a result for beam searches, which do not occur here."""

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=24,
    max_num_batched_tokens=16,
    num_blocks=10,
    block_size=4,
    vocab_size=50,
    num_host_blocks=4,
    num_disk_blocks=3,
)
INSTANT = TimeModel(1, 1, 1e30, 1e30)


@pytest.fixture
async def steps():
    steps = make_steps()
    await steps.attach(0)
    return steps


def make_steps(limits=LIMITS, **changes):
    options = {"eos_token_ids": (1,), "mean_output_len": None, "speedup": 1.0}
    options["time_model"] = INSTANT
    return SimulatedSteps(limits, **(options | changes))


def ints(*values):
    return np.array(values, np.int32)


def new_row(row=0, tokens=(5, 6, 7, 8, 9), blocks=(0, 1), computed=0):
    sampling = SamplingParams(seed=row)
    return NewSequence(row, row, ints(*tokens), len(tokens), computed, ints(*blocks), sampling, 20)


def first_step(**changes):
    return Plan(1, 0, new_sequences=(new_row(),), chunk_rows=ints(0), chunk_lens=ints(5), **changes)


async def test_a_block_that_another_row_holds_may_not_be_given_to_write(steps):
    await steps.submit(0, first_step())
    step = Plan(2, 1, new_sequences=(new_row(1, blocks=(2, 1)),))
    with pytest.raises(InconsistentPlanError, match="row 1 gets block 1 to write, which is in 1"):
        await steps.submit(0, step)


async def test_a_block_may_not_be_twice_in_a_table(steps):
    step = Plan(1, 0, new_sequences=(new_row(blocks=(3, 3)),))
    with pytest.raises(InconsistentPlanError, match="row 0 gets block 3 to write"):
        await steps.submit(0, step)


async def test_a_table_may_not_grow_by_a_block_of_another(steps):
    await steps.submit(0, first_step())
    step = Plan(2, 1, appended_rows=ints(0), appended_block_ids=ints(0))
    with pytest.raises(InconsistentPlanError, match="row 0 gets block 0 to write"):
        await steps.submit(0, step)


async def test_a_prefix_must_be_what_was_computed(steps):
    await steps.submit(0, first_step())
    good = new_row(1, tokens=(5, 6, 7, 8, 3), blocks=(0, 2), computed=4)
    await steps.submit(0, Plan(2, 1, new_sequences=(good,), chunk_rows=ints(1), chunk_lens=ints(1)))
    bad = new_row(2, tokens=(5, 6, 8, 7, 3), blocks=(0, 3), computed=4)
    step = Plan(3, 2, new_sequences=(bad,), chunk_rows=ints(2), chunk_lens=ints(1))
    with pytest.raises(InconsistentPlanError, match="block 0 does not hold its position 2"):
        await steps.submit(0, step)


async def test_a_fork_without_its_copy_is_noticed(steps):
    await steps.submit(0, first_step())
    fork = new_row(1, tokens=(5, 6, 7, 8, 9, 10), blocks=(0, 2), computed=5)
    step = Plan(2, 1, new_sequences=(fork,), chunk_rows=ints(1), chunk_lens=ints(1))
    with pytest.raises(InconsistentPlanError, match="block 2 does not hold its position 4"):
        await steps.submit(0, step)


async def test_a_fork_with_its_copy_is_right(steps):
    await steps.submit(0, first_step())
    fork = new_row(1, tokens=(5, 6, 7, 8, 9, 10), blocks=(0, 2), computed=5)
    step = Plan(
        2,
        1,
        new_sequences=(fork,),
        copy_src_block_ids=ints(1),
        copy_dst_block_ids=ints(2),
        chunk_rows=ints(1),
        chunk_lens=ints(1),
    )
    assert (await steps.submit(0, step)).sampled_rows.tolist() == [0, 1]


async def test_a_block_that_moves_takes_its_writer_along(steps):
    await steps.submit(0, first_step())
    moves = {
        "renamed_src_block_ids": ints(1),
        "renamed_dst_block_ids": ints(7),
        "copy_src_block_ids": ints(1),
        "copy_dst_block_ids": ints(7),
    }
    assert (await steps.submit(0, Plan(2, 1, **moves))).sampled_rows.tolist() == [0]
    # its old block belongs to another sequence now
    other = Plan(3, 1, new_sequences=(new_row(1, blocks=(1, 2)),))
    await steps.submit(0, other)


async def test_a_block_may_not_move_to_where_another_is(steps):
    await steps.submit(0, first_step())
    step = Plan(2, 1, renamed_src_block_ids=ints(1), renamed_dst_block_ids=ints(0))
    with pytest.raises(InconsistentPlanError, match="block 1 is renamed to 0, which is in a table"):
        await steps.submit(0, step)


def moves(step_id, num_decodes=0, **pairs):
    """A step that moves KV: `swap_out=([1], [2])` copies device block 1 to host block 2."""
    lists = {
        f"{kind}_{end}_block_ids": ints(*blocks)
        for kind, pair in pairs.items()
        for end, blocks in zip(("src", "dst"), pair, strict=True)
    }
    return Plan(step_id, num_decodes, **lists)


def resumed(step_id, blocks):
    """The first sequence again, with all tokens but the last computed."""
    new = new_row(1, tokens=(5, 6, 7, 8, 9, 10), blocks=blocks, computed=5)
    return Plan(step_id, 0, new_sequences=(new,), chunk_rows=ints(1), chunk_lens=ints(1))


async def swapped_out(**options):
    """Steps whose first sequence was computed in blocks 0 and 1 and swapped to host blocks 3 and 2.

    Returns them and the next step's number. The disk moves a block in 1/50 s.
    """
    disk = TimeModel(1, 1, 1e30, 1e30, 1e30, 50.0)
    steps = make_steps(block_bytes=1, time_model=disk, **options)
    await steps.attach(0)
    await steps.submit(0, first_step())
    await steps.submit(0, moves(2, 1, swap_out=([0, 1], [3, 2])))
    await steps.submit(0, Plan(3, 0, released_rows=ints(0)))
    return steps, 4


async def until_ended(steps, step, num_moves):
    """Run a step and then empty ones until its disk moves have ended; the next step's number."""
    num_ended = 0
    while True:
        output = await steps.submit(0, step)
        num_new = len(output.stored_disk_block_ids) + len(output.loaded_host_block_ids)
        assert num_new > 0
        num_ended += num_new
        step = Plan(step.step_id + 1, 0)
        if num_ended == num_moves:
            return step.step_id


async def test_kv_that_went_through_all_tiers_is_right():
    steps, step_id = await swapped_out()
    step_id = await until_ended(steps, moves(step_id, disk_store=([2, 3], [1, 0])), 2)
    step_id = await until_ended(steps, moves(step_id, disk_load=([0, 1], [1, 0])), 2)
    await steps.submit(0, moves(step_id, swap_in=([1, 0], [5, 6])))
    assert (await steps.submit(0, resumed(step_id + 1, (5, 6)))).sampled_rows.tolist() == [1]


async def test_a_swap_in_of_the_wrong_block_is_noticed():
    steps, step_id = await swapped_out()
    await steps.submit(0, moves(step_id, swap_in=([2, 3], [5, 6])))
    with pytest.raises(InconsistentPlanError, match="block 5 does not hold its position 0"):
        await steps.submit(0, resumed(step_id + 1, (5, 6)))


async def test_a_swap_in_may_not_be_read_in_its_own_step():
    steps, step_id = await swapped_out()
    swap_in = {"swap_in_src_block_ids": ints(3), "swap_in_dst_block_ids": ints(5)}
    copy = {"copy_src_block_ids": ints(5), "copy_dst_block_ids": ints(7)}
    await steps.submit(0, Plan(step_id, 0, **swap_in, **copy))
    with pytest.raises(InconsistentPlanError, match="block 7 does not hold its position 0"):
        await steps.submit(0, resumed(step_id + 1, (7, 6)))


async def test_a_swap_in_may_not_go_to_a_block_in_use(steps):
    await steps.submit(0, first_step())
    await steps.submit(0, moves(2, 1, swap_out=([0], [0])))
    with pytest.raises(InconsistentPlanError, match="swapped in to block 1, which is in 1 tables"):
        await steps.submit(0, moves(3, 1, swap_in=([0], [1])))


async def test_a_rename_without_its_copy_is_noticed(steps):
    await steps.submit(0, first_step())
    sharing = new_row(1, tokens=(5, 6, 7, 8, 3), blocks=(0, 2), computed=4)
    renaming = Plan(
        2,
        1,
        new_sequences=(sharing,),
        chunk_rows=ints(1),
        chunk_lens=ints(1),
        renamed_src_block_ids=ints(0),
        renamed_dst_block_ids=ints(7),
    )
    with pytest.raises(InconsistentPlanError, match="block 7 does not hold its position 0"):
        await steps.submit(0, renaming)


STORE = {"disk_store": ([3], [0])}
LOAD = {"disk_load": ([0], [1])}


@pytest.mark.parametrize(
    ("ended", "under_way", "bad", "problem"),
    [
        ({}, {}, {"swap_in": ([1], [5])}, "swapped in from host block 1, which holds nothing"),
        ({}, {}, {"disk_store": ([1], [0])}, "stored from host block 1, which holds nothing"),
        ({}, {}, LOAD, "loaded from disk block 0, which holds nothing"),
        ({}, STORE, LOAD, "loaded from disk block 0, which is being moved"),
        ({}, STORE, STORE, "stored in disk block 0, which is being moved"),
        (STORE, LOAD, STORE, "stored in disk block 0, which is being moved"),
        (STORE, LOAD, LOAD, "loaded to host block 1, which is being moved"),
        (
            STORE,
            LOAD,
            {"swap_in": ([1], [5])},
            "swapped in from host block 1, which is being moved",
        ),
        (STORE, LOAD, {"swap_out": ([4], [1])}, "swapped out to host block 1, which is being"),
        (STORE, LOAD, {"disk_store": ([1], [1])}, "stored from host block 1, which is being moved"),
    ],
)
async def test_a_move_that_the_contract_forbids_is_named(ended, under_way, bad, problem):
    steps, step_id = await swapped_out()
    if ended:
        step_id = await until_ended(steps, moves(step_id, **ended), 1)
    steps.submit(0, moves(step_id, **under_way))  # no move ends before a step waits for it
    with pytest.raises(InconsistentPlanError, match=problem):
        await steps.submit(0, moves(step_id + 1, **bad))


async def test_attaching_loses_what_is_being_moved():
    steps, step_id = await swapped_out()
    steps.submit(0, moves(step_id, **STORE))
    await steps.attach(1)
    with pytest.raises(
        InconsistentPlanError, match="loaded from disk block 0, which holds nothing"
    ):
        await steps.submit(1, moves(1, **LOAD))


async def test_a_step_that_only_waits_for_the_disk_lets_one_that_computes_pass():
    steps, step_id = await swapped_out(speedup=1e-4)  # a block takes 200 s
    waiting = steps.submit(0, moves(step_id, **STORE))
    new = new_row(0, blocks=(5, 6))
    computing = Plan(step_id + 1, 0, new_sequences=(new,), chunk_rows=ints(0), chunk_lens=ints(5))
    assert (await steps.submit(0, computing)).sampled_rows.tolist() == [0]
    assert (await waiting).stored_disk_block_ids.tolist() == []


async def test_steps_after_a_failed_one_are_refused_until_the_next_attach(steps):
    step = Plan(1, 0, new_sequences=(new_row(blocks=(3, 3)),))
    results = [steps.submit(0, step), steps.submit(0, first_step())]
    done = await asyncio.gather(*results, return_exceptions=True)
    assert [type(error).__name__ for error in done] == ["InconsistentPlanError", "UnavailableError"]
    await steps.attach(1)
    assert (await steps.submit(1, first_step())).sampled_rows.tolist() == [0]


@pytest.mark.parametrize(("num_host_blocks", "num_disk_blocks"), [(0, 0), (9, 0), (4, 9)])
@pytest.mark.parametrize("seed", range(4))
async def test_the_cores_plans_are_never_wrong(seed, num_host_blocks, num_disk_blocks):
    """Tiny pools and vocabulary, with preemption, prefix hits, forks, moves, two steps in
    flight."""
    dice = random.Random(seed)
    limits = Limits(
        4, 24, 8, 14, 2, 5, num_host_blocks=num_host_blocks, num_disk_blocks=num_disk_blocks
    )
    steps = make_steps(limits, mean_output_len=6)
    await steps.attach(0)
    moving = {"defragment_interval_s": 3.0, "defragment_threshold": 0.0}
    config = SchedulerConfig(14, 2, 4, 8, 24, max_waiting=64, watermark=0.0, **moving)
    config = replace(config, num_host_blocks=num_host_blocks, num_disk_blocks=num_disk_blocks)
    core = Scheduler(replace(config, preemption_mode=PreemptionMode.SWAP))
    in_flight = deque()
    submitted = ended = 0
    for turn in range(1500):
        if submitted < 60 and dice.random() < 0.2:
            prompt = ints(*(dice.randrange(2, 4) for _ in range(dice.randint(1, 12))))
            sampling = common_pb2.SamplingParams(seed=dice.randrange(99)).SerializeToString()
            n = dice.randint(1, 3)
            core.submit(
                Request(SourceId(0), SeqKey(submitted), "", prompt, n, 12, sampling), float(turn)
            )
            submitted += n
        if (plan := core.schedule(float(turn))) is not None:
            in_flight.append(steps.submit(0, as_input(plan)))
        if len(in_flight) == 2 or (in_flight and dice.random() < 0.5):
            output = await in_flight.popleft()
            names = {field.name for field in fields(Result)} - CANDIDATES
            news = core.update(Result(**{name: getattr(output, name) for name in names}))
            ended += len(news.finished)
    assert ended == submitted >= 60
    assert core.load().num_preemptions > 5
    assert core.load().prefix_cache_hits > 50
    assert core.load().num_moved_blocks > 50
    if num_host_blocks:
        assert core.load().num_swapped_in_blocks > core.load().num_promoted_blocks > 0
    if num_disk_blocks:
        assert core.load().num_stored_blocks > core.load().num_loaded_blocks > 0
        assert core.load().num_failed_disk_moves == 0


def as_input(plan):
    """A plan after encoding and decoding."""

    def row(new):
        seed = common_pb2.SamplingParams.FromString(new.sampling).seed + new.output_index
        return NewSequence(
            new.seq_id,
            new.row,
            new.token_ids,
            new.num_prompt_tokens,
            new.num_computed_tokens,
            new.block_ids,
            SamplingParams(seed=seed),
            new.max_total_tokens,
        )

    same = {
        field.name: getattr(plan, field.name)
        for field in fields(Plan)
        if field.name not in ("new_sequences", "serialize")
    }
    return Plan(new_sequences=tuple(map(row, plan.new_sequences)), **same)
