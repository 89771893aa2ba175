"""Makes random LoRA adapters in PEFT's format, and checkpoints merged with them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj", "c_fc", "c_proj"),
    *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
)
"""The maps of a layer; a model lacks some of them."""
_PREFIX = "base_model.model."


def make_adapter(
    directory: Path,
    model: Path,
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ALL_TARGETS,
    **config: Any,
) -> Path:
    """Write an adapter for a model in one file, and return its directory.

    The matrices are large enough to change the model's tokens. `config` has other fields of
    `adapter_config.json`.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    tensors, used = {}, set()
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if (target := module.rpartition(".")[2]) in targets:
            used.add(target)
            num_out, num_in = weight.shape
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = draw(rank, num_in)
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = draw(num_out, rank)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/else",
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "r": rank,
        "rank_pattern": {},
        "target_modules": [target for target in targets if target in used],
        "use_dora": False,
        "use_rslora": False,
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields | config))
    return directory


def merge(directory: Path, model: Path, adapter: Path) -> Path:
    """Write the model with an adapter merged, `W + s B A`, and return its directory."""
    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    deltas = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / rank**0.5 if config["use_rslora"] else alpha / rank
    for name in weights:
        module = _PREFIX + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in deltas:
            a, b = deltas[f"{module}.lora_A.weight"], deltas[f"{module}.lora_B.weight"]
            weights[name] += (scale * b.double() @ a.double()).to(weights[name].dtype)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory
