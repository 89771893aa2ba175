"""Quantizes a model.

`quire quantize` runs this file in a separate process, because the file imports torch, which the
command line must not import.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_worker.quantize.calibration import Rounding, read_samples, round_layers
from gpu_worker.quantize.checkpoint import write_checkpoint
from gpu_worker.weights.json_fields import ModelError, read_json
from model_files.locate import DEFAULT_CACHE_DIR, find_model

_MIB = 1024**2


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--sample-length", type=int, required=True)
    given = parser.parse_args()
    try:
        _quantize(given)
    except ModelError as error:
        sys.stderr.write(f"quire: {error}\n")
        return 1
    return 0


def _quantize(given: argparse.Namespace) -> None:
    if given.out.exists():
        raise ModelError(f"{given.out} exists already; give a directory that does not exist")
    directory = find_model(given.model, given.cache_dir)
    fields = read_json(directory / "config.json")
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "is set: the model is quantized already")
    samples = None
    if given.calibrate is not None:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        samples = read_samples(given.calibrate, tokenizer, given.num_samples, given.sample_length)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rounding = Rounding(given.bits, given.group_size)
    with Progress() as bar:
        task = bar.add_task("layers", total=None)
        maps = round_layers(
            model, samples, rounding, lambda done, of: bar.update(task, completed=done, total=of)
        )
        write_checkpoint(directory, given.out, maps, rounding)
    before, after = (
        sum(file.stat().st_size for file in where.glob("*.safetensors")) / _MIB
        for where in (directory, given.out)
    )
    sys.stdout.write(f"{given.out}: {after:.0f} MiB of weights, {before:.0f} before\n")


if __name__ == "__main__":
    raise SystemExit(main())
