"""Rows whose grammar leaves no choice: without logits they sample what they would with them."""

from pathlib import Path

import llguidance
import numpy as np
import pytest
import torch

import contract.sampling
from contract.sampling import SamplingParams
from gpu_worker.sampling.grammar_masks import RowGrammars
from gpu_worker.sampling.sampler import Sampler, sample_others
from gpu_worker.sampling.shared_sampling import ReceivedSamples, SharedSampler

TOKENIZER = Path(__file__).parents[4] / "models" / "quire-tiny-python" / "tokenizer.json"
VOCAB = 4096
EOS = 1
CPU = torch.device("cpu")
WIDTH = 8
RUNS = contract.sampling.StructuredOutput(
    grammar='start: "{\\"configuration\\": " /[0-9]{1,3}/ ", '
    '\\"naïve 日本\\": " ("true" | "false") "}"'
)


def make_sampler(*, is_beside):
    structured = RowGrammars(TOKENIZER, VOCAB, [EOS], CPU, is_beside=is_beside)
    return Sampler(6, VOCAB, (EOS,), CPU, structured), structured


@pytest.fixture
def asking():
    sampler, structured = make_sampler(is_beside=False)
    yield sampler
    structured.close()


@pytest.fixture
def masking():
    sampler, structured = make_sampler(is_beside=True)
    yield sampler
    structured.close()


class Steps:
    """A model whose head is random, over states that are."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.num_logits = 0
        self._generator = torch.Generator().manual_seed(0)
        self._head = torch.randn(WIDTH, VOCAB, generator=self._generator)

    def sample(self, rows, hidden, length):
        self.num_logits += len(rows)
        # Row by row: a product of several may differ in the last bits.
        logits = torch.stack([each @ self._head for each in hidden])
        return self.sampler.sample(
            logits, rows, np.full(len(rows), length + 1), np.full_like(rows, 9)
        )

    def step(self, rows, length, spoiled=()):
        """The tokens of sequences that are `length` long."""
        rows = np.array(rows)
        hidden = torch.randn(len(rows), WIDTH, generator=self._generator)
        hidden[list(spoiled)] = torch.nan
        forced = self.sampler.forced(rows)
        if forced is None:
            sampled = self.sample(rows, hidden, length)
        else:
            sampled = sample_others(
                forced, hidden, lambda part, places: self.sample(rows[places], part, length)
            )
        token_ids = sampled.token_ids.numpy()
        self.sampler.follow(rows, lambda: token_ids)
        return sampled


def add_all(sampler, known=()):
    """A free row, and rows with the same grammar that want logits for this or that."""
    for row, params in enumerate(
        [
            {"ignore_eos": True},
            {"structured": RUNS},
            {"structured": RUNS, "logprobs": 2},
            {"structured": RUNS, "repetition_penalty": 1.3},
            {"structured": RUNS, "temperature": 0.0},
            {"logprobs": 1, "temperature": 0.0},
        ]
    ):
        given = SamplingParams(**({"seed": row} | params))
        sampler.add(row, given, np.array([7, *known], np.int32), 1)


def test_tokens_are_those_that_masks_leave_and_forced_ones_need_no_logits(asking, masking):
    add_all(asking)
    add_all(masking)
    ours, theirs = Steps(asking), Steps(masking)
    rows, ended = range(6), set()
    for length in range(40):
        one, other = ours.step(rows, length), theirs.step(rows, length)
        for row in set(rows) - ended:
            assert one.token_ids[row] == other.token_ids[row]
            ended |= {row} if row in range(1, 5) and one.token_ids[row] == EOS else set()
        assert one.is_finite.all()
        for of_one, of_other in (
            (one.logprobs.places, other.logprobs.places),
            (one.logprobs.chosen, other.logprobs.chosen),
            (one.logprobs.top_token_ids, other.logprobs.top_token_ids),
        ):
            assert of_one.tolist() == of_other.tolist()
    assert ended == {1, 2, 3, 4}
    assert theirs.num_logits == 40 * 6
    assert ours.num_logits < 40 * 6 - 20  # rows 1 and 4 have keys to write


def test_a_resumed_row_is_forced_to_what_it_would_have_been(asking):
    add_all(asking)
    steps = Steps(asking)
    output = [int(steps.step([4], length).token_ids[0]) for length in range(30)]
    tokenizer = llguidance.LLTokenizer(TOKENIZER.read_text())
    key = tokenizer.tokenize_str('{"configuration":')
    assert output[: len(key)] == key
    for length in range(1, len(key)):
        asking.release(range(6))
        add_all(asking, known=output[:length])
        steps = Steps(asking)
        for position in range(length, len(key)):
            assert steps.step([4], position).token_ids.tolist() == [output[position]]
        assert steps.num_logits == 0


def test_a_forced_row_with_states_that_are_not_finite_is_reported(asking):
    add_all(asking)
    sampled = Steps(asking).step([0, 1, 4], 0, spoiled=[1])
    assert sampled.is_finite.tolist() == [True, False, True]


def test_a_step_in_which_all_are_forced_makes_no_logits(asking):
    add_all(asking)
    steps = Steps(asking)
    sampled = steps.step([1, 4], 0)
    assert steps.num_logits == 0
    assert sampled.token_ids[0] == sampled.token_ids[1]
    assert sampled.logprobs is None


def test_a_stuck_row_is_reported_by_its_index(asking):
    add_all(asking)
    asking.add(5, SamplingParams(seed=5, structured=RUNS), np.array([7, EOS, EOS], np.int32), 1)
    assert Steps(asking).step([1, 0, 5], 0).stuck.tolist() == [2]


@pytest.mark.parametrize("num_forced", [0, 1, 2])
def test_a_row_that_samples_another_token_than_its_run_s_is_stuck_at_once(asking, num_forced):
    add_all(asking)
    steps, row = Steps(asking), np.array([4])
    for length in range(num_forced):
        steps.step([4], length)
    assert asking.forced(row) is not None
    asking.follow(row, lambda: np.array([EOS]))
    assert asking.forced(row) is None
    assert steps.step([4], num_forced + 1).stuck.tolist() == [0]


def test_ranks_that_make_logits_together_make_those_of_all_rows(asking):
    add_all(asking)
    assert asking.forced(np.array([1])) is not None
    for kind in (SharedSampler, ReceivedSamples):
        assert kind(asking, None).forced(np.array([1])) is None
