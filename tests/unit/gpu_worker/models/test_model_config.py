"""How a config.json is parsed, and how a wrong one is refused."""

import json

import pytest

from gpu_worker.models.experts.config import ExpertNames, ExpertsConfig, Routing
from gpu_worker.models.llama.config import LlamaConfig
from gpu_worker.models.registry import open_model
from gpu_worker.models.rope import LinearScaling, Llama3Scaling, RopeConfig
from gpu_worker.weights.json_fields import ModelError, UnsupportedError
from gpu_worker.weights.model_config import resolve_dtype

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(directory, generation_config=None, without=(), **changes):
    fields = {k: v for k, v in (LLAMA | changes).items() if k not in without}
    (directory / "config.json").write_text(json.dumps(fields))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return directory


def read(directory):
    return open_model(directory).config


def test_every_field_of_a_small_config(tmp_path):
    assert read(write(tmp_path)) == LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        rotary_dim=16,
        has_fused_qkv=False,
        has_fused_gate_up=False,
        max_model_len=2048,
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        attention_scale=0.25,
        windows=(None, None, None),
        experts=None,
        eos_token_ids=(2,),
        dtype="float32",
    )


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Llama", {}, (False, False, False, False)),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("Mistral", {}, (False, False, False, False)),
        ("Qwen2", {}, (True, False, False, False)),
        ("Qwen3", {}, (False, False, False, True)),
        ("Qwen3", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms_of_each_family(tmp_path, family, changes, expected):
    config = read(write(tmp_path, architectures=[f"{family}ForCausalLM"], **changes))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize(
    ("changes", "head_dim"),
    [
        ({}, 16),
        ({"head_dim": None}, 16),
        ({"head_dim": 24}, 24),
        ({"architectures": ["Qwen3ForCausalLM"]}, 128),
    ],
)
def test_head_dim(tmp_path, changes, head_dim):
    assert read(write(tmp_path, **changes)).head_dim == head_dim


def test_as_many_kv_heads_as_heads_if_unsaid(tmp_path):
    config = read(write(tmp_path, without=["num_key_value_heads"]))
    assert config.num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(1e6)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(1e4, LinearScaling(2.0)),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
            RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_SCALING}},
            RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            },
            RopeConfig(1e4, LinearScaling(2.0)),
        ),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 1e6}}, RopeConfig(1e6)),
    ],
)
def test_rope_as_old_and_new_transformers_write_it(tmp_path, changes, expected):
    assert read(write(tmp_path, **changes)).rope == expected


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("Mistral", {}, (4096, 4096, 4096)),
        ("Mistral", {"sliding_window": None}, (None, None, None)),
        ("Mistral", {"sliding_window": 512}, (512, 512, 512)),
        ("Mixtral", {}, (None, None, None)),
        ("Mixtral", {"sliding_window": 512}, (512, 512, 512)),
        ("Qwen2", {"sliding_window": 512}, (None, None, None)),
        ("Qwen2", {"sliding_window": 512, "use_sliding_window": True}, (None, None, None)),
        (
            "Qwen2",
            {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1},
            (None, 512, 512),
        ),
        (
            "Qwen3",
            {
                "sliding_window": 512,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (512, None, 512),
        ),
        ("Llama", {"sliding_window": 512}, (None, None, None)),  # the family ignores the field
    ],
)
def test_the_window_of_each_layer(tmp_path, family, changes, windows):
    config = read(write(tmp_path, architectures=[f"{family}ForCausalLM"], **changes))
    assert config.windows == windows
    assert config.max_model_len == 2048


def test_experts_are_mixtrals(tmp_path):
    changes = {"num_local_experts": 6, "num_experts_per_tok": 3}
    assert read(write(tmp_path, **changes)).experts is None
    config = read(write(tmp_path, architectures=["MixtralForCausalLM"], **changes))
    assert config.experts == ExpertsConfig(
        layers=(True,) * 3,
        num_experts=6,
        num_per_token=3,
        intermediate_size=128,
        has_shares_of_one=True,
        names=ExpertNames("block_sparse_moe", ("w1", "w3", "w2")),
    )
    assert (config.rope.theta, config.rms_norm_eps) == (1e6, 1e-5)


# GLM-4.5's own config, written by transformers before version 5, without what other tests cover.
GLM_4_5 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 2,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "use_qk_norm": True,
}
QWEN_3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 2,
    "head_dim": 128,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "use_sliding_window": False,
}


def test_glm_4_5_s_own(tmp_path):
    config = read(write(tmp_path, **GLM_4_5))
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (True, False, True)
    assert (config.rotary_dim, config.is_interleaved, config.predicts_further) == (64, False, True)
    assert config.experts == ExpertsConfig(
        layers=(False, False, True),
        num_experts=160,
        num_per_token=8,
        intermediate_size=1536,
        has_shares_of_one=True,
        share_factor=2.5,
        routing=Routing.SIGMOID,
        shared_size=1536,
    )


def test_olmo_3_s_rotation_before_transformers_5(tmp_path):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    directory = write(
        tmp_path,
        architectures=["Olmo3ForCausalLM"],
        layer_types=kinds,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_theta=1e6,
        sliding_window=512,
    )
    config = read(directory)
    assert config.windows == (512, None, 512)
    assert config.rope == RopeConfig(1e6, LinearScaling(8.0))
    assert config.windowed_rope == RopeConfig(1e6)


def test_gemma_2_s_own(tmp_path):
    config = read(write(tmp_path, architectures=["Gemma2ForCausalLM"], without=["hidden_act"]))
    assert config.windows == (4096, None, 4096)
    assert (config.attention_scale, config.head_dim) == (1 / 16, 256)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert (config.tie_word_embeddings, config.activation) == (True, "gelu_pytorch_tanh")


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_experts_of_qwen_3_as_old_and_new_transformers_write_them(tmp_path, name):
    fields = {**QWEN_3_MOE, name: 64}
    config = read(
        write(tmp_path, **fields, without=[] if name == "num_experts" else ["num_experts"])
    )
    assert config.experts == ExpertsConfig(
        layers=(False, False, False, True),
        num_experts=64,
        num_per_token=8,
        intermediate_size=768,
        has_shares_of_one=True,
        names=ExpertNames(shared="shared_expert"),
    )


def test_experts_of_olmoe_have_the_size_of_a_dense_mlp(tmp_path):
    fields = {"architectures": ["OlmoeForCausalLM"], "num_experts": 64, "num_experts_per_tok": 8}
    config = read(write(tmp_path, **fields, moe_intermediate_size=96))
    assert config.experts.intermediate_size == 128


@pytest.mark.parametrize(
    ("changes", "share", "rotary_dim"),
    [
        ({}, 0.25, 4),
        ({"rotary_pct": 0.5}, 0.5, 8),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}}, 1.0, 16),
        ({"rope_theta": 1e6, "partial_rotary_factor": 1.0}, 0.25, 4),
    ],
)
def test_what_neox_rotates(tmp_path, changes, share, rotary_dim):
    changes = {"architectures": ["GPTNeoXForCausalLM"], "rotary_emb_base": 5e5, **changes}
    config = read(write(tmp_path, **changes))
    assert config.rope == RopeConfig(5e5, None, share)
    assert config.rotary_dim == rotary_dim
    assert config.num_kv_heads == 4


@pytest.mark.parametrize(
    ("family", "activation", "has_biases", "rotary_dim", "is_parallel", "is_tied"),
    [
        ("GPTNeoX", "gelu", True, 4, True, False),
        ("Nemotron", "relu2", False, 8, False, False),
        ("StableLm", "silu", False, 4, False, False),
        ("Starcoder2", "gelu_pytorch_tanh", True, 16, False, True),
    ],
)
def test_decoders_with_layer_norms_whose_config_says_little(
    tmp_path, family, activation, has_biases, rotary_dim, is_parallel, is_tied
):
    config = read(write(tmp_path, architectures=[f"{family}ForCausalLM"]))
    assert (config.activation, config.layer_norm_eps) == (activation, 1e-5)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (has_biases,) * 3
    assert (config.rope, config.windows) == (RopeConfig(1e4, None, rotary_dim / 16), (None,) * 3)
    assert (config.rotary_dim, config.is_parallel) == (rotary_dim, is_parallel)
    assert config.tie_word_embeddings == is_tied


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("GPTNeoX", "layer_norm_eps"),
        ("Nemotron", "norm_eps"),
        ("StableLm", "layer_norm_eps"),
        ("Starcoder2", "norm_epsilon"),
    ],
)
def test_the_epsilon_of_layer_norms(tmp_path, family, name):
    config = read(write(tmp_path, architectures=[f"{family}ForCausalLM"], **{name: 1e-3}))
    assert config.layer_norm_eps == 1e-3


GEMMA_3 = {"architectures": ["Gemma3ForCausalLM"]}
NEOX = {"architectures": ["GPTNeoXForCausalLM"]}
OLMO_3 = {"architectures": ["Olmo3ForCausalLM"], "layer_types": ["full_attention"] * 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            GEMMA_3 | {"query_pre_attn_scalar": 0},
            "query_pre_attn_scalar is 0; it must be a positive number",
        ),
        (
            GEMMA_3 | {"final_logit_softcapping": -1},
            "final_logit_softcapping is -1; it must be a positive number",
        ),
        (NEOX | {"hidden_act": "mish"}, "hidden_act is 'mish'; supported: gelu"),
        (NEOX | {"rotary_pct": 0.2}, "rotary_pct is 0.2; it must rotate an even number of"),
        (NEOX | {"num_attention_heads": 6}, "num_attention_heads must divide hidden_size, 64"),
        (QWEN_3_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        (
            OLMO_3 | {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}},
            "rope_parameters.factor is 8.0; it must be in full_attention or sliding_attention",
        ),
        (
            OLMO_3 | {"rope_parameters": {"full_attention": {}, "rope_theta": 1e6}},
            "rope_parameters.rope_theta is 1000000.0; it must be in full_attention or",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
            "num_experts_per_tok is 9; it must be at most num_local_experts, 8",
        ),
    ],
)
def test_unsupported_features_of_the_families_are_named(tmp_path, changes, message):
    keys = {"num_key_value_heads": None} if "num_attention_heads" in changes else {}
    with pytest.raises(ModelError) as caught:
        read(write(tmp_path, **changes, **keys))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention", "chunked_attention", "full_attention"],
            },
            "layer_types has 'chunked_attention'; known are sliding_attention and full_attention",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters.full_attention is unknown; known are attention_factor, beta_fast",
        ),
        (
            QWEN_3_MOE | {"use_sliding_window": True},
            "use_sliding_window is true; only false is supported",
        ),
        ({"architectures": ["Olmo3ForCausalLM"]}, "layer_types is missing"),
        (
            OLMO_3 | {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"factor": 8.0}},
            "rope_scaling is {'factor': 8.0}; with rope_parameters, only null is supported",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "rope_scaling": {}},
            "rope_parameters is missing",
        ),
        (
            {"architectures": ["Starcoder2ForCausalLM"], "partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; only 1.0 is supported",
        ),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0; only null is supported"),
        (
            GEMMA_3 | {"use_bidirectional_attention": True},
            "use_bidirectional_attention is true; only false is supported",
        ),
        (
            GEMMA_3 | {"hidden_activation": "relu"},
            "hidden_activation is 'relu'; only 'gelu_pytorch_tanh' is supported",
        ),
        (
            {"rope_scaling": {"type": "ntk", "factor": 4.0}},
            "rope_scaling.rope_type is 'ntk'; supported:",
        ),
    ],
)
def test_what_transformers_may_support_is_left_to_it(tmp_path, changes, message):
    with pytest.raises(UnsupportedError) as caught:
        read(write(tmp_path, **changes))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {message}")


@pytest.mark.parametrize(
    ("in_config", "generation_config", "expected"),
    [
        (2, None, (2,)),
        ([7, 2], None, (7, 2)),
        (None, None, ()),
        (2, {"eos_token_id": [9, 2]}, (2, 9)),
        (None, {"eos_token_id": 0}, (0,)),
        (2, {}, (2,)),
    ],
)
def test_eos_token_ids_of_both_files(tmp_path, in_config, generation_config, expected):
    directory = write(tmp_path, generation_config, eos_token_id=in_config)
    assert read(directory).eos_token_ids == expected


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_of_the_checkpoint(tmp_path, field):
    config = read(write(tmp_path, **{field: "bfloat16"}))
    assert config.dtype == "bfloat16"
    assert resolve_dtype("auto", config) == "bfloat16"
    assert resolve_dtype("float16", config) == "float16"


def test_an_unknown_dtype_is_refused(tmp_path):
    config = read(write(tmp_path))
    with pytest.raises(
        ModelError, match=r"dtype is 'int3'; it must be one of auto, float32, float16"
    ):
        resolve_dtype("int3", config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architectures must be a list of one name"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a positive integer"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be a positive integer"),
        ({"vocab_size": True}, "vocab_size is True; it must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads, 4"),
        ({"head_dim": 15}, "head_dim is 15; it must be even for rotary embedding"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a positive number"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id is ['</s>']; it must be integers of 0 or more"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method is None"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; supported: float32"),
        ({"dtype": ["float32"]}, "dtype is ['float32']; supported: float32"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 0.0]}},
            "rope_scaling.short_factor is [1.0, 0.0]; it must be a list of positive numbers",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling is [1]; it must be an object"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config.quant_method is 'mxfp4', which is supported only for GptOss",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; only 1.0 is supported",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.1},
            "partial_rotary_factor is 0.1; it must rotate an even number of a head's 16",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    **LLAMA3_SCALING,
                    "high_freq_factor": 1.0,
                }
            },
            "rope_scaling.high_freq_factor is 1.0; it must be above low_freq_factor, 1.0",
        ),
    ],
)
def test_unsupported_options_are_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ModelError) as caught:
        read(write(tmp_path, **changes))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {message}")


@pytest.mark.parametrize(
    "field", ["vocab_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings"]
)
def test_a_missing_field_is_named(tmp_path, field):
    with pytest.raises(ModelError, match=rf"config\.json: {field} is missing"):
        read(write(tmp_path, without=[field]))


def test_files_that_are_absent_or_no_json_objects(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json cannot be read: No such file"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON: .*line 1"):
        read(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\x00")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json must hold a JSON object, not list"):
        read(tmp_path)
