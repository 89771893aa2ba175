"""Writes a model with rounded linear maps in GPTQ's format, which other engines read, too.

Symbols: `N` output features of a linear map, `K` its input features.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpu_worker.quantize.calibration import Rounding
from gpu_worker.quantize.rounding import RoundedWeight
from gpu_worker.weights.checkpoint import Checkpoint
from gpu_worker.weights.json_fields import ModelError

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")


def pack_words(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers `int32[M, C]` to words `int32[M, C * bits / 32]`.

    The first integer of a word is in the word's lowest bits.
    """
    per_word = 32 // bits
    in_word = integers.long().view(integers.shape[0], -1, per_word)
    words = torch.zeros(in_word.shape[:2], dtype=torch.int64)
    for place in range(per_word):
        words |= in_word[..., place] << (bits * place)
    return words.to(torch.int32)  # keeps the low bits


def gptq_tensors(rounded: RoundedWeight, bits: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a map, by the last part of their names, such as "qweight".

    The format stores zero points minus 1.
    """
    num_in, num_groups = rounded.values.shape[1], rounded.scales.shape[1]
    return {
        "qweight": pack_words(rounded.values, bits).t().contiguous(),
        "qzeros": pack_words((rounded.zeros.t() - 1) & (2**bits - 1), bits),
        "scales": rounded.scales.t().contiguous(),
        "g_idx": torch.arange(num_in, dtype=torch.int32) // (num_in // num_groups),
    }


def gptq_config(bits: int, group_size: int) -> dict[str, Any]:
    """Return the `quantization_config` of config.json."""
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": False,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "lm_head": False,
    }


def write_checkpoint(
    directory: Path,
    out: Path,
    maps: Iterable[tuple[str, RoundedWeight]],
    rounding: Rounding,
) -> None:
    """Copy a model directory to `out`, with the tensors of `maps` replaced by rounded ones.

    `maps` yields each map's name and rounded weight. Other tensors stay as they are. `out` appears
    only when it is complete.

    Raises:
        ModelError: The checkpoint cannot be read, or has no tensor NAME.weight for a map's NAME.
    """
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        shutil.copytree(directory, unfinished, ignore=shutil.ignore_patterns(*_WEIGHTS))
        checkpoint = Checkpoint(directory)
        tensors: dict[str, torch.Tensor] = {}
        for name, rounded in maps:
            if f"{name}.weight" not in checkpoint.names:
                raise ModelError(f"{directory} has no {name}.weight; the model cannot be quantized")
            for end, tensor in gptq_tensors(rounded, rounding.bits).items():
                tensors[f"{name}.{end}"] = tensor
        rounded_names = {f"{name.rpartition('.')[0]}.weight" for name in tensors}
        for name in sorted(checkpoint.names - rounded_names):
            tensors[name] = checkpoint.whole(name)
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        config_path = unfinished / "config.json"
        config = json.loads(config_path.read_text())
        config["quantization_config"] = gptq_config(rounding.bits, rounding.group_size)
        config_path.write_text(json.dumps(config, indent=2) + "\n")
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
