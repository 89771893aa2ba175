"""The native decoder with paged KV equals transformers."""

import pytest
import torch

from gpu_worker.models.registry import open_model
from tests.models_fixture import NATIVE_FAMILIES
from tests.unit.gpu_worker.models.against_transformers import (
    NUM_TOKENS,
    assert_equals_transformers,
)
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, load, random_prompt

VARIANTS = [
    *((family, {}) for family in NATIVE_FAMILIES),
    ("llama", {"tie_word_embeddings": True, "max_shard_size": "50KB"}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    ("mistral", {"num_key_value_heads": 1, "sliding_window": None}),
    ("mixtral", {"sliding_window": 33, "num_experts_per_tok": 3}),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": False}),
    ("gemma", {"hidden_act": "gelu", "num_key_value_heads": 1, "attention_bias": True}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
            },
            "attn_logit_softcapping": 0.5,  # ignored, as in transformers
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
    ),
    ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "hidden_act": "silu"}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True, "num_key_value_heads": 4}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    ("starcoder2", {"use_bias": False, "sliding_window": None, "tie_word_embeddings": True}),
    (
        "glm4_moe",
        {"use_qk_norm": False, "attention_bias": True, "n_group": 3, "topk_group": 2}
        | {"routed_scaling_factor": 2.5, "n_shared_experts": 2, "norm_topk_prob": False},
    ),
    (
        "glm4",
        {
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.25},
        },
    ),
    (
        "olmo3",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                },
            },
        },
    ),
    ("olmo2", {"num_key_value_heads": 1}),
    ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 4}),
    ("qwen2_moe", {"mlp_only_layers": [0], "norm_topk_prob": True, "qkv_bias": False}),
    ("qwen3_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2, "norm_topk_prob": False}),
    ("phi3", {"sliding_window": 20, "partial_rotary_factor": 1.0, "num_key_value_heads": 4}),
    (
        "phi3",
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0 + 0.3 * pair for pair in range(4)],
                "long_factor": [9.0] * 4,
            },
        },
    ),
    (
        "gpt_neox",
        {
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    *(
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **yarn}})
        for yarn in (
            {"factor": 8.0, "original_max_position_embeddings": 64},
            {
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "truncate": False,
            },
        )
    ),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.3 * pair for pair in range(8)],
                "long_factor": [9.0] * 8,
                "original_max_position_embeddings": 256,
                "factor": 2.0,
            }
        },
    ),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
]


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_greedy_tokens_and_logits_equal_transformers(model_dirs, family, overrides, block_size):
    directory = model_dirs.get(family, **overrides)
    sequence = Sequence(random_prompt(41, seed=1))
    PagedLoop(load(directory), block_size).generate([sequence], NUM_TOKENS)
    assert_equals_transformers(directory, sequence)
    assert len(set(sequence.output)) > NUM_TOKENS // 4, "a repetitive model would test little"


@pytest.mark.parametrize(("max_model_len", "prompt_len"), [(None, 41), (256, 41), (257, 300)])
def test_longrope_has_long_factors_if_sequences_may_be_long(model_dirs, max_model_len, prompt_len):
    """Prompts and outputs are on one side of the original length: transformers switches there."""
    family, overrides = VARIANTS[-2]
    directory = model_dirs.get(family, **overrides)
    source = open_model(directory, max_model_len=max_model_len)
    is_long = prompt_len > 256
    assert source.config.max_model_len == (512 if is_long else 256)
    sequence = Sequence(random_prompt(prompt_len, seed=1))
    model = source.load(torch.float32, CPU, lambda _: None)
    PagedLoop(model, block_size=16).generate([sequence], 64)
    assert_equals_transformers(directory, sequence)


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_sequences_of_mixed_lengths_in_one_batch_equal_transformers(model_dirs, family):
    directory = model_dirs.get(family)
    prompts = [random_prompt(length, seed=length) for length in (1, 15, 16, 17, 50)]
    together = [Sequence(prompt, start_step=3 * i) for i, prompt in enumerate(prompts)]
    model = load(directory)
    PagedLoop(model, block_size=8, num_blocks=256).generate(together, NUM_TOKENS)
    for sequence in together:
        assert_equals_transformers(directory, sequence)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "gpt_neox", "gpt_oss"])
def test_a_decode_has_the_same_bits_alone_and_in_company(model_dirs, family):
    # Wide enough that the down projection's sums would be split for a lone row.
    model = load(model_dirs.get(family, intermediate_size=1600))
    prompts = [random_prompt(length, seed=length) for length in (16, 16, 32, 48)]
    together = [Sequence(prompt) for prompt in prompts]
    PagedLoop(model, block_size=16).generate(together, 32)
    for prompt, sequence in zip(prompts, together, strict=True):
        alone = Sequence(prompt)
        PagedLoop(model, block_size=16).generate([alone], 32)
        assert torch.equal(torch.stack(sequence.logits), torch.stack(alone.logits))


def test_padding_changes_nothing(model_dirs):
    model = load(model_dirs.get("qwen3"))
    prompts = [random_prompt(length, seed=length) for length in (5, 20)]
    plain = [Sequence(prompt) for prompt in prompts]
    padded = [Sequence(prompt) for prompt in prompts]
    PagedLoop(model, block_size=16).generate(plain, 16)
    PagedLoop(model, block_size=16, num_padding=3).generate(padded, 16)
    assert [s.output for s in padded] == [s.output for s in plain]


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_bfloat16_is_close_to_float32(model_dirs, family):
    directory = model_dirs.get(family, dtype="bfloat16")
    prompt = random_prompt(41, seed=2)
    wide, narrow = Sequence(prompt), Sequence(prompt)
    PagedLoop(load(directory, torch.float32), block_size=16).generate([wide], 1)
    PagedLoop(load(directory, torch.bfloat16), block_size=16).generate([narrow], 1)
    expected, actual = torch.stack(wide.logits), torch.stack(narrow.logits)
    errors = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.03, "some tokens may choose other experts"
    assert not torch.equal(actual, expected)
