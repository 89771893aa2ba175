"""Models with multi-head latent attention equal transformers, and keep latents only."""

import pytest
import torch

from gpu_worker.kv.layout import block_bytes
from gpu_worker.models.registry import open_model
from gpu_worker.ranks.shards import Place
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.quantized_linear import Quantization
from kernels.cpu.library import native
from tests.unit.gpu_worker.models.against_transformers import (
    NUM_TOKENS,
    assert_equals_transformers,
)
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, load, random_prompt

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
VARIANTS = [
    ("deepseek_v2", {}),
    (
        "deepseek_v2",
        {
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "rope_parameters": YARN,
        },
    ),
    ("deepseek_v3", {"rope_parameters": YARN, "attention_bias": True}),
    (  # as Kimi K2
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False},
    ),
    ("glm4_moe_lite", {"tie_word_embeddings": True}),
    ("minicpm3", {}),
    ("youtu", {}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_greedy_tokens_and_logits_equal_transformers(model_dirs, family, overrides):
    directory = model_dirs.get(family, **overrides)
    sequences = [
        Sequence(random_prompt(length, seed=length), start_step=4 * i)
        for i, length in enumerate((41, 1, 70))
    ]
    model = load(directory)
    assert type(model).__name__ == "DeepseekDecoder"
    PagedLoop(model, block_size=8).generate(sequences, NUM_TOKENS, chunk_len=13)
    for sequence in sequences:
        assert_equals_transformers(directory, sequence)
    distinct = {token for sequence in sequences for token in sequence.output}
    assert len(distinct) > NUM_TOKENS // 4, "a repetitive model would test little"


@pytest.mark.skipif(native() is None, reason="only native code gives the same bits in any batch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_sequence_has_the_same_bits_alone_in_company_and_in_any_chunks(model_dirs, family, dtype):
    """So a sequence has the same bits after recomputation or a prefix hit."""
    model = load(model_dirs.get(family), dtype)
    prompts = [random_prompt(length, seed=length) for length in (70, 16, 5)]
    together = [Sequence(prompt) for prompt in prompts]
    PagedLoop(model, block_size=16).generate(together, 32, chunk_len=9)
    for prompt, sequence in zip(prompts, together, strict=True):
        again = Sequence(prompt + sequence.output[:20])
        PagedLoop(model, block_size=8).generate([again], 12, chunk_len=128)
        assert again.output == sequence.output[20:]
        assert torch.equal(torch.stack(again.logits), torch.stack(sequence.logits))


def test_a_model_as_wide_as_deepseek_s_keeps_576_numbers_a_token(model_dirs):
    directory = model_dirs.get(
        "deepseek_v3",
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    config = open_model(directory).config
    of_transformers = open_model(directory, "transformers").config
    num_layers, itemsize = config.num_layers, torch.bfloat16.itemsize
    latent_bytes = (512 + 64) * itemsize * num_layers
    assert block_bytes(config, 16, torch.bfloat16) == 16 * latent_bytes
    assert block_bytes(of_transformers, 16, torch.bfloat16) == 16 * 2 * 16 * 192 * itemsize * 2
    quantized = block_bytes(config, 16, torch.int8)
    assert quantized == 16 * (576 + 2) * num_layers
    sequence = Sequence(random_prompt(20, seed=1))
    PagedLoop(load(directory), block_size=16).generate([sequence], 20)
    assert_equals_transformers(directory, sequence)


@pytest.mark.parametrize(("kv_cache_dtype", "bound"), [("int8", 0.05), ("fp8", 0.2)])
def test_quantized_latents_are_near_plain_ones(model_dirs, kv_cache_dtype, bound):
    model = load(model_dirs.get("deepseek_v2"))
    prompt = random_prompt(41, seed=1)
    plain, quantized = Sequence(prompt), Sequence(prompt)
    PagedLoop(model, 8).generate([plain], 1)
    PagedLoop(model, 8, kv_cache_dtype=kv_cache_dtype).generate([quantized], 8)
    expected = torch.stack(plain.logits)
    error = (torch.stack(quantized.logits[: len(expected)]) - expected).norm() / expected.norm()
    assert 0 < error < bound


@pytest.mark.parametrize("quantization", Quantization)
def test_weights_may_be_quantized(model_dirs, quantization):
    sizes = {"q_lora_rank": 64, "v_head_dim": 16, "moe_intermediate_size": 64}
    directory = model_dirs.get("deepseek_v3", intermediate_size=128, kv_lora_rank=32, **sizes)
    prompt = random_prompt(41, seed=1)
    plain, rounded = Sequence(prompt), Sequence(prompt)
    PagedLoop(load(directory), 8).generate([plain], 1)
    model = open_model(directory, "", quantization).load(torch.float32, CPU, lambda _: None)
    PagedLoop(model, 8).generate([rounded], 8)
    assert len(rounded.output) == 8


def test_bfloat16_is_close_to_float32(model_dirs):
    directory = model_dirs.get("deepseek_v2", dtype="bfloat16")
    prompt = random_prompt(41, seed=2)
    wide, narrow = Sequence(prompt), Sequence(prompt)
    PagedLoop(load(directory), block_size=16).generate([wide], 1)
    PagedLoop(load(directory, torch.bfloat16), block_size=16).generate([narrow], 1)
    expected, actual = torch.stack(wide.logits), torch.stack(narrow.logits)
    assert (actual - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"tensor_size": 3}, "tensor-parallel-size is 3; it must divide num_attention_heads, 4"),
        ({"tensor_size": 4, "pipeline_size": 3}, "pipeline-parallel-size is 3; the model has 2"),
    ],
)
def test_devices_that_cannot_share_the_model_are_refused_by_name(model_dirs, sizes, problem):
    with pytest.raises(ModelError, match=problem):
        open_model(model_dirs.get("deepseek_v3"), place=Place(**sizes))
