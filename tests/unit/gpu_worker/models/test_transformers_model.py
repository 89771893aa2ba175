"""Decoders of transformers with paged attention equal the originals."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoConfig

from gpu_worker.models.registry import open_model
from gpu_worker.models.transformers import attention, model
from gpu_worker.models.transformers.attention import AttentionOptions, read_window
from gpu_worker.models.transformers.own_attention import ALIBI_DIM, with_alibi
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.quantized_linear import Quantization
from tests.unit.gpu_worker.models.against_transformers import (
    NUM_TOKENS,
    assert_equals_transformers,
)
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, random_prompt
from tests.unit.gpu_worker.test_kv_groups import (
    AFMOE,
    GEMMA_4,
    GEMMA_N,
    LONGCAT,
    OWN_ATTENTION,
    QWEN2_MOE,
)

ALTERNATING = ["sliding_attention", "full_attention"]
# The model scales embeddings by 8; small ones and several layers keep the layers' effect visible.
GEMMA = {
    "head_dim": 16,
    "sliding_window": 20,
    "tie_word_embeddings": True,
    "num_hidden_layers": 6,
    "initializer_range": 0.02,
}

FAMILIES = OWN_ATTENTION | {
    "afmoe": AFMOE,
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": 20, "layer_types": ALTERNATING},
    "deepseek_v3": {},  # the head dim of its keys is 24, of its values 12
    "gemma2": GEMMA
    | {
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": GEMMA | {"layer_types": ALTERNATING * 3},
    "gpt2": {},
    "gpt_oss": {},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "longcat_flash": LONGCAT,
    "opt": {"ffn_dim": 112, "word_embed_proj_dim": 64},
    "phi": {"initializer_range": 0.3},
    "phi3": {"sliding_window": 30, "pad_token_id": 0},
    "qwen2_moe": QWEN2_MOE,
    "stablelm": {},
    "starcoder2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logits_equal_transformers(model_dirs, family):
    directory = model_dirs.get(family, **FAMILIES[family])
    source = open_model(directory, "transformers")
    model = source.load(torch.float32, CPU, lambda _: None)
    sequences = [
        Sequence(random_prompt(length, seed=length), start_step=4 * i)
        for i, length in enumerate((41, 1, 70))
    ]
    PagedLoop(model, block_size=8, config=source.config).generate(
        sequences, NUM_TOKENS, chunk_len=13
    )
    for sequence in sequences:
        assert_equals_transformers(directory, sequence)
    distinct = {token for sequence in sequences for token in sequence.output}
    assert len(distinct) > NUM_TOKENS // 4, "a repetitive model would test little"


def test_a_native_family_runs_on_transformers_if_asked(model_dirs):
    directory = model_dirs.get("mistral")
    outputs = []
    for model_class in ("", "transformers"):
        source = open_model(directory, model_class)
        model = source.load(torch.float32, CPU, lambda _: None)
        sequence = Sequence(random_prompt(41, seed=1))
        PagedLoop(model, block_size=8, config=source.config).generate([sequence], 32)
        outputs.append((type(model).__name__, sequence.output))
    assert [name for name, _ in outputs] == ["LlamaDecoder", "TransformersModel"]
    assert outputs[0][1] == outputs[1][1]


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        ("gpt_neox", {"hidden_act": "mish"}, "hidden_act is 'mish'; supported: gelu"),
        ("stablelm", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is true; only false is supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type is 'proportional'; supported: default",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "note": "new"}},
            "rope_parameters.note is unknown; known are attention_factor",
        ),
    ],
)
def test_transformers_runs_what_our_implementation_lacks(model_dirs, family, overrides, reason):
    directory = model_dirs.get(family, **overrides)
    with capture_logs() as logs:
        source = open_model(directory)
    (log,) = logs
    assert log["event"] == "transformers runs the model, which is slower than our own code"
    assert reason in log["reason"]
    model = source.load(torch.float32, CPU, lambda _: None)
    sequence = Sequence(random_prompt(41, seed=1))
    PagedLoop(model, block_size=8, config=source.config).generate([sequence], NUM_TOKENS)
    assert_equals_transformers(directory, sequence)


def test_what_transformers_cannot_take_over_is_refused_for_the_first_reason(model_dirs):
    directory = model_dirs.get("llama", hidden_act="gelu")
    with pytest.raises(ModelError, match=r"hidden_act is 'gelu'; only 'silu' is supported"):
        open_model(directory, quantization=Quantization.INT8)


def test_a_damaged_file_is_named(model_dirs, tmp_path):
    directory = shutil.copytree(model_dirs.get("phi", **FAMILIES["phi"]), tmp_path / "phi")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors"):
        open_model(directory).load(torch.float32, CPU, lambda _: None)


def test_the_config_is_what_the_model_does(model_dirs):
    config = open_model(model_dirs.get("deepseek_v3"), "transformers").config
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (2, 4, 24)
    assert (config.vocab_size, config.max_model_len) == (500, 512)
    assert config.eos_token_ids == (1,)


def test_layers_that_read_the_kv_of_another_have_none(model_dirs):
    config = open_model(model_dirs.get("gemma3n_text", **GEMMA_N)).config
    assert config.windows == (20, 20, None, 20)  # three of the seven layers read others' KV
    config = open_model(model_dirs.get("gemma4_text", **GEMMA_4)).config
    assert config.windows == (20, 20, 20, None)
    assert config.kv_shapes == ((2, 16), (2, 16), (2, 16), (1, 32))


def test_a_layer_with_another_window_than_what_it_reads_is_refused(model_dirs, monkeypatch):
    assert model.__name__  # Imported before the patch.
    windows = iter([20, 20, None, 20, 20, 20])
    monkeypatch.setattr(
        attention,
        "read_options",
        lambda *_: replace(options_without_window(), window=next(windows, 20)),
    )
    directory = model_dirs.get("gemma3n_text", **GEMMA_N)
    reason = r"layer 5 has window 20, and shares the keys and values of layer 2, which has window"
    with pytest.raises(ModelError, match=reason):
        open_model(directory)


def test_context_ends_where_rotation_would_depend_on_the_batch(model_dirs):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.5] * 6,
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 64,
    }
    directory = model_dirs.get(
        "phi3", rope_parameters=rope, original_max_position_embeddings=64, pad_token_id=0
    )
    source = open_model(directory, "transformers")
    assert source.config.max_model_len == 64
    sequence = Sequence(random_prompt(30, seed=1))
    model = source.load(torch.float32, CPU, lambda _: None)
    PagedLoop(model, block_size=8, config=source.config).generate([sequence], 34)
    assert_equals_transformers(directory, sequence)
    source = open_model(directory, "transformers", max_model_len=65)
    assert source.config.max_model_len == 512
    sequence = Sequence(random_prompt(70, seed=1))  # longer, so that transformers chooses the same
    model = source.load(torch.float32, CPU, lambda _: None)
    loop = PagedLoop(model, block_size=8, config=source.config)
    loop.generate([sequence], NUM_TOKENS, chunk_len=13)
    assert_equals_transformers(directory, sequence)


def test_a_rotation_without_long_factors_gets_none(model_dirs):
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    directory = model_dirs.get("llama", rope_parameters=rope)
    source = open_model(directory, "transformers", max_model_len=65)
    assert source.config.max_model_len == 64
    assert "short_factor" not in source._hf_config.rope_parameters


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        (
            "falcon",
            {"alibi": True},
            "layer 0 has ALiBi with kv heads that several query heads share",
        ),
        (
            "rembert",
            {"is_decoder": True},
            "its attention does not go through transformers' attention interface",
        ),
        ("roformer", {"is_decoder": True}, "it takes no position_ids"),
        ("doge", {}, "layer 0 adds a mask or bias of its own to the scores"),
        (
            "recurrent_gemma",
            {},
            (
                "it has state other than keys and values; of such models, these types are"
                " supported: bamba, falcon_h1, falcon_mamba, granitemoehybrid, jamba, lfm2,"
                " lfm2_moe, mamba, mamba2, nemotron_h, olmo_hybrid, qwen3_5_moe_text,"
                " qwen3_5_text, qwen3_next"
            ),
        ),
        ("bert", {}, "its masks are neither causal nor a sliding window"),
        ("t5", {}, "it is not a causal language model of transformers"),
    ],
)
def test_attention_that_paged_attention_does_not_support_is_refused(
    tmp_path, family, overrides, reason
):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, **sizes, **overrides)
    config.architectures = ["SomeForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        open_model(tmp_path)
    assert str(caught.value).endswith(f"architectures names SomeForCausalLM: {reason}")


def causal(_batch, _head, query, key):
    return key <= query


def test_masks_that_are_windows():
    assert read_window(causal, 100) is None
    assert read_window(lambda b, h, q, k: causal(b, h, q, k) & (k > q - 7), 100) == 7
    assert read_window(lambda b, h, q, k: causal(b, h, q, k) & (k > q - 100), 100) is None


@pytest.mark.parametrize(
    "sees",
    [
        lambda _b, _h, q, k: k <= q + 1,
        lambda _b, _h, _q, _k: torch.ones((), dtype=torch.bool),
        lambda _b, _h, q, k: (k <= q) & (k // 16 == q // 16),  # chunks
        lambda _b, _h, q, k: (k <= q) | (k < 4),  # a prefix
    ],
)
def test_other_masks_are_refused(sees):
    with pytest.raises(ModelError, match="its masks are neither causal nor a sliding window"):
        read_window(sees, 128)


def test_masks_that_read_tensors_are_refused():
    on_meta = torch.ones(128, dtype=torch.bool, device="meta")
    with pytest.raises(ModelError, match="its masks depend on the tokens"):
        read_window(lambda _b, _h, q, k: (k <= q) & on_meta[k], 128)


@pytest.mark.parametrize("layer_types", [None, ["full_attention", "sliding_attention"]])
def test_a_window_that_only_the_mask_has_is_the_layer_s(model_dirs, monkeypatch, layer_types):
    # Imported before the patch, so that the patch does not outlive the test.
    assert model.__name__
    monkeypatch.setattr(attention, "read_options", options_without_window)
    fields = {"layer_types": layer_types} if layer_types else {}
    family = "cohere2" if layer_types else "starcoder2"
    directory = model_dirs.get(family, sliding_window=20, **fields)
    windows = open_model(directory, "transformers").config.windows
    assert windows == ((None, 20) if layer_types else (20, 20))


def test_a_window_that_no_mask_has_is_refused(model_dirs, monkeypatch):
    assert model.__name__
    asked = replace(options_without_window(), window=7)
    monkeypatch.setattr(attention, "read_options", lambda *_: asked)
    with pytest.raises(ModelError, match=r"layer 0 asks attention for window 7, but its masks"):
        open_model(model_dirs.get("starcoder2"), "transformers")


@pytest.mark.parametrize(
    ("family", "overrides", "max_model_len", "has_exact_keys"),
    [
        ("bloom", {"n_head": 4, "n_layer": 2, "initializer_range": 0.6}, 512, True),
        ("falcon", {"alibi": True, "multi_query": False}, 512, True),
        ("roberta", {"is_decoder": True, "pad_token_id": 1}, 510, False),
    ],
)
def test_positions_in_keys_and_behind_padding_equal_transformers(
    model_dirs, family, overrides, max_model_len, has_exact_keys
):
    directory = model_dirs.get(family, **overrides)
    source = open_model(directory)
    config = source.config
    assert (config.max_model_len, config.has_exact_keys) == (max_model_len, has_exact_keys)
    assert config.head_dim == 16 + (ALIBI_DIM if has_exact_keys else 0)
    sequences = [Sequence(random_prompt(41, seed=1)), Sequence(random_prompt(7, seed=2), 3)]
    loaded = source.load(torch.float32, CPU, lambda _: None)
    PagedLoop(loaded, block_size=8, config=config).generate(sequences, NUM_TOKENS, chunk_len=13)
    for sequence in sequences:
        assert_equals_transformers(directory, sequence)


@pytest.mark.parametrize("scale", [0.25, 80**-0.5, 128**-0.5])
def test_alibi_is_exact_in_16_bits_at_far_positions(scale):
    query, key = torch.zeros(2, 1, 2, 4, 16, dtype=torch.bfloat16)
    slopes, positions = torch.tensor([0.5, 0.0078125]), torch.tensor([0, 255, 257, 100_001])
    query, key = with_alibi(query, key, slopes, positions, scale)
    scores = scale * query.double() @ key.double().transpose(2, 3)  # [1, H, T, T]
    wanted = (slopes.double().unsqueeze(1) * positions).unsqueeze(1).expand(2, 4, 4)
    torch.testing.assert_close(scores[0], wanted, rtol=2e-5, atol=0)


def options_without_window(*_):
    return AttentionOptions(scale=1.0, window=None, softcap=None, sinks=None)


def test_an_unknown_architecture_is_named(tmp_path):
    fields = {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=r"cannot be read by transformers: .*nobodys"):
        open_model(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(model_dirs, tmp_path):
    directory = model_dirs.get("gpt2")
    for path in directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    fields = json.loads((directory / "config.json").read_text()) | {"n_layer": 3}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    source = open_model(tmp_path)
    with pytest.raises(ModelError, match=r"has missing keys: transformer\.h\.2\.attn\.c_attn"):
        source.load(torch.float32, CPU, lambda _: None)
