"""The warm-up works with any limits, and leaves all rows free."""

from dataclasses import replace

import numpy as np
import pytest
import structlog
import torch
from fake_model import VOCAB_SIZE, FakeModel, FakePool

from contract.worker_limits import Limits
from gpu_worker.ranks.shards import Place
from gpu_worker.speculative.lengths import DraftLengths
from gpu_worker.speculative.ngram import NgramDrafter
from gpu_worker.step.executor import Executor
from gpu_worker.step.warm_up import warm_up

CPU = torch.device("cpu")
LIMITS = Limits(
    max_num_seqs=6,
    max_model_len=64,
    max_num_batched_tokens=40,
    num_blocks=32,
    block_size=4,
    vocab_size=VOCAB_SIZE,
)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 300, "max_num_batched_tokens": 300},
        {"max_model_len": 2},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    ],
    ids=str,
)
def test_every_limit_will_do(changes, num_draft_tokens):
    limits = replace(LIMITS, **changes)
    drafter = NgramDrafter(num_draft_tokens, 1, 2) if num_draft_tokens else None
    model = FakeModel(checks_context=False)  # the warm-up attends to slots that hold nothing
    executor = Executor(
        model,
        FakePool(limits.num_blocks, limits.block_size),
        limits,
        (13,),
        torch.device("cpu"),
        drafter=drafter,
    )
    warm_up(executor, limits, has_structured_output=False, num_draft_tokens=num_draft_tokens)
    assert executor.rows.num_used == 0
    is_too_small = limits.max_model_len == 2 or limits.max_num_batched_tokens == 1
    assert bool(model.forwards) != is_too_small


class AlwaysGuesses(NgramDrafter):
    """Guesses token 0 and counts its guesses."""

    num_guesses = 0
    num_last = 0

    def _guess(self, _, __, most):
        self.num_guesses += most
        self.num_last = most
        return np.zeros(most, np.int32)


def executor_of(drafter=None, model=None, **parts):
    return Executor(
        model or FakeModel(checks_context=False),
        FakePool(LIMITS.num_blocks, LIMITS.block_size),
        LIMITS,
        (13,),
        CPU,
        drafter=drafter,
        **parts,
    )


def recorded(executor):
    """Returns the list that gets the plans of all steps from now on."""
    plans, step = [], executor.step
    executor.step = lambda plan: plans.append(plan) or step(plan)
    return plans


def test_steps_guess_although_compiling_makes_guesses_look_dear(monkeypatch):
    def learn_that_nothing_pays(self, *_):
        self._steps.add(10, 10, 10, 100.0, 99.0)

    monkeypatch.setattr(DraftLengths, "learn_costs", learn_that_nothing_pays)
    drafter = AlwaysGuesses(3, 1, 2)
    executor = executor_of(drafter)
    warm_up(executor, LIMITS, has_structured_output=False, num_draft_tokens=3)
    assert drafter.num_guesses > 20
    assert executor._speculation._lengths.cost == 0, "it is unknown again"


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
def test_the_last_step_decodes_behind_a_long_prompt(num_draft_tokens):
    drafter = AlwaysGuesses(num_draft_tokens, 1, 2) if num_draft_tokens else None
    executor = executor_of(drafter)
    plans = recorded(executor)
    warm_up(executor, LIMITS, has_structured_output=False, num_draft_tokens=num_draft_tokens)
    assert max(len(new.token_ids) for plan in plans for new in plan.new_sequences) > 50
    assert plans[-1].num_decodes == 1
    assert drafter is None or drafter.num_last == num_draft_tokens


class OtherRank:
    """The connections of a rank with rank 0."""

    place = Place(1, 2)

    def __init__(self, *, has_grammars):
        self.has_grammars = has_grammars

    def any_has(self, flags):
        return flags | self.has_grammars

    def share(self, shared):
        shared.copy_(torch.tensor([[5], [1]]))


@pytest.mark.parametrize("has_grammars", [False, True])
def test_a_rank_without_grammars_makes_the_steps_of_rank_0(has_grammars):
    executor = executor_of(ranks=OtherRank(has_grammars=has_grammars))
    plans = recorded(executor)
    warm_up(executor, LIMITS, has_structured_output=False, ranks=executor._sampler._ranks)
    new = [each for plan in plans for each in plan.new_sequences]
    assert any(each.params.grammar is not None for each in new) == has_grammars


@pytest.mark.parametrize(("nan_after", "num_rows"), [(None, 0), (0, 17)])
def test_rows_that_end_early_are_reported_once(nan_after, num_rows):
    model = FakeModel(nan_after, checks_context=False)  # prompts are of token 0
    with structlog.testing.capture_logs() as logs:
        warm_up(executor_of(model=model), LIMITS, has_structured_output=False)
    assert [each["num_rows"] for each in logs] == [num_rows] * bool(num_rows)
    assert all("compiled while serving" in each["event"] for each in logs)
