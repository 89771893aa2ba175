"""Writes gpt-oss with experts in MXFP4, as published, and with the same experts dequantized."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_mxfp4(directory: Path, to: Path) -> tuple[Path, Path]:
    """Give a random gpt-oss other random experts; returns the packed and the plain model."""
    packed, plain = (shutil.copytree(directory, to / name) for name in ("packed", "plain"))
    tensors = load_file(directory / "model.safetensors")
    of_packed, of_plain = dict(tensors), dict(tensors)
    random = torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, num_in, num_out = weight.shape
        groups = num_experts, num_out, num_in // 32
        codes = torch.randint(16, (*groups, 32), generator=random, dtype=torch.uint8)
        powers = torch.randint(122, 126, groups, generator=random, dtype=torch.uint8)
        of_packed[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        of_packed[f"{name}_scales"] = powers
        del of_packed[name]
        values = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes.long()]
        values *= 2.0 ** (powers.float().unsqueeze(-1) - 127)
        values = values.view(num_experts, num_out, num_in).transpose(1, 2).contiguous()
        of_plain[name] = values.to(weight.dtype)
    save_file(of_packed, packed / "model.safetensors", {"format": "pt"})
    save_file(of_plain, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain
