"""Writes a model as a quantized checkpoint: each weight is rounded to the nearest number.

    python bench/quantize.py models/quire-tiny-python awq /tmp/awq

The checkpoints are for tests and for `bench/quality.py --checkpoints`. Programs for real
checkpoints, such as `quire quantize`, fit the rounding to a text, and lose less. Embeddings, norms,
the map to the vocabulary and the experts' router are not quantized.

Symbols: `N` output features of a linear map, `K` its input features, `G` groups of input features.
"""

import argparse
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpu_worker.quantize.checkpoint import gptq_config, gptq_tensors, pack_words
from gpu_worker.quantize.rounding import round_to_nearest

Tensors = dict[str, torch.Tensor]
"""The tensors of one linear map, by the end of their names."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each nibble of a word holds, from the lowest."""
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_BLOCK = 128
_KEPT = r".*(embed|lm_head|gate\.).*"
"""Names of two-dimensional weights that are never quantized."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to store a linear map."""

    config: dict[str, Any]
    """`quantization_config`, without the list of weights that are not quantized."""
    kept_key: str
    """The name of the list of weights that are not quantized."""
    pack: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    """Takes a weight [N, K]; returns its tensors, and the weight that they encode, float32[N,
    K]."""


def _in_awq_order(integers: torch.Tensor) -> torch.Tensor:
    """Rearrange `[M, N]` so that `pack_words` packs it as AWQ does."""
    return integers.view(len(integers), -1, len(_AWQ_ORDER))[:, :, list(_AWQ_ORDER)].flatten(1)


def _pack_awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rounded = round_to_nearest(weight, 4, 128)
    tensors = {
        "qweight": pack_words(_in_awq_order(rounded.values.t()), 4),
        "qzeros": pack_words(_in_awq_order(rounded.zeros.t()), 4),
        "scales": rounded.scales.t(),
    }
    return tensors, rounded.dequantized()


def _pack_gptq(weight: torch.Tensor, bits: int, group_size: int) -> tuple[Tensors, torch.Tensor]:
    rounded = round_to_nearest(weight, bits, group_size)
    return gptq_tensors(rounded, bits), rounded.dequantized()


def _to_fp8(weight: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight in fp8, scaled so that `largest` becomes fp8's largest, and the scales."""
    scales = (largest / _FP8_MAX).clamp(min=1e-12)
    return (weight.float() / scales).to(torch.float8_e4m3fn), scales


def _pack_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, scale = _to_fp8(weight, weight.float().abs().max())
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def _pack_fp8_channel(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, scales = _to_fp8(weight, weight.float().abs().amax(1, keepdim=True))
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def _pack_fp8_block(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    largest = torch.stack(
        [
            torch.stack([block.abs().max() for block in part.split(_BLOCK, dim=1)])
            for part in weight.float().split(_BLOCK)
        ]
    )
    num_out, num_in = weight.shape
    whole = largest.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[:num_out, :num_in]
    values, scales = _to_fp8(weight, whole)
    return {
        "weight": values,
        "weight_scale_inv": scales[::_BLOCK, ::_BLOCK],
    }, values.float() * scales


def _gptq(bits: int, group_size: int) -> Form:
    return Form(
        gptq_config(bits, group_size),
        "modules_to_not_convert",
        lambda weight: _pack_gptq(weight, bits, group_size),
    )


_COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "strategy": "channel", "dynamic": False},
            "input_activations": {"type": "float", "num_bits": 8, "dynamic": True},
        }
    },
}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMS = {
    "awq": Form(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
        },
        "modules_to_not_convert",
        _pack_awq,
    ),
    "gptq": _gptq(4, 128),
    "gptq_32": _gptq(4, 32),
    "gptq_8bit": _gptq(8, 128),
    "fp8": Form(_FP8, "ignored_layers", _pack_fp8),
    "fp8_channel": Form(_COMPRESSED, "ignore", _pack_fp8_channel),
    "fp8_block": Form(
        _FP8 | {"weight_block_size": [_BLOCK, _BLOCK]}, "modules_to_not_convert", _pack_fp8_block
    ),
}
"""The forms by name."""


def write(
    directory: Path, out: Path, form: Form, kept: str = _KEPT, *, packed: bool = True
) -> Path:
    """Write the model of `directory` to `out`; return `out`.

    Args:
        directory: a Hugging Face directory with one file of safetensors.
        out: made here.
        form: how its maps are stored.
        kept: matches the names of weights that are not quantized.
        packed: False stores the float32 numbers that the packed ones encode.
    """
    shutil.copytree(directory, out, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: Tensors = {}
    names = []
    for name, tensor in load_file(directory / "model.safetensors").items():
        is_map = name.endswith(".weight") and tensor.dim() == 2
        if not is_map or re.fullmatch(kept, name) or re.fullmatch(_KEPT, name):
            tensors[name] = tensor
            if is_map:
                names.append(name.removesuffix(".weight"))
            continue
        parts, stands_for = form.pack(tensor)
        if packed:
            for end, part in parts.items():
                tensors[f"{name.removesuffix('weight')}{end}"] = part.contiguous()
        else:
            tensors[name] = stands_for
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    if packed:
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"] = form.config | {form.kept_key: names}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--keep", default=_KEPT, metavar="PATTERN", help="weights that stay as they are"
    )
    given = parser.parse_args()
    write(given.model, given.out, FORMS[given.form], given.keep)


if __name__ == "__main__":
    _main()
