"""Steps that replay pieces equal eager ones; a fake replay computes what was recorded."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import structlog
import torch
from fake_graphs import FakeGraphs, FakePieces
from fake_model import FakeModel, FakePool

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layer_groups import group_layers
from gpu_worker.loading import rank_model
from gpu_worker.models.registry import open_model
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs import piecewise_graphs
from gpu_worker.step.graphs.cuda_graphs import CudaGraphs, PiecesError
from gpu_worker.step.graphs.piecewise_graphs import piece_sizes
from gpu_worker.weights import gpu_linear
from gpu_worker.weights.quantized_linear import Quantization
from kernels.cpu import linear as native
from tests.models_fixture import ModelDirs
from tests.mxfp4_fixture import write_mxfp4

CPU = torch.device("cpu")
LIMITS = Limits(
    max_num_seqs=6,
    max_model_len=64,
    max_num_batched_tokens=64,
    num_blocks=320,
    block_size=4,
    vocab_size=97,
)
_GREEDY = SamplingParams(seed=1, temperature=0.0, ignore_eos=True)
_KINDS = [
    _GREEDY,
    SamplingParams(seed=3, temperature=1.0, top_p=0.9, ignore_eos=True),
    SamplingParams(seed=4, temperature=0.0, logprobs=2, prompt_logprobs=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    return ModelDirs(tmp_path_factory.mktemp("pieces"))


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch):
    """Sizes 8, 16 and 24, so that larger steps run eagerly."""
    monkeypatch.setattr(piecewise_graphs, "_MAX_TOKENS", 24)


def make_executor(source, graphs, *, has_groups=False, device=CPU, dtype=torch.float32):
    model = source.load(dtype, device, lambda _: None)
    config, groups, limits = source.config, None, LIMITS
    limits = replace(limits, vocab_size=config.vocab_size)
    if has_groups:
        groups = group_layers(config.windows, limits.max_model_len)
        limits = replace(limits, kv_windows=groups.windows)
    pool = KvPool(config, LIMITS.num_blocks, 4, dtype, device, None, groups)
    executor = Executor(model, pool, limits, (), device)
    if graphs is not None:
        executor.capture_pieces(graphs, lambda _: None)
    return executor


def run_randomly(executor, seed, num_steps=25):
    """Drive random prompts, in random chunks beside decodes; returns all results."""
    chance, results = np.random.default_rng(seed), []
    limits, rows = executor._limits, executor.rows
    num_groups = len(limits.kv_windows)
    left = {}  # tokens of each row's prompt to compute
    for step_id in range(1, num_steps + 1):
        decoding = np.flatnonzero(rows.is_decoding)
        ended = [row for row in range(limits.max_num_seqs) if rows.is_used[row]]
        ended = [row for row in ended if row not in left and row not in decoding]
        num_free = limits.max_num_batched_tokens - limits.max_num_seqs
        new = []
        free = [row for row in range(limits.max_num_seqs) if not rows.is_used[row]] + ended
        if free and chance.random() < 0.6:
            row, length = free[0], int(chance.integers(1, 45))
            blocks = np.arange(16 * num_groups, dtype=np.int32) + row * 16 * num_groups
            new.append(
                NewSequence(
                    seq_id=step_id,
                    row=row,
                    token_ids=chance.integers(0, 90, length).astype(np.int32),
                    num_prompt_tokens=length,
                    num_computed_tokens=0,
                    block_ids=blocks,
                    sampling=_KINDS[step_id % 3],
                    max_total_tokens=min(64, length + int(chance.integers(1, 20))),
                )
            )
            left[row] = length
        chunks = {}
        for row in list(left):
            count = min(left[row], int(chance.integers(1, 40)), num_free)
            if count > 0 and chance.random() < 0.8:
                chunks[row] = count
                num_free -= count
                left[row] -= count
                if not left[row]:
                    del left[row]
        released = [each.row for each in new if each.row in ended]
        plan = Plan(
            step_id,
            len(decoding),
            new_sequences=tuple(new),
            released_rows=np.array(released, np.int32),
            chunk_rows=np.array(list(chunks), np.int32),
            chunk_lens=np.array(list(chunks.values()), np.int32),
        )
        result = executor.step(plan)
        results.append(
            (
                result.sampled_rows.tolist(),
                result.sampled_token_ids.tolist(),
                [each.top_token_ids.tolist() for each in result.logprobs],
                result.num_computed_tokens,
                result.failed_rows.tolist(),
            )
        )
    return results


WITHOUT_EXPERTS = ("llama", "mistral", "gpt_neox")


@pytest.mark.parametrize(
    "family", [*WITHOUT_EXPERTS, "mixtral", "glm4_moe", "gpt_oss", "qwen2_moe"]
)
def test_random_steps_give_the_same_tokens_as_without_graphs(monkeypatch, model_dirs, family):
    if family not in WITHOUT_EXPERTS:  # experts are grouped on a GPU
        monkeypatch.setattr(gpu_linear, "is_here", lambda device: device.type == "cpu")
        monkeypatch.setattr(native, "can_pack", lambda _: False)
    source, graphs = open_model(model_dirs.get(family)), FakePieces(monkeypatch)
    for seed in range(2):
        eager = run_randomly(make_executor(source, None), seed)
        graphs.num_replays = 0
        replayed = run_randomly(make_executor(source, graphs), seed)
        assert replayed == eager
        assert 10 < graphs.num_replays < 25, "the largest steps are eager"


@pytest.mark.parametrize("quantization", Quantization)
def test_steps_with_quantized_experts_are_captured(monkeypatch, model_dirs, quantization):
    monkeypatch.setattr(gpu_linear, "is_here", lambda device: device.type == "cpu")
    monkeypatch.setattr(gpu_linear.QuantizedLinear, "compile", lambda *_: None)
    monkeypatch.setattr(native, "can_pack", lambda _: False)
    source = open_model(model_dirs.get("mixtral", intermediate_size=64), quantization=quantization)
    graphs, dtype = FakePieces(monkeypatch), torch.bfloat16
    eager = run_randomly(make_executor(source, None, dtype=dtype), 1)
    assert run_randomly(make_executor(source, graphs, dtype=dtype), 1) == eager
    assert graphs.num_replays > 10


def test_steps_with_experts_in_mxfp4_are_captured(monkeypatch, model_dirs, tmp_path):
    packed, _ = write_mxfp4(model_dirs.get("gpt_oss"), tmp_path)
    monkeypatch.setattr(gpu_linear, "is_here", lambda device: device.type == "cpu")
    monkeypatch.setattr(gpu_linear.QuantizedLinear, "compile", lambda *_: None)
    source, graphs, dtype = open_model(packed), FakePieces(monkeypatch), torch.bfloat16
    eager = run_randomly(make_executor(source, None, dtype=dtype), 1)
    assert run_randomly(make_executor(source, graphs, dtype=dtype), 1) == eager
    assert graphs.num_replays > 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_steps_on_a_gpu_give_the_same_tokens_as_without_graphs(model_dirs):
    source, device = open_model(model_dirs.get("mistral")), torch.device("cuda", 0)
    eager = run_randomly(make_executor(source, None, device=device), 3)
    graphs = CudaGraphs(device)
    assert run_randomly(make_executor(source, graphs, device=device), 3) == eager


def test_layers_of_several_groups_have_their_own_slots_and_tables(monkeypatch, model_dirs):
    windows = {"use_sliding_window": True, "sliding_window": 9}
    layers = ["full_attention", "sliding_attention", "sliding_attention"]
    source = open_model(model_dirs.get("qwen2", layer_types=layers, **windows))
    graphs = FakePieces(monkeypatch)
    eager = run_randomly(make_executor(source, None, has_groups=True), 1)
    assert run_randomly(make_executor(source, graphs, has_groups=True), 1) == eager


def test_pieces_end_at_each_layer_s_attention(monkeypatch, model_dirs):
    graphs = FakePieces(monkeypatch)
    make_executor(open_model(model_dirs.get("qwen2")), graphs)  # 3 layers
    assert graphs.num_parts == [7] * 3


def test_experts_whose_tokens_the_host_counts_are_not_captured(monkeypatch, model_dirs):
    source, graphs = open_model(model_dirs.get("mixtral")), FakePieces(monkeypatch)
    with pytest.raises(RuntimeError, match="capturing"):
        make_executor(source, graphs)


class OwnAttention(FakeModel):
    """Looks at the sequences itself, so pieces would repeat what it saw."""


class NoAttention(FakeModel):
    def forward(self, token_ids, *_):
        return token_ids[:, None].double()


@pytest.mark.parametrize("model", [OwnAttention(), NoAttention()])
def test_a_model_that_does_not_attend_through_us_runs_eagerly(monkeypatch, model):
    pool = FakePool(64, 4)
    pool.groups = group_layers((None,), 64)
    executor, graphs = Executor(model, pool, LIMITS, (), CPU), FakePieces(monkeypatch)
    with structlog.testing.capture_logs() as logs:
        rank_model._capture_graphs(executor, graphs, lambda *_: None)
    assert logs[-1]["event"] == "steps with prompts run without CUDA graphs"
    assert not executor._model_runner._pieces


def test_a_forward_pass_without_attention_is_named(monkeypatch):
    pool = FakePool(64, 4)
    pool.groups = group_layers((None,), 64)
    executor = Executor(NoAttention(), pool, LIMITS, (), CPU)
    with pytest.raises(PiecesError, match="of 24 tokens attends in 0 of 1 layers"):
        executor.capture_pieces(FakePieces(monkeypatch), lambda _: None)


def test_failed_pieces_leave_graphs_of_decodes(monkeypatch, model_dirs):
    source = open_model(model_dirs.get("llama"))
    executor = make_executor(source, None)
    graphs = FakePieces(monkeypatch, fails_at=4)  # 4 sizes of decodes: 1, 2, 4, 6
    graphs.capture = lambda compute: FakeGraphs.capture(graphs, compute)
    with structlog.testing.capture_logs() as logs:
        rank_model._capture_graphs(executor, graphs, lambda *_: None)
    assert [line["log_level"] for line in logs] == ["info", "warning"]
    assert run_randomly(executor, 2) == run_randomly(make_executor(source, None), 2)
    assert graphs.num_replays > 0


def test_sizes_are_few_and_close_enough(monkeypatch):
    monkeypatch.undo()
    sizes = piece_sizes(8192)
    assert len(sizes) == 17
    assert sizes[-1] == 512
    assert all((b - a - 1) / b < 0.2 for a, b in pairwise(sizes) if b > 64)
    assert piece_sizes(40) == (8, 16, 32, 40)
    assert piece_sizes(3) == (3,)
