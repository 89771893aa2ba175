from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_model import VOCAB_SIZE, FakeModel, FakePool, continue_greedily, next_token

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.step.executor import Executor
from gpu_worker.step.spans import SequenceSpans
from gpu_worker.weights.json_fields import ModelError

LIMITS = Limits(
    max_num_seqs=6,
    max_model_len=64,
    max_num_batched_tokens=40,
    num_blocks=32,
    block_size=4,
    vocab_size=VOCAB_SIZE,
)
GREEDY = SamplingParams(seed=0, temperature=0)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def ints(*values):
    return np.array(values, np.int32)


class Driver:
    """A scheduler that follows the contract, and allocates the pool's blocks in order."""

    def __init__(self, eos_token_ids=(), model=None, spans=None):
        self.model = model or FakeModel()
        self.pool = FakePool(LIMITS.num_blocks, LIMITS.block_size)
        self.executor = Executor(
            self.model, self.pool, LIMITS, eos_token_ids, torch.device("cpu"), spans
        )
        self.step_id = 0
        self.outputs = {}

    def step(self, num_decodes=0, new_sequences=(), **parts):
        self.step_id += 1
        arrays = {name: ints(*value) for name, value in parts.items()}
        result = self.executor.step(
            Plan(self.step_id, num_decodes, new_sequences=new_sequences, **arrays)
        )
        sampled = zip(result.sampled_rows.tolist(), result.sampled_token_ids.tolist(), strict=True)
        for row, token in sampled:
            self.outputs.setdefault(row, []).append(token)
        assert result.step_id == self.step_id
        return result


def new_row(row, tokens, blocks, *, sampling=GREEDY, max_total=64, **more):
    values = {"num_prompt_tokens": len(tokens), "num_computed_tokens": 0, **more}
    return NewSequence(
        seq_id=100 + row,
        row=row,
        token_ids=ints(*tokens),
        block_ids=ints(*blocks),
        sampling=sampling,
        max_total_tokens=max_total,
        **values,
    )


PROMPT = [11, 22, 33, 44, 55, 66, 78]


def test_prefill_and_decode_give_the_models_continuation():
    driver = Driver()
    first = driver.step(new_sequences=(new_row(3, PROMPT, [9, 4]),), chunk_rows=[3], chunk_lens=[7])
    assert first.sampled_rows.tolist() == [3]
    assert first.num_computed_tokens == 7
    driver.step(num_decodes=1)
    for block in (20, 1, 30):
        driver.step(num_decodes=1, appended_rows=[3], appended_block_ids=[block])
        for _ in range(3):
            driver.step(num_decodes=1)
    assert driver.outputs[3] == continue_greedily(PROMPT, 14)
    assert driver.executor.rows.token_ids[3, :21].tolist() == PROMPT + driver.outputs[3]


def test_chunks_of_any_size_give_the_same():
    driver = Driver()
    driver.step(new_sequences=(new_row(0, PROMPT, [0, 1, 2]),), chunk_rows=[0], chunk_lens=[1])
    empty = driver.step()
    assert empty.sampled_rows.tolist() == []
    assert empty.num_computed_tokens == 0
    for length in (4, 2):
        driver.step(chunk_rows=[0], chunk_lens=[length])
    driver.step(num_decodes=1)
    assert driver.outputs[0] == continue_greedily(PROMPT, 2)


def test_a_mixed_batch_runs_decodes_before_chunks():
    driver = Driver()
    prompts = {0: [1, 2, 3], 1: [4, 5], 2: PROMPT, 4: [9]}
    driver.step(
        new_sequences=(new_row(1, prompts[1], [0, 1]), new_row(4, prompts[4], [2, 3])),
        chunk_rows=[4, 1],
        chunk_lens=[1, 2],
    )
    driver.step(
        num_decodes=2,
        new_sequences=(new_row(2, prompts[2], [5, 6, 7]), new_row(0, prompts[0], [8, 9])),
        chunk_rows=[2, 0],
        chunk_lens=[5, 3],
    )
    assert driver.model.forwards[-1] == (2, 4, 10)
    driver.step(num_decodes=3, chunk_rows=[2], chunk_lens=[2])
    driver.step(num_decodes=4)
    assert driver.outputs == {
        row: continue_greedily(prompts[row], count)
        for row, count in ((1, 4), (4, 4), (0, 3), (2, 2))
    }


def test_forks_share_full_blocks_and_own_a_copy_of_the_partial_one():
    driver = Driver()
    sampling = {row: SamplingParams(seed=40 + row, temperature=20.0) for row in range(3)}
    driver.step(
        new_sequences=(new_row(0, PROMPT, [5, 6], sampling=sampling[0]),),
        chunk_rows=[0],
        chunk_lens=[7],
    )
    # Each fork computes the prompt's last token again, into its own copy of the second block.
    forks = tuple(
        new_row(row, PROMPT, [5, 10 + row], sampling=sampling[row], num_computed_tokens=6)
        for row in (1, 2)
    )
    driver.step(
        num_decodes=1,
        new_sequences=forks,
        copy_src_block_ids=[6, 6],
        copy_dst_block_ids=[11, 12],
        chunk_rows=[1, 2],
        chunk_lens=[1, 1],
    )
    driver.step(num_decodes=3, appended_rows=[0], appended_block_ids=[20])
    driver.step(num_decodes=3, appended_rows=[1, 2], appended_block_ids=[21, 22])
    together = {row: tokens[:3] for row, tokens in driver.outputs.items()}
    assert len({tuple(tokens) for tokens in together.values()}) == 3
    for row, tokens in together.items():
        alone = Driver()
        alone.step(
            new_sequences=(new_row(0, PROMPT, [0, 1, 2], sampling=sampling[row]),),
            chunk_rows=[0],
            chunk_lens=[7],
        )
        alone.step(num_decodes=1)
        alone.step(num_decodes=1)
        assert alone.outputs[0] == tokens


def test_a_resumed_sequence_goes_on_as_if_nothing_had_happened():
    sampling = SamplingParams(seed=9, temperature=30.0, frequency_penalty=1.0)
    whole = Driver()
    whole.step(
        new_sequences=(new_row(0, PROMPT, [0, 1, 2, 3], sampling=sampling),),
        chunk_rows=[0],
        chunk_lens=[7],
    )
    for _ in range(7):
        whole.step(num_decodes=1)
    resumed = Driver()
    known = PROMPT + whole.outputs[0][:4]
    resumed.step(
        new_sequences=(new_row(5, known, [7, 8, 9, 6], sampling=sampling, num_prompt_tokens=7),),
        chunk_rows=[5],
        chunk_lens=[11],
    )
    for _ in range(3):
        resumed.step(num_decodes=1)
    assert resumed.outputs[5] == whole.outputs[0][4:]


def test_a_stop_token_is_reported_once_and_the_row_is_computed_no_more():
    expected = continue_greedily(PROMPT, 3)
    driver = Driver(eos_token_ids=(expected[2],))
    driver.step(new_sequences=(new_row(0, PROMPT, [0, 1, 2]),), chunk_rows=[0], chunk_lens=[7])
    assert driver.step(num_decodes=1).stopped_rows.tolist() == []
    assert driver.step(num_decodes=1).stopped_rows.tolist() == [0]
    # Steps that the scheduler sent before it knew of the end.
    for _ in range(2):
        late = driver.step(num_decodes=1)
        assert late.sampled_rows.tolist() == late.stopped_rows.tolist() == []
        assert late.num_computed_tokens == 0
    driver.step(released_rows=[0])
    assert driver.outputs[0] == expected
    assert driver.executor.rows.num_used == 0


def test_a_row_ends_by_length_on_its_own():
    driver = Driver()
    driver.step(
        new_sequences=(new_row(0, PROMPT, [0, 1, 2], max_total=10),), chunk_rows=[0], chunk_lens=[7]
    )
    driver.step(num_decodes=1)
    last = driver.step(num_decodes=1)
    assert last.stopped_rows.tolist() == []
    assert driver.step(num_decodes=0).sampled_rows.tolist() == []
    assert driver.outputs[0] == continue_greedily(PROMPT, 3)


def test_a_row_with_logits_that_are_not_finite_fails_alone():
    expected = continue_greedily(PROMPT, 2)
    driver = Driver(model=FakeModel(nan_after=expected[1]))
    driver.step(
        new_sequences=(new_row(0, PROMPT, [0, 1, 2]), new_row(1, [3], [3, 4])),
        chunk_rows=[0, 1],
        chunk_lens=[7, 1],
    )
    assert driver.step(num_decodes=2).failed_rows.tolist() == []
    failing = driver.step(num_decodes=2)
    assert failing.failed_rows.tolist() == [0]
    assert failing.sampled_rows.tolist() == [1]
    after = driver.step(num_decodes=2)
    assert after.failed_rows.tolist() == []
    assert after.sampled_rows.tolist() == [1]
    driver.step(num_decodes=1, released_rows=[0], appended_rows=[1], appended_block_ids=[9])
    assert driver.outputs == {0: expected, 1: continue_greedily([3], 5)}


def test_a_row_may_be_reused_in_the_step_that_releases_it():
    driver = Driver()
    driver.step(new_sequences=(new_row(0, [1, 2], [0, 1]),), chunk_rows=[0], chunk_lens=[2])
    driver.step(
        released_rows=[0],
        new_sequences=(new_row(0, [3, 4, 5], [2, 3]),),
        chunk_rows=[0],
        chunk_lens=[3],
    )
    driver.step(num_decodes=1)
    assert driver.outputs[0] == [next_token([1, 2]), *continue_greedily([3, 4, 5], 2)]


def test_logprobs_name_their_place_among_the_sampled_rows():
    wants = SamplingParams(seed=0, temperature=0, logprobs=2)
    driver = Driver(model=FakeModel(nan_after=8))
    result = driver.step(
        new_sequences=(
            new_row(0, [8], [0], sampling=wants),
            new_row(1, [1], [1]),
            new_row(2, [2], [2], sampling=wants),
        ),
        chunk_rows=[0, 1, 2],
        chunk_lens=[1, 1, 1],
    )
    assert result.failed_rows.tolist() == [0]
    assert result.sampled_rows.tolist() == [1, 2]
    (logprob,) = result.logprobs
    assert logprob.index == 1
    assert logprob.top_token_ids[0] == next_token([2])
    assert logprob.top_logprobs[0] == pytest.approx(logprob.logprob)


def test_steps_launched_ahead_of_results_give_the_same_and_hide_what_follows_an_end():
    expected = continue_greedily(PROMPT, 3)
    driver = Driver(eos_token_ids=(expected[2],))
    executor = driver.executor
    launched = [
        executor.launch(
            Plan(
                1,
                0,
                new_sequences=(new_row(0, PROMPT, [0, 1, 2]), new_row(1, [15], [3, 4])),
                chunk_rows=ints(0, 1),
                chunk_lens=ints(7, 1),
            )
        )
    ]
    results = []
    for step_id in range(2, 6):
        launched.append(executor.launch(Plan(step_id, 2)))
        results.append(executor.collect(launched.pop(0)))
    # Sequence 1 leaves and its row is reused while its last token is in flight.
    taken = Plan(
        6,
        1,
        released_rows=ints(1),
        new_sequences=(new_row(1, [6, 7], [8]),),
        chunk_rows=ints(1),
        chunk_lens=ints(2),
    )
    launched.append(executor.launch(taken))
    results.extend(executor.collect(step) for step in launched)
    by_step = [
        dict(zip(r.sampled_rows.tolist(), r.sampled_token_ids.tolist(), strict=True))
        for r in results
    ]
    other = continue_greedily([15], 5)
    assert by_step == [
        {0: expected[0], 1: other[0]},
        {0: expected[1], 1: other[1]},
        {0: expected[2], 1: other[2]},
        {1: other[3]},
        {1: other[4]},
        {1: next_token([6, 7])},
    ]
    assert [r.stopped_rows.tolist() for r in results] == [[], [], [0], [], [], []]


def test_reset_forgets_the_rows_and_keeps_the_blocks():
    driver = Driver()
    driver.step(new_sequences=(new_row(0, PROMPT, [0, 1]),), chunk_rows=[0], chunk_lens=[7])
    driver.executor.reset()
    assert driver.executor.rows.num_used == 0
    adopted = new_row(2, PROMPT, [0, 1], num_computed_tokens=6)
    driver.step(new_sequences=(adopted,), chunk_rows=[2], chunk_lens=[1])
    assert driver.outputs[2] == [next_token(PROMPT)]


class RecordedSpans:
    """Records spans; a span's context is its number."""

    def __init__(self):
        self.spans = []

    def record(self, name, parent, start_s, end_s, attributes, links=()):
        assert start_s <= end_s
        self.spans.append((name, parent, attributes, list(links)))
        return len(self.spans) - 1

    def named(self, name):
        return [span for span in self.spans if span[0] == name]


def test_traced_sequences_have_spans_and_their_steps_too():
    recorded = RecordedSpans()
    contexts = {TRACEPARENT: "traced"}
    driver = Driver(spans=SequenceSpans(record=recorded.record, sampled_context=contexts.get))
    traced = new_row(0, PROMPT, [0, 1, 2], traceparent=TRACEPARENT, num_computed_tokens=0)
    other = new_row(1, [3], [3, 4], traceparent="not sampled")
    driver.step(new_sequences=(traced, other), chunk_rows=[0, 1], chunk_lens=[4, 1])
    assert [span[0] for span in recorded.spans] == ["step"]
    driver.step(num_decodes=1, chunk_rows=[0], chunk_lens=[3])
    (prefill,) = recorded.named("prefill")
    attributes = {"gen_ai.usage.input_tokens": 7, "quire.num_tokens": 7}
    assert prefill == ("prefill", "traced", attributes, [])
    chunks = recorded.named("prefill_chunk")
    assert [(parent, links) for _, parent, _, links in chunks] == [(2, [0]), (2, [1])]
    assert [attributes["quire.num_tokens"] for _, _, attributes, _ in chunks] == [4, 3]
    assert [attributes["quire.num_computed_tokens"] for _, _, attributes, _ in chunks] == [0, 4]
    assert recorded.spans[1][2]["quire.num_seqs"] == 2
    for _ in range(5):
        driver.step(num_decodes=2)
    driver.step(released_rows=[0, 1])
    steps = [index for index, span in enumerate(recorded.spans) if span[0] == "step"]
    ids = [recorded.spans[index][2]["quire.step_id"] for index in steps]
    assert ids == [1, 2, 3, 4, 6], "the chunks, and the 1st, 2nd and 4th decode"
    assert all(recorded.spans[index][3] == ["traced"] for index in steps)
    attributes = {
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 6,
        "quire.num_tokens": 6,
    }
    assert recorded.named("decode") == [("decode", "traced", attributes, steps[2:])]


def test_prefill_that_is_cut_off_has_a_span_and_no_decode():
    recorded = RecordedSpans()
    driver = Driver(spans=SequenceSpans(record=recorded.record, sampled_context=str.upper))
    traced = new_row(0, PROMPT, [0, 1], traceparent=TRACEPARENT, num_computed_tokens=0)
    driver.step(new_sequences=(traced,), chunk_rows=[0], chunk_lens=[4])
    driver.executor.reset()
    assert [span[0] for span in recorded.spans] == ["step", "prefill", "prefill_chunk"]


class UnselectingModel(FakeModel):
    """A model that ignores `metadata.wanted`."""

    def forward(self, token_ids, positions, pool, metadata):
        return super().forward(token_ids, positions, pool, replace(metadata, wanted=None))


def test_a_wrong_number_of_hidden_states_is_an_error_with_both_numbers():
    driver = Driver(model=UnselectingModel())
    message = (
        r"UnselectingModel\.forward returned hidden states of 7 tokens; metadata.num_wanted is 1"
    )
    with pytest.raises(ModelError, match=message):
        driver.step(new_sequences=(new_row(3, PROMPT, [9, 4]),), chunk_rows=[3], chunk_lens=[7])
