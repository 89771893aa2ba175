"""A native program of all layers equals the layers run op by op."""

import ctypes
import struct

import pytest
import torch

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.llama.native_layers import NativeLayers
from kernels.cpu.library import native
from kernels.cpu.program import decoder
from kernels.cpu.program.inputs import NativeInputs
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, load, random_prompt

pytestmark = pytest.mark.skipif(
    native() is None,
    reason="needs native code",
)
BF16 = torch.bfloat16
ODD_WIDTHS = {
    "hidden_size": 65,
    "intermediate_size": 111,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def run(model, prompts, num_tokens, **loop_args):
    sequences = [Sequence(prompt, start_step=2 * i) for i, prompt in enumerate(prompts)]
    loop = PagedLoop(model, 8, num_blocks=512, **loop_args)
    loop.generate(sequences, num_tokens, chunk_len=48)
    return sequences, loop.pool.blocks_as_bytes


def assert_same_op_by_op(model, prompts, monkeypatch, num_tokens=24, **loop_args):
    fused, fused_blocks = run(model, prompts, num_tokens, **loop_args)
    with monkeypatch.context() as patch:
        patch.setattr(NativeLayers, "over", lambda _layers, _pool: None)
        op_by_op, blocks = run(model, prompts, num_tokens, **loop_args)
    for one, other in zip(fused, op_by_op, strict=True):
        assert one.output == other.output
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
    assert torch.equal(fused_blocks, blocks)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
        ("mistral", {"num_key_value_heads": 1, "sliding_window": 9}),
        ("phi3", {"head_dim": 40}),
        ("qwen2", ODD_WIDTHS),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_it_gives_the_bits_of_the_ops(model_dirs, monkeypatch, family, overrides):
    model = load(model_dirs.get(family, **overrides), BF16)
    assert model._native.over(PagedLoop(model, 8).pool) is not None
    prompts = [random_prompt(length, seed=length) for length in (1, 15, 48, 100)]
    assert_same_op_by_op(model, prompts, monkeypatch, num_padding=2)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_it_gives_the_bits_of_the_ops_past_a_split_on_several_threads(
    model_dirs, monkeypatch, kv_cache_dtype
):
    model = load(model_dirs.get("llama", max_position_embeddings=1024), BF16)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        prompts = [random_prompt(530, seed=1), random_prompt(3, seed=2)]
        options = {"num_tokens": 6, "kv_cache_dtype": kv_cache_dtype}
        assert_same_op_by_op(model, prompts, monkeypatch, **options)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("family", "overrides", "skip_layers"),
    [
        ("llama", {"head_dim": 20}, ()),
        ("mistral", {"num_key_value_heads": 1, "sliding_window": 9}, (1,)),
        ("qwen3", {}, (0,)),
    ],
)
def test_it_gives_the_bits_of_the_ops_over_a_quantized_cache(
    model_dirs, monkeypatch, family, overrides, skip_layers, kv_cache_dtype
):
    model = load(model_dirs.get(family, **overrides), BF16)
    cache = {"kv_cache_dtype": kv_cache_dtype, "skip_layers": set(skip_layers)}
    assert model._native.over(PagedLoop(model, 8, **cache).pool) is not None
    prompts = [random_prompt(length, seed=length) for length in (1, 15, 48, 100)]
    assert_same_op_by_op(model, prompts, monkeypatch, num_padding=2, **cache)


def test_it_gives_the_bits_of_the_ops_where_layers_share_memory_in_turn(model_dirs, monkeypatch):
    monkeypatch.setattr(decoder, "_APART_BYTES", 0)
    model = load(model_dirs.get("llama", num_hidden_layers=5), BF16)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        prompts = [random_prompt(length, seed=length) for length in (1, 70)]
        assert_same_op_by_op(model, prompts, monkeypatch, num_tokens=6)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_a_program_of_any_size_reads_nothing_of_the_steps_before(model_dirs):
    """Steps at and beside the borders of program sizes, with NaN after their tokens."""
    model = load(model_dirs.get("llama", max_position_embeddings=2048), BF16)

    def fresh():
        return model._native.over(KvPool(model.config, 160, 8, BF16, CPU))

    generator = torch.Generator().manual_seed(1)
    used = fresh()
    for size in (1025, 1, 1024, 2, 513, 1023, 512, 511, 2, 1025, 1, 512, 513):
        hidden = torch.randn(size, model.config.hidden_size, generator=generator).to(BF16)
        inputs = NativeInputs(
            hidden=hidden,
            positions=torch.arange(size),
            slot_mapping=torch.arange(size),
            block_tables=torch.arange(160, dtype=torch.int32)[None, : -(-size // 8)].contiguous(),
            seq_lens=torch.tensor([size], dtype=torch.int32),
            query_start_loc=torch.tensor([0, size], dtype=torch.int32),
        )
        used._memory.fill_(float("nan"))
        assert torch.equal(used.forward(inputs), fresh().forward(inputs)), size


def test_maps_fetch_for_the_attention_that_follows_them(model_dirs, monkeypatch):
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 512}
    model = load(model_dirs.get("llama", **sizes), BF16)
    seen = []  # of the last program
    library = native()
    run_now = library.run

    def look(head):
        address, num_calls, _ = struct.unpack("@Pqq", head)
        table = struct.unpack(f"@{4 * num_calls}P", ctypes.string_at(address, 32 * num_calls))
        seen[:] = zip(table[::4], table[2::4], strict=True)
        run_now(head)

    monkeypatch.setattr(library, "run", look)
    run(model, [random_prompt(20, seed=1)], 3)
    attention, fetched = 0, []  # the next attention's fields, if any, and the prefetched KV
    for share, fields in reversed(seen):
        if share == library.attention.share_address:
            attention = fields
        elif share == library.linear.share_address:
            count = len(library.linear.fields)
            numbers = struct.unpack(f"@{count}q", ctypes.string_at(fields, 8 * count))
            of, num_runs, num_after = numbers[-3:]
            fetched.append((of == attention, num_runs > 0, num_after > 0))
    # From the last to the first: the maps after the last attention, then each qkv with the maps
    # before it.
    after_all, qkv, others = (True, False, False), (True, True, False), (True, True, True)
    assert fetched == [after_all] * 3 + ([qkv] + [others] * 3) * 3 + [qkv]


def test_another_pool_is_another_program(model_dirs):
    model = load(model_dirs.get("llama"), BF16)
    prompt = random_prompt(20, seed=1)
    first, second = (run(model, [prompt], 5)[0][0] for _ in range(2))
    assert torch.equal(torch.stack(first.logits), torch.stack(second.logits))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("mixtral", BF16), ("glm", BF16), ("glm4", BF16), ("olmo2", BF16), ("llama", torch.float32)],
)
def test_what_has_no_native_code_for_all_of_it_runs_op_by_op(model_dirs, family, dtype):
    model = load(model_dirs.get(family), dtype)
    assert model._native.over(PagedLoop(model, 8).pool) is None


def test_plain_layers_of_another_dtype_run_op_by_op(model_dirs):
    model = load(model_dirs.get("llama"), BF16)
    for dtypes in (torch.float32, (torch.int8, torch.float32)):
        assert model._native.over(KvPool(model.config, 4, 8, dtypes, CPU)) is None
    assert model._native.over(KvPool(model.config, 4, 8, (torch.int8, BF16), CPU)) is not None


def test_a_tensor_that_does_not_fit_is_named(model_dirs):
    model = load(model_dirs.get("llama"), BF16)
    decoder = model._native.over(KvPool(model.config, 4, 8, BF16, CPU))
    fitting = {
        "hidden": torch.zeros(2, model.config.hidden_size, dtype=BF16),
        "positions": torch.tensor([0, 1]),
        "slot_mapping": torch.tensor([0, 1]),
        "block_tables": torch.zeros(1, 1, dtype=torch.int32),
        "seq_lens": torch.tensor([2], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2], dtype=torch.int32),
    }
    assert decoder.forward(NativeInputs(**fitting)).shape == (2, model.config.hidden_size)
    for name, tensor in fitting.items():
        with pytest.raises(ValueError, match=name):
            decoder.forward(NativeInputs(**{**fitting, name: tensor.double()}))
