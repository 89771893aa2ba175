"""Decode steps that replay graphs equal eager ones; a fake replay calls the computation."""

from itertools import pairwise

import numpy as np
import pytest
import structlog
import torch
from fake_graphs import FakeGraphs
from fake_model import VOCAB_SIZE, FakeModel, FakePool, continue_greedily

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.loading import rank_model as model_part
from gpu_worker.models.registry import open_model
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs.decode_graphs import graph_sizes
from tests.models_fixture import ModelDirs

CPU = torch.device("cpu")
LIMITS = Limits(
    max_num_seqs=13,
    max_model_len=64,
    max_num_batched_tokens=64,
    num_blocks=64,
    block_size=4,
    vocab_size=VOCAB_SIZE,
)
GREEDY = SamplingParams(seed=0, temperature=0)


def ints(*values):
    return np.array(values, np.int32)


def row(number, tokens, blocks, sampling=GREEDY):
    return NewSequence(
        seq_id=number,
        row=number,
        token_ids=ints(*tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        block_ids=ints(*blocks),
        sampling=sampling,
        max_total_tokens=60,
    )


def executor_of(model, pool, limits, graphs):
    executor = Executor(model, pool, limits, (), CPU)
    if graphs is not None:
        executor.capture_decodes(graphs, lambda _: None)
    return executor


def run(executor, prompts, num_decodes, sampling=GREEDY):
    """Outputs by row; the rows start one step after another, so that decodes vary in number."""
    outputs = {number: [] for number in prompts}
    blocks_of_row = 64 // len(prompts)

    def step(step_id, num_decoding, **parts):
        result = executor.step(Plan(step_id, num_decoding, **parts))
        for number, token in zip(result.sampled_rows, result.sampled_token_ids, strict=True):
            outputs[int(number)].append(int(token))

    step_id = 0
    for i, (number, tokens) in enumerate(prompts.items()):
        blocks = np.arange(blocks_of_row * (i + 1) - 1, blocks_of_row * i - 1, -1)
        step_id += 1
        step(
            step_id,
            i,
            new_sequences=(row(number, tokens, blocks, sampling),),
            chunk_rows=ints(number),
            chunk_lens=ints(len(tokens)),
        )
        step_id += 1
        step(step_id, i + 1)
    for _ in range(num_decodes):
        step_id += 1
        step(step_id, len(prompts))
    return outputs


def test_sizes_are_close_enough_that_padding_is_little():
    assert graph_sizes(1) == (1,)
    assert graph_sizes(6) == (1, 2, 4, 6)
    sizes = graph_sizes(1000)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-1] == 1000
    assert all(b - a <= max(8, b / 8) for a, b in pairwise(sizes))


def test_decodes_replay_and_steps_with_chunks_do_not():
    model, graphs = FakeModel(), FakeGraphs()
    executor = executor_of(model, FakePool(64, 4), LIMITS, graphs)
    assert graphs.num_captures == len(graph_sizes(13))
    prompts = {3: [1, 2, 3], 0: [9], 7: list(range(10)), 12: [5, 5], 1: [8, 7, 6]}
    model.forwards.clear()
    outputs = run(executor, prompts, num_decodes=3)
    for number, tokens in prompts.items():
        assert outputs[number] == continue_greedily(tokens, len(outputs[number]))
    sizes = [num_tokens for _, _, num_tokens in model.forwards]
    assert sizes == [3, 1, 2, 2, 12, 4, 5, 4, 7, 8, 8, 8, 8], "decodes are filled up to 1, 2, 4, 8"
    assert graphs.num_replays == 8


def test_steps_launched_ahead_do_not_disturb_each_other():
    executor = executor_of(FakeModel(), FakePool(64, 4), LIMITS, FakeGraphs())
    first = Plan(
        1,
        0,
        new_sequences=(row(0, [4, 5], range(10)), row(1, [6], range(10, 20))),
        chunk_rows=ints(0, 1),
        chunk_lens=ints(2, 1),
    )
    launched = [executor.launch(first)]
    outputs = []
    for step_id in range(2, 7):
        launched.append(executor.launch(Plan(step_id, 2)))
        outputs.append(executor.collect(launched.pop(0)).sampled_token_ids.tolist())
    assert outputs == [
        list(pair)
        for pair in zip(continue_greedily([4, 5], 5), continue_greedily([6], 5), strict=True)
    ]


def test_parts_of_a_step_of_graphs_keep_their_own_tokens(monkeypatch):
    sample = Sampler.sample

    def sample_few(sampler, logits, rows, *args):
        if len(rows) > 2:
            raise torch.OutOfMemoryError("tried to allocate logits")
        return sample(sampler, logits, rows, *args)

    monkeypatch.setattr(Sampler, "sample", sample_few)
    executor = executor_of(FakeModel(), FakePool(64, 4), LIMITS, FakeGraphs())
    prompts = {3: [1, 2, 3], 0: [9], 7: list(range(10)), 12: [5, 5], 1: [8, 7, 6]}
    outputs = run(executor, prompts, num_decodes=3)
    for number, tokens in prompts.items():
        assert outputs[number] == continue_greedily(tokens, len(outputs[number]))


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    return ModelDirs(tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize("family", ["mistral", "gpt_neox"])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=5, temperature=1.0, top_p=0.8)])
def test_a_model_gives_the_same_tokens_as_without_graphs(model_dirs, family, sampling):
    source = open_model(model_dirs.get(family))
    model = source.load(torch.float32, CPU, lambda _: None)
    limits = Limits(
        max_num_seqs=9,
        max_model_len=64,
        max_num_batched_tokens=64,
        num_blocks=64,
        block_size=4,
        vocab_size=source.config.vocab_size,
    )
    prompts = {4: list(range(20)), 0: [7, 8, 9], 8: [3], 2: list(range(30, 41)), 5: [1, 2]}
    outputs = []
    for graphs in (None, FakeGraphs()):
        pool = KvPool(source.config, 64, 4, torch.float32, CPU)
        executor = executor_of(model, pool, limits, graphs)
        outputs.append(run(executor, prompts, 12, sampling))
    assert graphs.num_replays == 17
    assert outputs[0] == outputs[1]


def test_failed_captures_are_logged_and_steps_run_without_graphs():
    model, told = FakeModel(), []
    executor = Executor(model, FakePool(64, 4), LIMITS, (), CPU)
    graphs = FakeGraphs(fails_at=2)
    with structlog.testing.capture_logs() as logs:
        model_part._capture_graphs(executor, graphs, lambda *args: told.append(args))
    assert [line["event"] for line in logs] == [
        "decode steps run without CUDA graphs",
        "steps with prompts run without CUDA graphs",
    ]
    assert "capturing" in str(logs[0]["exc_info"])
    assert told[1] == ("capturing CUDA graphs", pytest.approx(1 / 5))
    prompts = {n: [n + 1, 2] for n in range(4)}
    outputs = run(executor, prompts, num_decodes=3)
    assert outputs == {n: continue_greedily(t, len(outputs[n])) for n, t in prompts.items()}
    assert graphs.num_replays == 0


def test_a_start_that_is_given_up_is_not_taken_for_a_failed_capture():
    class GaveUpError(Exception):
        pass

    def report(*_):
        raise GaveUpError

    executor = Executor(FakeModel(), FakePool(64, 4), LIMITS, (), CPU)
    with pytest.raises(GaveUpError):
        model_part._capture_graphs(executor, FakeGraphs(), report)
