"""Verified guesses: a row gets the same tokens as without them, in fewer steps."""

import numpy as np
import pytest
import torch
from fake_model import FakeModel, FakePool, continue_greedily, next_token

from contract.sampling import SamplingParams
from contract.step import Plan
from gpu_worker import metrics
from gpu_worker.speculative.draft_model import ModelDrafter
from gpu_worker.step.executor import Executor
from tests.unit.gpu_worker.step.test_executor import GREEDY, LIMITS, PROMPT, ints, new_row

CPU = torch.device("cpu")
NUM_GUESSES = 3


class Script:
    """Guesses the greedy continuation; `right` says how many guesses of a row are right."""

    num_draft_tokens = NUM_GUESSES

    def __init__(self, right=NUM_GUESSES):
        self.right = right
        self.asked = []

    def prepare(self, step, rows):
        pass

    def catch_up(self, rows, drafting):
        del rows
        return np.ones(len(drafting), np.bool_)

    def guess(self, rows, drafting, most, sampler):
        del sampler
        self.asked.append(dict(zip(drafting.tolist(), most.tolist(), strict=True)))
        guesses = []
        for row, count in zip(drafting.tolist(), most.tolist(), strict=True):
            known = rows.token_ids[row, : rows.num_tokens[row]]
            guess = np.array(continue_greedily(known, count), np.int32)
            guess[self.right :] = (guess[self.right :] + 1) % LIMITS.vocab_size
            guesses.append(guess)
        return guesses


class Driver:
    """A scheduler that lets the worker decide how many tokens its rows gain in a step."""

    def __init__(self, drafter=None, eos_token_ids=(), model=None):
        self.drafter = drafter
        self.model = model or FakeModel()
        pool = FakePool(LIMITS.num_blocks, LIMITS.block_size)
        self.executor = Executor(self.model, pool, LIMITS, eos_token_ids, CPU, drafter=drafter)
        self.step_id = 0
        self.outputs = {}
        self.logprobs = {}

    def step(self, num_decodes=0, new_sequences=(), **parts):
        self.step_id += 1
        arrays = {name: ints(*value) for name, value in parts.items()}
        result = self.executor.step(
            Plan(self.step_id, num_decodes, new_sequences=new_sequences, **arrays)
        )
        rows = result.sampled_rows.tolist()
        for row, token in zip(rows, result.sampled_token_ids.tolist(), strict=True):
            self.outputs.setdefault(row, []).append(token)
        for logprob in result.logprobs:
            self.logprobs.setdefault(rows[logprob.index], []).append(logprob.logprob)
        return result

    def start(self, *new_rows):
        lens = [len(new.token_ids) for new in new_rows]
        return self.step(
            new_sequences=new_rows, chunk_rows=[new.row for new in new_rows], chunk_lens=lens
        )

    def run(self, *new_rows, num_steps=40):
        """Start rows and decode until all have ended."""
        self.start(*new_rows)
        goes_on = sum(len(new.token_ids) + 1 < new.max_total_tokens for new in new_rows)
        for _ in range(num_steps):
            rows = self.executor.rows
            if rows.has_ended(
                used := np.nonzero(rows.is_decoding)[0], rows.incarnation[used]
            ).all():
                return self.outputs
            self.step(num_decodes=goes_on)
        raise AssertionError("rows do not end")


def blocks(row):
    return list(range(row * 5, row * 5 + 5))


def plain(*new_rows, eos_token_ids=(), **more):
    """The rows' tokens without guesses; greedy rows are computed alone, token by token."""
    driver = Driver(eos_token_ids=eos_token_ids, **more)
    driver.start(*new_rows)
    for _ in range(20):
        decoding = int(driver.executor.rows.is_decoding.sum())
        if not decoding:
            break
        driver.step(num_decodes=decoding)
    return driver


@pytest.mark.parametrize("right", range(NUM_GUESSES + 1))
def test_right_and_wrong_guesses_give_the_same_tokens(right):
    driver = Driver(Script(right))
    rows = [new_row(row, PROMPT[: 3 + row], blocks(row), max_total=18) for row in range(3)]
    outputs = driver.run(*rows)
    want = {row: continue_greedily(PROMPT[: 3 + row], 15 - row) for row in range(3)}
    assert outputs == want
    assert driver.step_id < 15 if right else driver.step_id >= 15


def test_a_run_of_right_guesses_comes_in_one_step():
    driver = Driver(Script())
    driver.start(new_row(1, PROMPT, blocks(1), max_total=18))
    driver.step(num_decodes=1)  # a trial: nothing is guessed
    result = driver.step(num_decodes=1)
    assert result.sampled_rows.tolist() == [1, 1, 1, 1]
    assert driver.outputs[1] == continue_greedily(PROMPT, 6)
    assert result.num_computed_tokens == 4


def test_metrics_count_guesses_and_those_that_were_right():
    names = ("DRAFTS", "DRAFT_TOKENS", "ACCEPTED_TOKENS")
    counters = [getattr(metrics, f"SPEC_DECODE_{name}") for name in names]
    before = [counter._value.get() for counter in counters]
    driver = Driver(Script(right=2))
    driver.start(new_row(1, PROMPT, blocks(1), max_total=18))
    driver.step(num_decodes=1)
    driver.step(num_decodes=1)
    after = [counter._value.get() for counter in counters]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 3, 2]


def test_nothing_follows_an_end_token():
    right = continue_greedily(PROMPT, 8)
    driver = Driver(Script(), eos_token_ids=(right[3],))
    driver.start(new_row(1, PROMPT, blocks(1), max_total=18))
    driver.step(num_decodes=1)
    result = driver.step(num_decodes=1)
    assert driver.outputs[1] == right[: right.index(right[3]) + 1]
    assert result.stopped_rows.tolist() == [1]
    assert driver.step(num_decodes=1).num_computed_tokens == 0


@pytest.mark.parametrize("length", range(2, 8))
def test_a_row_gets_no_token_past_its_length(length):
    driver = Driver(Script())
    outputs = driver.run(new_row(1, PROMPT, blocks(1), max_total=len(PROMPT) + length))
    assert outputs[1] == continue_greedily(PROMPT, length)
    rows = driver.executor.rows
    assert rows.num_tokens[1] == rows.max_total[1]


def test_guesses_stay_in_the_block_table_and_in_the_budget():
    script = Script()
    driver = Driver(script)
    driver.start(new_row(0, PROMPT[:5], [0, 1]), *(new_row(r, [r], blocks(r)) for r in (1, 2)))
    driver.step(num_decodes=3)
    prompt = list(range(60))
    new = new_row(5, prompt, range(20, 32), max_total=64)
    driver.step(num_decodes=3, new_sequences=(new,), chunk_rows=[5], chunk_lens=[35])
    # Row 0 knows 7 tokens and has 8 slots. Of 40 tokens 38 are taken.
    assert script.asked == [{0: 1, 1: 1}]
    assert driver.outputs[0] == continue_greedily(PROMPT[:5], 4)


def test_rows_with_penalties_get_no_guesses():
    script = Script()
    driver = Driver(script)
    penalized = SamplingParams(seed=0, temperature=0, repetition_penalty=1.5)
    rows = (
        new_row(0, PROMPT, blocks(0), sampling=penalized, max_total=14),
        new_row(1, PROMPT, blocks(1), max_total=14),
    )
    outputs = driver.run(*rows)
    assert all(set(asked) == {1} for asked in script.asked)
    assert outputs == plain(*rows).outputs


@pytest.mark.parametrize("right", [0, 1, NUM_GUESSES])
def test_draws_biases_minimums_and_logprobs_are_what_they_are_without(right):
    end = continue_greedily(PROMPT, 1)[0]
    common = {"logprobs": 2, "min_tokens": 6, "logit_bias": {5: 1.0}}
    rows = [
        new_row(
            row,
            PROMPT[: 3 + row],
            blocks(row),
            max_total=18,
            sampling=SamplingParams(seed=row, temperature=temperature, **common, top_p=0.95),
        )
        for row, temperature in enumerate([0.0, 0.5, 0.9, 1.5])
    ]
    want = plain(*rows, eos_token_ids=(end,))
    driver = Driver(Script(right), eos_token_ids=(end,))
    assert driver.run(*rows) == want.outputs
    assert driver.logprobs == want.logprobs


def test_a_wrong_guess_that_breaks_the_model_ends_no_row():
    right = continue_greedily(PROMPT, 4)
    bad = (right[2] + 1) % LIMITS.vocab_size  # the guess after the first two tokens
    assert bad not in right
    driver = Driver(Script(right=0), model=FakeModel(nan_after=bad))
    driver.start(new_row(1, PROMPT, blocks(1), max_total=18))
    driver.step(num_decodes=1)
    assert driver.step(num_decodes=1).failed_rows.tolist() == []
    assert driver.outputs[1] == right[:3]


def test_a_right_guess_that_breaks_the_model_ends_the_row_behind_it():
    right = continue_greedily(PROMPT, 6)
    driver = Driver(Script(), model=FakeModel(nan_after=right[3]))
    driver.start(new_row(1, PROMPT, blocks(1), max_total=18))
    driver.step(num_decodes=1)
    result = driver.step(num_decodes=1)
    assert driver.outputs[1] == right[:4]
    assert result.failed_rows.tolist() == [1]
    assert driver.step(num_decodes=1).num_computed_tokens == 0


def test_a_model_that_guesses_for_itself_is_always_right():
    pool = FakePool(LIMITS.num_blocks, LIMITS.block_size)
    driver = Driver(ModelDrafter(FakeModel(), pool, NUM_GUESSES, LIMITS, CPU))
    counters = metrics.SPEC_DECODE_DRAFT_TOKENS, metrics.SPEC_DECODE_ACCEPTED_TOKENS
    before = [counter._value.get() for counter in counters]
    params = SamplingParams(seed=7, temperature=0.9)
    rows = [
        new_row(row, PROMPT[: 3 + row], blocks(row), max_total=18, sampling=sampling)
        for row, sampling in enumerate([GREEDY, params, GREEDY])
    ]
    assert driver.run(*rows) == plain(*rows).outputs
    num_guessed, num_kept = (c._value.get() - b for c, b in zip(counters, before, strict=True))
    assert num_guessed == num_kept > 0
    assert next_token(PROMPT[:3]) == driver.outputs[0][0]
