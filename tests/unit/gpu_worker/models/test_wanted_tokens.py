"""The last layer computes only the wanted tokens, with the bits of a full computation."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.llama.native_layers import NativeLayers
from gpu_worker.step.input_batch import build_input_batch
from gpu_worker.step.rows import Rows, ScheduledRows
from kernels import ops
from kernels.cpu.library import native
from kernels.cpu.program import decoder
from tests.unit.gpu_worker.models.paged_loop import CPU, load

BF16 = torch.bfloat16
BLOCK_SIZE = 8
LIMITS = Limits(
    max_num_seqs=5,
    max_model_len=640,
    max_num_batched_tokens=2048,
    num_blocks=400,
    block_size=BLOCK_SIZE,
    vocab_size=500,
)

pytestmark = pytest.mark.skipif(
    native() is None,
    reason="only native code gives the same bits however a prompt is cut",
)


@dataclass(frozen=True)
class Case:
    """A step: each sequence's tokens so far, computed tokens, and sampled tokens."""

    starts: tuple[int, ...]
    lens: tuple[int, ...]
    num_sampled: tuple[int, ...]
    num_decodes: int = 0


CASES = {
    "prompts": Case((0, 0, 0), (5, 130, 1), (1, 1, 1)),
    "a short prompt": Case((0,), (40,), (1,)),
    "decodes and prompts": Case((20, 9, 0, 0), (1, 1, 30, 17), (1, 1, 1, 1), 2),
    "decodes and inner chunks": Case((20, 0, 33, 0), (1, 40, 60, 8), (1, 0, 1, 0), 1),
    "decodes before an inner chunk": Case((20, 9, 0), (1, 1, 40), (1, 1, 0), 2),
    "inner chunks": Case((0, 16), (16, 90), (0, 0)),
    "a short inner chunk": Case((30,), (20,), (0,)),
    "guesses": Case((20, 35, 7, 0, 3), (1, 4, 2, 40, 5), (1, 4, 2, 1, 0), 1),
    "past a split": Case((0, 530), (600, 9), (1, 1)),
}


def batch_of(case):
    """The inputs of the step, and those of the steps before it."""
    generator = np.random.default_rng(3)
    rows = Rows(LIMITS)
    rows.token_ids[:] = generator.integers(500, size=rows.token_ids.shape)
    blocks = generator.permutation(LIMITS.num_blocks)
    rows.block_tables[:] = blocks.reshape(LIMITS.max_num_seqs, -1)
    starts, lens = np.array(case.starts), np.array(case.lens)
    sampling = np.repeat(np.arange(len(lens)), case.num_sampled)
    ends = [
        end - back
        for end, count in zip(starts + lens, case.num_sampled, strict=True)
        for back in reversed(range(count))
    ]

    def build(which, starts, lens, sampling, ends, num_decodes):
        scheduled = ScheduledRows(
            rows=which,
            starts=starts,
            lens=lens,
            num_decodes=num_decodes,
            sampling=sampling,
            positions=np.array(ends, np.int64),
            incarnations=np.zeros_like(which),
        )
        last_token_ids = torch.zeros(LIMITS.max_num_seqs, dtype=torch.int64)
        return build_input_batch(rows, scheduled, last_token_ids, BLOCK_SIZE, is_all_known=True)

    (old,) = starts.nonzero()
    before = None
    if len(old):
        none = np.empty(0, np.int64)
        before = build(old, np.zeros_like(old), starts[old], none, none, 0)
    return build(np.arange(len(lens)), starts, lens, sampling, ends, case.num_decodes), before


def step(model, case, *, is_all_wanted):
    """The hidden states of the wanted tokens, and the pool's contents."""
    batch, before = batch_of(case)
    assert batch.metadata.wanted is not None
    pool = KvPool(model.config, LIMITS.num_blocks, BLOCK_SIZE, model.embedding.dtype, CPU)
    metadata = batch.metadata
    if is_all_wanted:
        metadata = replace(metadata, wanted=None)
    with torch.inference_mode():
        if before is not None:
            model.forward(before.token_ids, before.positions, pool, before.metadata)
        for _ in range(2):  # the second time with a cached program
            hidden = model.forward(batch.token_ids, batch.positions, pool, metadata)
            if is_all_wanted:
                hidden = batch.metadata.select(hidden)
    return hidden, pool.blocks_as_bytes


def assert_same(model, case):
    hidden, cache = step(model, case, is_all_wanted=False)
    expected, expected_cache = step(model, case, is_all_wanted=True)
    assert hidden.shape == (sum(case.num_sampled), model.config.hidden_size)
    assert torch.equal(hidden, expected)
    assert torch.equal(cache, expected_cache)


LONG = {"max_position_embeddings": 1024}
MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen3": {},
    "gpt_neox": {},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("family", MODELS)
def test_in_one_native_call_or_op_by_op_in_bfloat16(model_dirs, monkeypatch, family, case):
    model = load(model_dirs.get(family, **LONG, **MODELS[family]), BF16)
    assert_same(model, case)
    monkeypatch.setattr(NativeLayers, "over", lambda _layers, _pool: None)
    assert_same(model, case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *MODELS.items(),
        ("mixtral", {}),
        ("qwen2_moe", {}),
        ("glm4", {}),
        ("olmo2", {}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("stablelm", {"use_parallel_residual": True}),
        ("starcoder2", {}),
        ("deepseek_v3", {}),
    ],
)
def test_op_by_op_in_float32(model_dirs, monkeypatch, family, overrides, case):
    attend = ops.paged_attention_prefill

    def attend_as_on_a_gpu(query, *args, **options):
        assert 0 < args[5] <= len(query), "max_query_len is of these queries"
        return attend(query, *args, **options)

    monkeypatch.setattr(ops, "paged_attention_prefill", attend_as_on_a_gpu)
    assert_same(load(model_dirs.get(family, **LONG, **overrides)), case)


@pytest.mark.parametrize("num_layers", [1, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_where_layers_share_memory_in_turn(model_dirs, monkeypatch, num_layers, case):
    monkeypatch.setattr(decoder, "_APART_BYTES", 0)
    model = load(model_dirs.get("llama", **LONG, num_hidden_layers=num_layers), BF16)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same(model, case)
    finally:
        torch.set_num_threads(before)


def test_one_step_s_kept_program_serves_another_with_other_places(model_dirs):
    model = load(model_dirs.get("llama"), BF16)
    pool = KvPool(model.config, LIMITS.num_blocks, BLOCK_SIZE, BF16, CPU)
    with torch.inference_mode():
        for case in (Case((0, 0), (10, 20), (0, 1)), Case((0, 0), (12, 18), (1, 0))):
            batch, _ = batch_of(case)
            inputs = batch.token_ids, batch.positions, pool
            hidden = model.forward(*inputs, batch.metadata)
            expected = model.forward(*inputs, replace(batch.metadata, wanted=None))
            assert torch.equal(hidden, batch.metadata.select(expected))
