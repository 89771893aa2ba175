"""If the memory is too small for a step, it is computed in parts, with the same tokens."""

import numpy as np
import pytest
import torch
from fake_model import VOCAB_SIZE, FakeModel, FakePool, continue_greedily

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.step.executor import Executor
from gpu_worker.step.rows import ScheduledRows
from gpu_worker.step.step_halving import TokenLimit, halves

LIMITS = Limits(
    max_num_seqs=6,
    max_model_len=64,
    max_num_batched_tokens=60,
    num_blocks=64,
    block_size=4,
    vocab_size=VOCAB_SIZE,
)


def ints(*values):
    return np.array(values, np.int32)


class CrampedModel(FakeModel):
    """A model with memory for a limited number of tokens, and of sequences' logits."""

    def __init__(self, max_tokens, max_logits=100):
        super().__init__()
        self.max_tokens, self.max_logits = max_tokens, max_logits

    def forward(self, token_ids, positions, pool, metadata):
        if len(token_ids) > self.max_tokens:
            raise torch.OutOfMemoryError(f"tried to allocate {len(token_ids)} GiB")
        return super().forward(token_ids, positions, pool, metadata)

    def logits(self, hidden):
        if len(hidden) > self.max_logits:
            raise torch.OutOfMemoryError("tried to allocate logits")
        return super().logits(hidden)


def row(number, tokens, **sampling):
    return NewSequence(
        seq_id=number,
        row=number,
        token_ids=ints(*tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        block_ids=np.arange(number * 10, number * 10 + 10, dtype=np.int32),
        sampling=SamplingParams(**({"seed": 0, "temperature": 0} | sampling)),
        max_total_tokens=40,
    )


PROMPTS = {0: [1, 2, 3], 2: list(range(20, 37)), 1: [5], 4: [7, 7, 8]}


def run(model, num_decodes=3, *, takes_parts=True, **sampling):
    executor = Executor(
        model,
        FakePool(64, 4),
        LIMITS,
        (),
        torch.device("cpu"),
        takes_parts=takes_parts,
    )
    first = Plan(
        1,
        0,
        new_sequences=tuple(row(n, tokens, **sampling) for n, tokens in PROMPTS.items()),
        chunk_rows=ints(*PROMPTS),
        chunk_lens=ints(*map(len, PROMPTS.values())),
    )
    results = [executor.step(first)]
    results += [executor.step(Plan(2 + i, len(PROMPTS))) for i in range(num_decodes)]
    outputs = {number: [] for number in PROMPTS}
    for result in results:
        for number, token in zip(result.sampled_rows, result.sampled_token_ids, strict=True):
            outputs[int(number)].append(int(token))
    return outputs, results


@pytest.mark.parametrize(("max_tokens", "max_logits"), [(12, 100), (3, 100), (1, 1), (100, 1)])
def test_every_sequence_goes_on_as_if_there_were_memory(max_tokens, max_logits):
    model = CrampedModel(max_tokens, max_logits)
    outputs, _ = run(model)
    assert outputs == {n: continue_greedily(tokens, 4) for n, tokens in PROMPTS.items()}
    assert len(model.forwards) > 4


def test_logprobs_and_penalties_are_those_of_the_whole_step():
    wants = {"logprobs": 2, "prompt_logprobs": 1, "frequency_penalty": 0.5, "temperature": 5.0}
    whole, parts = (run(model, **wants) for model in (FakeModel(), CrampedModel(4, 2)))
    assert whole[0] == parts[0]
    for a, b in zip(whole[1], parts[1], strict=True):
        assert [x.index for x in a.logprobs] == [x.index for x in b.logprobs]
        assert [x.logprob for x in a.logprobs] == [x.logprob for x in b.logprobs]
        told = [
            {
                (scores.row, scores.position + i): x.logprob
                for scores in result.prompt_logprobs
                for i, x in enumerate(scores.logprobs)
            }
            for result in (a, b)
        ]
        assert told[0] == told[1]


def test_one_token_without_memory_is_a_failed_step():
    with pytest.raises(torch.OutOfMemoryError):
        run(CrampedModel(0))


def test_steps_of_a_model_that_takes_no_parts_are_not_cut():
    with pytest.raises(torch.OutOfMemoryError):
        run(CrampedModel(12), takes_parts=False)


def test_guesses_of_a_row_stay_together():
    scheduled = ScheduledRows(
        rows=np.array([0, 3, 5]),
        starts=np.array([9, 4, 2]),
        lens=np.array([4, 4, 1]),
        num_decodes=0,
        sampling=np.array([0, 0, 0, 0, 1, 1, 1, 1, 2]),
        positions=np.array([10, 11, 12, 13, 5, 6, 7, 8, 3]),
        incarnations=np.array([1, 1, 1]),
        num_drafting=2,
        guesses=np.arange(9),
    )
    first, second = halves(scheduled)
    assert first.rows.tolist() == [0]
    assert first.guesses.tolist() == [0, 1, 2, 3]
    assert second.rows.tolist() == [3, 5]
    assert (first.num_drafting, second.num_drafting) == (1, 1)
    assert second.sampling.tolist() == [0, 0, 0, 0, 1]
    again, last = halves(second)
    assert again.rows.tolist() == [3]
    assert last.rows.tolist() == [5]
    assert halves(first) is None


def test_after_a_shortage_fewer_tokens_are_tried_for_a_while():
    limit = TokenLimit()
    assert limit.allows(10**6)
    limit.shrink(100)
    assert limit.allows(50)
    assert not limit.allows(51)
    for _ in range(64):
        assert not limit.allows(100)
        limit.count_step()
    assert limit.allows(100)
