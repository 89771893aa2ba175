"""How configs with multi-head latent attention are parsed, and wrong ones refused."""

import json

import pytest

from gpu_worker.models.deepseek.config import read_deepseek_config
from gpu_worker.models.experts.config import ExpertsConfig, Routing
from gpu_worker.weights.json_fields import ModelError, UnsupportedError, read_json

# DeepSeek V3's own config, written by transformers before version 5.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "q_lora_rank": None,
}
GLM = {"architectures": ["Glm4MoeLiteForCausalLM"]}


def read(directory, fields):
    (directory / "config.json").write_text(json.dumps(fields))
    return read_deepseek_config(read_json(directory / "config.json"))


def test_deepseek_v3_s_own(tmp_path):
    config = read(tmp_path, V3)
    assert (config.num_kv_heads, config.head_dim, config.latent_dim) == (1, 576, 512)
    assert config.attention_scale == pytest.approx(0.1352338)  # (0.1 ln 40 + 1)^2 / sqrt(192)
    assert config.rope.scaling.attention_factor == 1.0
    assert config.experts == ExpertsConfig(
        layers=(False,) * 3 + (True,) * 58,
        routing=Routing.SIGMOID,
        num_experts=256,
        num_per_token=8,
        num_groups=8,
        num_chosen_groups=4,
        has_shares_of_one=True,
        share_factor=2.5,
        intermediate_size=2048,
        shared_size=2048,
    )


def test_deepseek_v2_has_groups_only_if_its_method_has(tmp_path):
    config = read(tmp_path, V2)
    assert config.query_rank is None
    assert (config.experts.num_groups, config.experts.num_chosen_groups) == (8, 4)
    greedy = read(tmp_path, V2 | {"topk_method": "greedy", "n_group": None}).experts
    assert (greedy.num_groups, greedy.has_shares_of_one) == (1, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"architectures": V2["architectures"], "scoring_func": None}, "topk_method is 'noaux_tc'"),
    ],
)
def test_what_transformers_may_run_is_unsupported(tmp_path, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        read(tmp_path, V3 | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        # Defaults of transformers differ by family.
        ({"n_group": None}, "n_group is missing"),
        ({"topk_group": None}, "topk_group is missing"),
        ({"n_shared_experts": None}, "n_shared_experts is missing"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
        ({"n_group": 7}, "n_group is 7; it must divide the 256 experts"),
        ({"topk_group": 9}, "topk_group is 9; n_group is 8"),
        ({"num_experts_per_tok": 129}, "is 129; a token can choose among 128"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (GLM | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 61 names"),
        (GLM | {"mlp_layer_types": ["moe"] * 61}, "mlp_layer_types has 'moe'"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, V3 | changes)
