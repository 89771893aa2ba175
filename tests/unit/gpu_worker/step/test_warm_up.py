"""The warm-up works with any limits, and leaves all rows free."""

from dataclasses import replace

import pytest
import torch
from fake_model import VOCAB_SIZE, FakeModel, FakePool

from contract.worker_limits import Limits
from gpu_worker.speculative.ngram import NgramDrafter
from gpu_worker.step.executor import Executor
from gpu_worker.step.warm_up import warm_up

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
