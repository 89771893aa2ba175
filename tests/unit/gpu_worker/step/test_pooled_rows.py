"""Rows that make a vector of their prompt, beside rows that draw."""

import numpy as np
import pytest
import torch
from fake_model import VOCAB_SIZE, FakeModel, FakePool, context_hash, continue_greedily

from contract.pooling import Pooling, PoolingKind
from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan, StepId
from contract.worker_limits import Limits
from gpu_worker.sampling.params import SamplingTable
from gpu_worker.step.executor import Executor
from gpu_worker.step.pooling import Pooler
from gpu_worker.step.rows import ScheduledRows

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=32,
    max_num_batched_tokens=32,
    num_blocks=32,
    block_size=4,
    vocab_size=VOCAB_SIZE,
)
PROMPT = [11, 22, 33, 44, 55, 66, 78]
HASHES = np.array([context_hash(PROMPT[: i + 1]) for i in range(len(PROMPT))], np.float64)


def ints(*values):
    return np.array(values, np.int32)


class Driver:
    def __init__(self, **model):
        pool = FakePool(LIMITS.num_blocks, LIMITS.block_size)
        self.executor = Executor(FakeModel(**model), pool, LIMITS, (), torch.device("cpu"))
        self.num_steps = 0

    def step(self, *new, num_decodes=0, **chunks):
        """`chunks` are row_0=3 and so on."""
        self.num_steps += 1
        return self.executor.step(
            Plan(
                StepId(self.num_steps),
                num_decodes,
                new_sequences=new,
                chunk_rows=ints(*(int(name.removeprefix("row_")) for name in chunks)),
                chunk_lens=ints(*chunks.values()),
            )
        )


def new_row(row, kind=None, **options):
    pooling = None if kind is None else Pooling(kind, **options)
    return NewSequence(
        seq_id=row,
        row=row,
        token_ids=ints(*PROMPT),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        block_ids=ints(*range(4 * row, 4 * row + 4)),
        sampling=SamplingParams(seed=0, temperature=0, pooling=pooling),
        max_total_tokens=len(PROMPT) + (1 if pooling else 8),
    )


def vectors(result):
    return {each.row: np.frombuffer(each.vector, "<f4") for each in result.pooled}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (PoolingKind.LAST, HASHES[-1]),
        (PoolingKind.MEAN, HASHES.mean()),
        (PoolingKind.CLS, HASHES[0]),
    ],
)
@pytest.mark.parametrize("lens", [(7,), (1, 4, 2), (6, 1)])
def test_any_chunks_give_the_same_vector_beside_a_row_that_draws(kind, expected, lens):
    driver = Driver()
    driver.step(new_row(0), row_0=7)
    new = (new_row(2, kind),)
    drawn = []
    for num_tokens in lens:
        result = driver.step(*new, num_decodes=1, row_2=num_tokens)
        new = ()
        drawn.append(int(result.sampled_token_ids[0]))
    assert vectors(result)[2].tolist() == [np.float32(expected)]
    assert result.sampled_rows.tolist() == [0, 2]
    assert not result.stopped_rows.size
    assert drawn == continue_greedily(PROMPT, 1 + len(lens))[1:]


def test_rows_of_all_kinds_in_one_step():
    driver = Driver()
    kinds = (PoolingKind.MEAN, None, PoolingKind.LAST)
    rows = [new_row(row, kind) for row, kind in enumerate(kinds)]
    result = driver.step(*rows, row_2=7, row_0=7, row_1=7)
    assert vectors(result) == {2: [np.float32(HASHES[-1])], 0: [np.float32(HASHES.mean())]}
    tokens = dict(zip(result.sampled_rows.tolist(), result.sampled_token_ids.tolist(), strict=True))
    assert tokens[1] == continue_greedily(PROMPT, 1)[0]


def test_a_vector_is_normalized():
    result = Driver().step(new_row(0, PoolingKind.MEAN, normalize=True), row_0=7)
    assert vectors(result)[0].tolist() == [1.0]


def test_a_row_whose_hidden_states_are_not_finite_fails():
    result = Driver(nan_after=PROMPT[3]).step(new_row(1, PoolingKind.MEAN), row_1=7)
    assert result.failed_rows.tolist() == [1]
    assert not result.pooled


def scheduled(start, num_tokens, row=0):
    one = np.array([row])
    return ScheduledRows(one, one * 0 + start, one * 0 + num_tokens, 0, one[:0], one[:0], one)


def test_a_chunk_that_comes_again_in_parts_counts_once():
    """As when memory is short, at any time after the hidden states are computed."""
    table = SamplingTable(4, VOCAB_SIZE, ())
    table.set(0, SamplingParams(seed=0, pooling=Pooling(PoolingKind.MEAN)))
    pooler = Pooler(table, None)
    hidden = torch.arange(12, dtype=torch.float32)[:, None]
    for start, end in ((0, 4), (4, 12), (4, 8), (8, 12), (8, 10), (10, 12)):
        pooler.add(hidden[start:end], scheduled(start, end - start))
    (value,) = pooler.vectors(hidden[-1:], np.array([0]), np.array([0]), np.array([12])).values
    assert value.tolist() == [5.5]


def test_token_types_mark_the_second_text():
    table = SamplingTable(4, VOCAB_SIZE, ())
    for row, num_first in enumerate((0, 3)):
        pooling = Pooling(PoolingKind.SCORE, num_first_tokens=num_first)
        table.set(row, SamplingParams(seed=0, pooling=pooling))
    pooler = Pooler(table, None)
    assert pooler.token_types(scheduled(0, 5), torch.device("cpu")) is None
    rows = np.array([0, 1])
    both = ScheduledRows(rows, rows * 0, np.array([2, 5]), 0, rows[:0], rows[:0], rows)
    types = pooler.token_types(both, torch.device("cpu"))
    assert types.tolist() == [0, 0, 0, 0, 0, 1, 1]
