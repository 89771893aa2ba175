"""The text part of a model that takes images, served alone, equals transformers' whole model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from gpu_worker.loading.early_check import check_config
from gpu_worker.models.llama.config import read_llama_config
from gpu_worker.models.registry import open_model
from gpu_worker.models.rope import LinearScaling, RopeConfig
from gpu_worker.models.text_part import name_alone, text_part
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import JsonFields, ModelError
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, random_prompt
from tests.unit.gpu_worker.test_kv_groups import GEMMA_4, GEMMA_N, LLAMA_4, Service
from tests.unit.gpu_worker.test_recurrent_states import DELTA

TEXT = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SEES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "depth": 1}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
ALTERNATING = ["sliding_attention", "full_attention"]
MODELS = {
    "gemma3": (
        {"sliding_window": 20, "layer_types": ALTERNATING},
        {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
    ),
    "cohere2_vision": (
        {"model_type": "cohere2", "sliding_window": 20, "layer_types": ALTERNATING},
        {"num_hidden_layers": 1},
    ),
    "gemma4_unified": (GEMMA_4, {"num_hidden_layers": 1}),
    "internvl": ({"model_type": "qwen3"}, {"num_hidden_layers": 1}),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", "num_hidden_layers": 1}),
    "llava_next": (
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "clip_vision_model", "num_hidden_layers": 1},
    ),
    "llava_onevision": (
        {"model_type": "qwen2"},
        {"model_type": "siglip_vision_model", "num_hidden_layers": 1},
    ),
    "smolvlm": ({"model_type": "llama"}, {"num_hidden_layers": 1}),
    "gemma4": (GEMMA_4, {"num_hidden_layers": 1}),
    "llama4": (LLAMA_4, {"num_hidden_layers": 1}),
    "mistral3": (
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral", "num_hidden_layers": 1, "head_dim": 16},
    ),
    "ministral3": (
        {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.1,
            },
        },
        {"model_type": "pixtral", "num_hidden_layers": 1, "head_dim": 16},
    ),
    "qwen2_vl": ({"rope_parameters": MROPE}, {"embed_dim": 32, "hidden_size": 64, "num_heads": 2}),
    "qwen2_5_vl": (
        {"rope_parameters": MROPE},
        {"out_hidden_size": 64, "num_heads": 2, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {"out_hidden_size": 64, "num_heads": 2, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        {
            "rope_parameters": {**MROPE, "mrope_interleaved": True},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,  # transformers does not read it
        },
        {"out_hidden_size": 64, "num_heads": 2, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": (DELTA, {"out_hidden_size": 64, "num_heads": 2}),
    "qwen3_5_moe": (
        DELTA
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
        {"out_hidden_size": 64, "num_heads": 2},
    ),
}


def saved(directory, family):
    text, sees = MODELS[family]
    config = AutoConfig.for_model(
        family.replace("ministral3", "mistral3"),
        text_config=TEXT | text,
        vision_config=SEES | sees,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(directory)
    return model


def test_stacked_experts_may_be_transposed(tmp_path):
    """As in the published checkpoints of Qwen3-VL-MoE; transformers writes them the other way."""
    whole = saved(tmp_path, "qwen3_vl_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stacked = [name for name in tensors if ".experts." in name]
    assert len(stacked) == 4, "two for each of two layers"
    for name in stacked:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})
    check(Service(tmp_path), whole)


@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_of_text_equal_the_whole_model(tmp_path, family):
    whole = saved(tmp_path, family)
    check(Service(tmp_path), whole)


def check(service, whole):
    prompt = random_prompt(41, seed=1)
    service.submit(0, prompt)
    service.run()
    output = service.outputs[0]
    with torch.inference_mode():
        logits = whole(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    assert output == logits[len(prompt) - 1 :].argmax(-1).tolist()
    assert len({*output}) > len(output) // 8, "a repetitive model would test little"


def test_the_text_part_of_gemma_3n(tmp_path):
    """Its other parts need another package, so this checkpoint has none but a tensor of one."""
    config = AutoConfig.for_model("gemma3n", text_config=TEXT | GEMMA_N)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        alone = AutoModelForCausalLM.from_config(config.text_config).eval()
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in alone.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    of_another_part = {"model.embed_audio.embedding.weight": torch.zeros(1)}
    save_file(tensors | of_another_part, tmp_path / "model.safetensors", {"format": "pt"})
    config.architectures = ["Gemma3nForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    check(Service(tmp_path), alone)


def test_a_text_part_that_is_ours_runs_on_transformers_if_asked(tmp_path):
    whole = saved(tmp_path, "qwen2_vl")
    source = open_model(tmp_path, "transformers")
    model = source.load(torch.float32, CPU, lambda _: None)
    sequence = Sequence(random_prompt(41, seed=1))
    PagedLoop(model, block_size=8, config=source.config).generate([sequence], 24)
    with torch.inference_mode():
        logits = whole(torch.tensor([sequence.tokens[:-1]]), use_cache=False).logits[0]
    torch.testing.assert_close(torch.stack(sequence.logits), logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_sizes_that_older_configs_omit_are_those_of_transformers(model_type):
    values = {"model_type": model_type, "rms_norm_eps": 1e-5}
    architecture = ["LlavaForConditionalGeneration"]
    whole = JsonFields(Path("config"), "", {"architectures": architecture, "text_config": values})
    ours, theirs = read_llama_config(text_part(whole)), AutoConfig.for_model(**values)
    assert ours.num_layers == theirs.num_hidden_layers
    assert (ours.num_heads, ours.num_kv_heads, ours.max_model_len) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.max_position_embeddings,
    )
    sizes = ours.vocab_size, ours.hidden_size, ours.intermediate_size
    assert sizes == (theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size)


def test_gemma_3_4b_s_own():
    """The published config.json leaves out what equals the defaults of transformers."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    config = read_llama_config(text_part(JsonFields(Path("config"), "", whole)))
    theirs = AutoConfig.for_model(**text)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_model_len) == (262208, 131072)
    assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert [kind == "full_attention" for kind in theirs.layer_types] == [
        window is None for window in config.windows
    ]
    assert config.rope == RopeConfig(1e6, LinearScaling(8.0))
    assert config.windowed_rope == RopeConfig(1e4)
    assert config.tie_word_embeddings
    assert config.qk_norm
    assert config.attention_scale == 1 / 16


def test_another_text_part_than_the_usual_one_is_refused_by_name(tmp_path):
    fields = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {"model_type": "llama"},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "tokenizer.json").write_text("{}")
    reason = "Mistral3ForConditionalGeneration is supported only with mistral or ministral3"
    with pytest.raises(ModelError, match=reason):
        open_model(tmp_path)
    with pytest.raises(ModelError, match=reason):  # before torch is imported
        check_config(WorkerSettings(model=str(tmp_path)), lambda *_: None)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("model.language_model.layers.0.x", "model.layers.0.x"),
        ("language_model.model.layers.0.x", "model.layers.0.x"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.x", "model.layers.0.x"),
        ("model.text_model.layers.0.x", "model.layers.0.x"),
        ("visual.x", None),
        ("model.vision_tower.x", None),
    ],
)
def test_names_of_tensors_as_old_and_new_checkpoints_have_them(name, alone):
    assert name_alone(name) == alone
