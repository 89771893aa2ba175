"""Quantized checkpoints of models that transformers runs equal what they stand for."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.quantize import FORMS, write
from gpu_worker.models.registry import open_model
from gpu_worker.weights.json_fields import ModelError
from tests.mxfp4_fixture import write_mxfp4
from tests.unit.gpu_worker.models.against_transformers import assert_equals_transformers
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, random_prompt

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
WIDE = {"hidden_size": 128, "num_attention_heads": 8, "head_dim": 16, "intermediate_size": 256}


def assert_stands_for(packed, plain):
    source = open_model(packed, "transformers")
    model = source.load(torch.float32, CPU, lambda _: None)
    sequence = Sequence(random_prompt(41, seed=1))
    PagedLoop(model, block_size=8, config=source.config).generate([sequence], 64, chunk_len=13)
    assert_equals_transformers(plain, sequence)


def test_gpt_oss_with_experts_of_4_bits(model_dirs, tmp_path):
    packed, plain = write_mxfp4(model_dirs.get("gpt_oss", sliding_window=20), tmp_path)
    assert_stands_for(packed, plain)


@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen3_moe", WIDE | EXPERTS), ("olmo2", WIDE)], ids=["experts", "dense"]
)
def test_fp8_in_blocks(model_dirs, tmp_path, family, sizes):
    directory = model_dirs.get(family, **sizes)
    packed = write(directory, tmp_path / "packed", FORMS["fp8_block"])
    plain = write(directory, tmp_path / "plain", FORMS["fp8_block"], packed=False)
    assert_stands_for(packed, plain)


@pytest.mark.parametrize("place", ["whole", "text_config"])
def test_fp8_in_the_text_part_of_a_model_that_takes_images(model_dirs, tmp_path, place):
    """As Ministral 3 is released: a scale for each map, and another for its inputs."""
    directory = model_dirs.get("ministral3", **WIDE)
    plain = shutil.copytree(directory, tmp_path / "plain")
    packed = shutil.copytree(directory, tmp_path / "packed")
    of_packed, of_plain = {}, {}
    for name, weight in load_file(directory / "model.safetensors").items():
        in_whole = f"language_model.{name}"
        if not name.endswith("_proj.weight"):
            of_packed[in_whole] = of_plain[name] = weight
            continue
        scale = weight.abs().max() / 448
        of_packed[in_whole] = (weight / scale).to(torch.float8_e4m3fn)
        of_plain[name] = of_packed[in_whole].float() * scale
        map_name = in_whole.removesuffix("weight")
        of_packed |= {
            f"{map_name}weight_scale_inv": scale,
            f"{map_name}activation_scale": 2 * scale,
        }
    of_packed["vision_tower.x"] = torch.zeros(1)
    save_file(of_packed, packed / "model.safetensors", {"format": "pt"})
    save_file(of_plain, plain / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": json.loads((packed / "config.json").read_text()),
        "vision_config": {"model_type": "pixtral"},
    }
    described = config if place == "whole" else config[place]
    described["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "lm_head"],
    }
    (packed / "config.json").write_text(json.dumps(config))
    assert_stands_for(packed, plain)
    # Without a GPU, transformers dequantizes in any case.
    assert open_model(packed)._hf_config.quantization_config["dequantize"]


def test_other_methods_are_refused_by_name(model_dirs, tmp_path):
    directory = shutil.copytree(model_dirs.get("granite"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (directory / "config.json").write_text(json.dumps(config))
    reason = "quant_method is 'awq'; of models that transformers runs, supported: fp8, mxfp4"
    with pytest.raises(ModelError, match=reason):
        open_model(directory)
