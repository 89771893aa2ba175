"""The simulated worker's blocks: right histories pass, each wrong block number is named."""

import asyncio
import random
from collections import deque

import numpy as np
import pytest

from gpu_worker.sampling_params import SamplingParams
from gpu_worker.step import BrokenInvariantError, Limits, NewRow, StepInput
from quire.v1 import common_pb2
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan import StepOutcome
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from sim_worker.steps import SimulatedSteps
from sim_worker.time_model import TimeModel

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=24,
    max_num_batched_tokens=16,
    num_blocks=10,
    block_size=4,
    vocab_size=50,
)
INSTANT = TimeModel(1, 1, 1e30, 1e30)


@pytest.fixture
async def steps():
    steps = make_steps()
    await steps.attach(0)
    return steps


def make_steps(limits=LIMITS, **changes):
    options = {"eos_token_ids": (1,), "mean_output_len": None, "speedup": 1.0}
    return SimulatedSteps(limits, time_model=INSTANT, **(options | changes))


def ints(*values):
    return np.array(values, np.int32)


def new_row(row=0, tokens=(5, 6, 7, 8, 9), blocks=(0, 1), computed=0):
    sampling = SamplingParams(seed=row)
    return NewRow(row, row, ints(*tokens), len(tokens), computed, ints(*blocks), sampling, 20)


def first_step(**changes):
    return StepInput(1, 0, new_rows=(new_row(),), chunk_rows=ints(0), chunk_lens=ints(5), **changes)


async def test_a_block_that_another_row_holds_may_not_be_given_to_write(steps):
    await steps.submit(0, first_step())
    step = StepInput(2, 1, new_rows=(new_row(1, blocks=(2, 1)),))
    with pytest.raises(BrokenInvariantError, match="row 1 gets block 1 to write, which is in 1"):
        await steps.submit(0, step)


async def test_a_block_may_not_be_twice_in_a_table(steps):
    step = StepInput(1, 0, new_rows=(new_row(blocks=(3, 3)),))
    with pytest.raises(BrokenInvariantError, match="row 0 gets block 3 to write"):
        await steps.submit(0, step)


async def test_a_table_may_not_grow_by_a_block_of_another(steps):
    await steps.submit(0, first_step())
    step = StepInput(2, 1, appended_rows=ints(0), appended_block_ids=ints(0))
    with pytest.raises(BrokenInvariantError, match="row 0 gets block 0 to write"):
        await steps.submit(0, step)


async def test_a_prefix_must_be_what_was_computed(steps):
    await steps.submit(0, first_step())
    good = new_row(1, tokens=(5, 6, 7, 8, 3), blocks=(0, 2), computed=4)
    await steps.submit(0, StepInput(2, 1, new_rows=(good,), chunk_rows=ints(1), chunk_lens=ints(1)))
    bad = new_row(2, tokens=(5, 6, 8, 7, 3), blocks=(0, 3), computed=4)
    step = StepInput(3, 2, new_rows=(bad,), chunk_rows=ints(2), chunk_lens=ints(1))
    with pytest.raises(BrokenInvariantError, match="block 0 does not hold its position 2"):
        await steps.submit(0, step)


async def test_a_fork_without_its_copy_is_noticed(steps):
    await steps.submit(0, first_step())
    fork = new_row(1, tokens=(5, 6, 7, 8, 9, 10), blocks=(0, 2), computed=5)
    step = StepInput(2, 1, new_rows=(fork,), chunk_rows=ints(1), chunk_lens=ints(1))
    with pytest.raises(BrokenInvariantError, match="block 2 does not hold its position 4"):
        await steps.submit(0, step)


async def test_a_fork_with_its_copy_is_right(steps):
    await steps.submit(0, first_step())
    fork = new_row(1, tokens=(5, 6, 7, 8, 9, 10), blocks=(0, 2), computed=5)
    step = StepInput(
        2,
        1,
        new_rows=(fork,),
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
    assert (await steps.submit(0, StepInput(2, 1, **moves))).sampled_rows.tolist() == [0]
    # its old place is another's now
    other = StepInput(3, 1, new_rows=(new_row(1, blocks=(1, 2)),))
    await steps.submit(0, other)


async def test_a_block_may_not_move_to_where_another_is(steps):
    await steps.submit(0, first_step())
    step = StepInput(2, 1, renamed_src_block_ids=ints(1), renamed_dst_block_ids=ints(0))
    with pytest.raises(BrokenInvariantError, match="block 1 is renamed to 0, which is in a table"):
        await steps.submit(0, step)


async def test_a_step_behind_one_that_failed_is_refused_until_somebody_attaches(steps):
    step = StepInput(1, 0, new_rows=(new_row(blocks=(3, 3)),))
    results = [steps.submit(0, step), steps.submit(0, first_step())]
    done = await asyncio.gather(*results, return_exceptions=True)
    assert [type(error).__name__ for error in done] == ["BrokenInvariantError", "UnavailableError"]
    await steps.attach(1)
    assert (await steps.submit(1, first_step())).sampled_rows.tolist() == [0]


@pytest.mark.parametrize("seed", range(4))
async def test_what_the_scheduler_core_plans_is_never_wrong(seed):
    """Tiny pool, small vocabulary: preemption, prefix hits, forks, moves, two steps in flight."""
    dice = random.Random(seed)
    limits = Limits(4, 24, 8, 14, 2, 5)
    steps = make_steps(limits, mean_output_len=6)
    await steps.attach(0)
    moving = {"defragment_interval_s": 3.0, "defragment_threshold": 0.0}
    core = Scheduler(SchedulerConfig(14, 2, 4, 8, 24, 64, watermark=0.0, **moving))
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
            news = core.update(
                StepOutcome(
                    output.step_id,
                    output.sampled_rows,
                    output.sampled_token_ids,
                    output.stopped_rows,
                    output.failed_rows,
                )
            )
            ended += len(news.finished)
    assert ended == submitted >= 60
    assert core.load().num_preemptions > 5
    assert core.load().prefix_cache_hits > 50
    assert core.load().num_moved_blocks > 50


def as_input(plan):
    """What the wire makes of a plan."""

    def row(new):
        seed = common_pb2.SamplingParams.FromString(new.sampling).seed + new.output_index
        return NewRow(
            new.seq_id,
            new.row,
            new.token_ids,
            new.num_prompt_tokens,
            new.num_computed_tokens,
            new.block_ids,
            SamplingParams(seed=seed),
            new.max_total_tokens,
        )

    return StepInput(
        plan.step_id,
        plan.num_decodes,
        plan.released_rows,
        tuple(map(row, plan.new_sequences)),
        plan.appended_rows,
        plan.appended_block_ids,
        plan.copy_src_block_ids,
        plan.copy_dst_block_ids,
        plan.chunk_rows,
        plan.chunk_lens,
        renamed_src_block_ids=plan.renamed_src_block_ids,
        renamed_dst_block_ids=plan.renamed_dst_block_ids,
    )
