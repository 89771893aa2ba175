"""Drafters (n-grams and a small model), and the number of guesses."""

import numpy as np
import pytest
import torch
from fake_model import FakeModel, FakePool, continue_greedily

from contract.step import Plan
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.speculative.draft_model import ModelDrafter
from gpu_worker.speculative.lengths import DraftLengths
from gpu_worker.speculative.ngram import NgramDrafter
from gpu_worker.step.rows import Rows
from tests.unit.gpu_worker.step.test_executor import GREEDY, LIMITS, ints, new_row

CPU = torch.device("cpu")


def rows_with(*sequences):
    rows = Rows(LIMITS, has_guesses=True)
    rows.apply(
        Plan(
            1,
            num_decodes=0,
            new_sequences=tuple(
                new_row(row, tokens, [row]) for row, tokens in enumerate(sequences)
            ),
        )
    )
    return rows


def ngram_guess(tokens, most=4, sizes=(2, 3)):
    rows, drafter = rows_with(tokens), NgramDrafter(4, *sizes)
    which = np.array([0])
    assert drafter.catch_up(rows, which).all()
    (guess,) = drafter.guess(rows, which, np.array([most]), None)
    return guess.tolist()


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 7, 8, 9, 1, 2, 5, 6, 1, 2], [5, 6, 1, 2]),  # the last occurrence
        ([3, 1, 2, 7, 8, 9, 1, 2, 5, 3, 1, 2], [7, 8, 9, 1]),  # but the longest one first
        ([9, 5, 5, 5], [5, 5, 5, 5]),  # the source overlaps the copy
        ([8, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4], []),
        ([2, 3, 2], []),  # one token is too short for a match
        ([1], []),
    ],
)
def test_ngram_guesses(tokens, guess):
    assert ngram_guess(tokens) == guess


def test_ngram_guesses_no_more_than_asked():
    assert ngram_guess([1, 2, 3, 4, 5, 1, 2], most=2) == [3, 4]


def test_ngrams_are_indexed_as_tokens_come_and_forgotten_with_their_sequence():
    rows, drafter, which = rows_with([1, 2, 3]), NgramDrafter(3, 2, 2), np.array([0])
    assert drafter.catch_up(rows, which).all()
    for token in (4, 1, 2):
        rows.token_ids[0, rows.num_tokens[0]] = token
        rows.num_tokens[0] += 1
    drafter.catch_up(rows, which)
    assert drafter.guess(rows, which, np.array([3]), None)[0].tolist() == [3, 4, 1]
    step = Plan(2, 0, released_rows=ints(0), new_sequences=(new_row(0, [7, 1, 2], [0]),))
    rows.apply(step)
    drafter.prepare(step, rows)
    drafter.catch_up(rows, which)
    assert drafter.guess(rows, which, np.array([3]), None)[0].tolist() == []


class SmallModel:
    """The fake model as a draft model, with a record of its computed tokens."""

    def __init__(self, num_draft_tokens=3):
        self.model = FakeModel()
        pool = FakePool(LIMITS.num_blocks, LIMITS.block_size)
        self.drafter = ModelDrafter(self.model, pool, num_draft_tokens, LIMITS, CPU)
        self.rows = Rows(LIMITS, has_guesses=True)
        self.sampler = Sampler(LIMITS.max_num_seqs, LIMITS.vocab_size, (), CPU)
        self.step_id = 0

    def step(self, **parts):
        self.step_id += 1
        step = Plan(self.step_id, 0, **parts)
        self.rows.apply(step)
        for new in step.new_sequences:
            self.sampler.add(new.row, GREEDY, new.token_ids, new.num_prompt_tokens)
        self.drafter.prepare(step, self.rows)

    def guess(self, *which, most=3):
        """The guesses, and the tokens computed for them."""
        which = np.array(which)
        before = len(self.model.forwards)
        ready = self.drafter.catch_up(self.rows, which)
        most = np.full(ready.sum(), most)
        guesses = self.drafter.guess(self.rows, which[ready], most, self.sampler)
        computed = [tokens for _, _, tokens in self.model.forwards[before:]]
        return [guess.tolist() for guess in guesses], computed

    def append(self, row, *tokens):
        start = self.rows.num_tokens[row]
        self.rows.token_ids[row, start : start + len(tokens)] = tokens
        self.rows.num_tokens[row] += len(tokens)


PROMPT = [11, 22, 33, 44, 55, 66, 78, 5, 6]


def test_the_small_model_guesses_what_it_would_go_on_with():
    small = SmallModel()
    small.step(new_sequences=(new_row(0, PROMPT, [9, 4, 2, 7]),))
    assert small.guess(0) == ([continue_greedily(PROMPT, 3)], [8, 1, 1, 1])


def test_the_small_model_computes_only_what_is_new_to_it():
    small = SmallModel()
    small.step(new_sequences=(new_row(0, PROMPT, [9, 4, 2, 7]),))
    right = continue_greedily(PROMPT, 7)
    small.guess(0)
    small.append(0, *right[:4])  # all three guesses were right: the last is not computed yet
    assert small.guess(0) == ([right[4:7]], [2, 1, 1])
    small.append(0, 70)  # no guess was right
    assert small.guess(0)[1] == [1, 1, 1]
    small.append(0, 71)
    assert small.guess(0)[0] == [continue_greedily([*PROMPT, *right[:4], 70, 71], 3)]


def test_blocks_that_the_small_model_has_computed_are_found_with_the_prefix():
    small = SmallModel()
    small.step(new_sequences=(new_row(0, PROMPT, [9, 4, 2, 7]),))
    small.guess(0)
    prompt = [*PROMPT[:8], 30, 31]
    shared = new_row(1, prompt, [9, 4, 3, 5], num_computed_tokens=9)
    small.step(new_sequences=(shared,))
    assert small.guess(1) == ([continue_greedily(prompt, 3)], [2, 1, 1])


@pytest.mark.parametrize("how", ["swapped in", "reused"])
def test_blocks_that_are_others_contents_are_computed_again(how):
    small = SmallModel()
    small.step(new_sequences=(new_row(0, PROMPT, [9, 4, 2, 7]),))
    small.guess(0)
    if how == "swapped in":
        small.step(swap_in_src_block_ids=ints(0), swap_in_dst_block_ids=ints(4))
    else:
        small.step(new_sequences=(new_row(2, [1, 2], [4]),))
    shared = new_row(1, [*PROMPT[:8], 30, 31], [9, 4, 3, 5], num_computed_tokens=9)
    small.step(new_sequences=(shared,))
    guesses, computed = small.guess(1)
    assert guesses == [continue_greedily([*PROMPT[:8], 30, 31], 3)]
    assert computed == [5, 1, 1, 1]  # from the second block on


def test_a_block_that_moves_is_the_small_models_too():
    small = SmallModel()
    small.step(new_sequences=(new_row(0, PROMPT, [9, 4, 2, 7]),))
    small.guess(0)
    small.step(
        copy_src_block_ids=ints(9),
        copy_dst_block_ids=ints(20),
        renamed_src_block_ids=ints(9),
        renamed_dst_block_ids=ints(20),
    )
    small.append(0, 70)
    assert small.guess(0) == ([continue_greedily([*PROMPT, 70], 3)], [1, 1, 1])


def test_prompts_are_caught_up_with_within_a_steps_budget():
    small = SmallModel()
    prompts = [[row + i for i in range(25)] for row in range(2)]
    blocks = [list(range(8)), list(range(8, 16))]
    small.step(new_sequences=tuple(new_row(r, prompts[r], blocks[r]) for r in (0, 1)))
    assert small.guess(0, 1) == ([continue_greedily(prompts[0], 3)], [40, 1, 1, 1])
    both = [continue_greedily(prompts[0], 3), continue_greedily(prompts[1], 3)]
    assert small.guess(0, 1) == (both, [8, 2, 2, 2])


ROWS = np.arange(2)


def learned(token_s, guess_s=0.0, step_s=1.0, num_rows=1):
    """Lengths that have learned the costs of steps and guesses; all guesses were kept."""
    lengths = DraftLengths(2, 4)
    for num_guessed in (0, 4, 0, 4):
        seconds = step_s + token_s * (num_rows + num_guessed)
        lengths.learn_costs(
            num_rows + num_guessed, num_rows + num_guessed, num_guessed,
            seconds + guess_s * num_guessed, guess_s * num_guessed,
        )  # fmt: skip
    return lengths


def test_what_a_guess_costs_is_learned_from_steps_with_and_without():
    lengths = learned(token_s=0.1, guess_s=0.05)
    rate = 12 / (4 + 0.1 * 12 + 0.05 * 8)
    assert lengths.cost == pytest.approx(rate * 0.15, rel=0.05)
    assert DraftLengths(2, 4).cost == 0


def test_rows_whose_guesses_fail_get_fewer_and_then_none():
    lengths = learned(token_s=0.3)
    lengths.choose(ROWS)  # the first is a trial
    seen = []
    for _ in range(6):
        chosen = lengths.choose(ROWS)
        seen.append(chosen.tolist())
        lengths.learn_chances(ROWS, np.maximum(chosen, 1), np.array([0, chosen[1]]))
    failing, succeeding = zip(*seen, strict=True)
    assert list(failing) == sorted(failing, reverse=True)
    assert failing[-1] == 0
    assert succeeding[-1] == 4


def test_a_failing_row_is_tried_again_and_a_new_sequence_starts_fresh():
    lengths = learned(token_s=0.3)
    for _ in range(8):
        lengths.learn_chances(ROWS, np.array([4, 4]), np.array([0, 0]))
    lengths.choose(ROWS)
    lengths.open([1])
    assert (lengths.choose(ROWS) > 0).tolist() == [False, True]
    for _ in range(200):
        lengths.learn_idle(ROWS)
    assert (lengths.choose(ROWS) > 0).all()


def test_where_a_token_costs_what_a_step_costs_only_trials_guess():
    lengths = learned(token_s=1.0, guess_s=1.0, step_s=0.0)
    chosen = [lengths.choose(ROWS).tolist() for _ in range(33)]
    assert chosen == [[4, 4], *[[0, 0]] * 31, [4, 4]]
