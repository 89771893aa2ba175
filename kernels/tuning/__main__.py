"""Measures configurations of attention on this machine's GPU, and writes the fastest to a file.

    python -m kernels.tuning --heads 32 --kv-heads 8 --head-dim 128 --processes 12

For a model's shape and cache format, the command times decode and prefill attention with each
candidate configuration, over several workloads. Each time is divided by the time that the present
configuration takes. The candidate with the least sum of these quotients wins. The device's file
gets a rule that chooses this candidate for the shape, before all other rules. The file is in
`kernels/triton/configs` and is named after the device; commit it. --out names another file. The
command writes the file when decode attention is tuned, and again when prefill attention is tuned.

--processes compiles the candidates beforehand, in that many processes. --quick tries only a few
candidates. --cpu-smoke needs no GPU, and shows that the script works. Its times mean nothing and
must not get into a device's file, so --cpu-smoke needs --out.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from kernels.triton.configs import (
    CONFIG_DIR,
    NAMES,
    Config,
    DecodeConfig,
    LaunchShape,
    PrefillConfig,
    config_of,
    config_path,
    file_stem,
    shape_of,
)
from kernels.tuning.ahead import compile_ahead
from kernels.tuning.workload import ModelSizes

Workload = TypeVar("Workload")
_REPEATS: Final = 20
_TINY: Final = ModelSizes(2, 1, 16, 16, torch.float16)

DECODE_SEQ_LENS: Final[tuple[tuple[int, ...], ...]] = (
    (131_072,),
    (8192,) * 64,
    (1024,) * 256,
    (131_072, *(512,) * 63),
)
PREFILL_CHUNKS: Final[tuple[tuple[tuple[int, int], ...], ...]] = (  # (query_len, seq_len)
    ((8192, 8192),),
    ((512, 16_384), (512, 32_768)),
    ((256, 256),) * 32,
)


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best candidate configuration of a kernel, and its times."""

    config: DecodeConfig | PrefillConfig
    seconds: tuple[float, ...]
    """The time that the best candidate takes for each workload."""
    default_seconds: tuple[float, ...]
    """The time that the present configuration takes for each workload; if it fails, the time of the
    next candidate."""


def decode_candidates(default: DecodeConfig, *, is_quick: bool = False) -> list[DecodeConfig]:
    """Return the configurations to try, `default` first; only a few if `is_quick`."""
    values: tuple[tuple[int, ...], ...] = (
        *((16, 32, 64, 128), (128, 256), (1, 4), (2, 4, 8), (3, 5, 7), (2, 4, 8)),
    )
    if is_quick:
        values = (32, 64, 128), (128, 256), (default.pieces_per_processor,), (4, 8), (3,), (2, 4)
    others = (DecodeConfig(*each) for each in itertools.product(*values))
    return [default, *(each for each in others if each != default)]


def prefill_candidates(default: PrefillConfig, *, is_quick: bool = False) -> list[PrefillConfig]:
    """Return the configurations to try, `default` first; only a few if `is_quick`."""
    values: tuple[tuple[int, ...], ...] = (32, 64, 128), (32, 64, 128), (4, 8), (3, 5, 7)
    if is_quick:
        values = (64, 128), (64, 128), (4, 8), (3,)
    others = (
        PrefillConfig(rows, positions, num_warps, num_stages, default.value_dims)
        for rows, positions, num_warps, num_stages in itertools.product(*values)
    )
    return [default, *(each for each in others if each != default)]


def best_of(
    candidates: Sequence[Config],
    workloads: Sequence[Workload],
    seconds_of: Callable[[Config, Workload], float],
    report: Callable[[str], None],
) -> Tuned:
    """Return the fastest candidate, by its times relative to those of the first candidate.

    The first candidate is the present configuration. If it fails, the next candidate takes its
    place. Each time is divided by the time that the first candidate takes for the same workload,
    and the candidate with the least sum of these quotients is returned. A candidate is dropped if
    it fails, usually for lack of shared memory, or if the average of its quotients so far exceeds
    1.5.

    Raises:
        ValueError: all candidates failed.
    """
    default: tuple[float, ...] | None = None
    best: Tuned | None = None
    least = float("inf")
    for candidate in candidates:
        seconds: list[float] = []
        total = 0.0
        try:
            for nth, workload in enumerate(workloads):
                seconds.append(seconds_of(candidate, workload))
                total += 1.0 if default is None else seconds[-1] / default[nth]
                if default is not None and total > 1.5 * (nth + 1):
                    break
        except Exception as error:  # noqa: BLE001  a compiler may raise anything
            report(f"{candidate}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if len(seconds) < len(workloads):
            continue
        if default is None:
            default = tuple(seconds)
        if total < least:
            best, least = Tuned(candidate, tuple(seconds), default), total
            report(f"{candidate}: {total / len(workloads):.3f} of the default's time")
    if best is None:
        raise ValueError("no candidate ran")
    return best


def with_rules(
    text: str, device: str, how: dict[str, object], shape: LaunchShape, tuned: Iterable[Tuned]
) -> str:
    """Return `text` with a rule for `shape` before the other rules of each tuned kernel.

    `text` is the content of a device's configuration file, which has a list of rules for each
    kernel. Earlier rules for the same shape are removed. `how` describes the measurement, and is
    stored with each new rule.
    """
    content: dict[str, Any] = json.loads(text)
    content["device"] = device
    content["tuned"] = how
    match = asdict(shape)
    for each in tuned:
        rules = content["kernels"][NAMES[type(each.config)]]
        rest = [rule for rule in rules if rule["match"] != match]
        measured = {"seconds": each.seconds, "default_seconds": each.default_seconds}
        rule = {"match": match, "config": asdict(each.config), "measured": measured | how}
        content["kernels"][NAMES[type(each.config)]] = [rule, *rest]
    return json.dumps(content, indent=2) + "\n"


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.tuning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--heads", type=int, required=True, help="query heads")
    parser.add_argument("--kv-heads", type=int, required=True)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--block-size", type=int, default=16, help="default: 16")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", "int8", "fp8"), help="default: auto"
    )
    parser.add_argument("--quick", action="store_true", help="a few candidates")
    parser.add_argument("--processes", type=int, default=0, help="compile in so many processes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the device's file")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny shapes, no GPU")
    given = parser.parse_args()
    if given.cpu_smoke and given.out is None:
        parser.error("--cpu-smoke needs --out: its times do not belong into a device's file")
    if not given.cpu_smoke and not torch.cuda.is_available():
        parser.exit(2, "kernels.tuning needs a GPU, and there is none\n")
    with torch.inference_mode():
        _tune(given)


def _tune(given: argparse.Namespace) -> None:
    """Tune the decode and the prefill kernel, and write the file after each."""
    from kernels.tuning.candidates import decode_seconds, prefill_seconds  # noqa: PLC0415  needs Triton

    model = ModelSizes(
        num_heads=given.heads,
        num_kv_heads=given.kv_heads,
        head_dim=given.head_dim,
        block_size=given.block_size,
        dtype=getattr(torch, given.dtype),
        stored={"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(given.kv_cache_dtype),
    )
    if given.cpu_smoke:
        model = _TINY
        device, name = torch.device("cpu"), "interpreter"
        before = (CONFIG_DIR / "interpreter.json").read_text()
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        name = torch.cuda.get_device_name()
        before = config_path(name, torch.cuda.get_device_capability()).read_text()
    how = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": name,
        "torch": torch.__version__,
        "block_size": model.block_size,
        "num_kv_heads": model.num_kv_heads,
        "repeats": _REPEATS,
    }
    shape = shape_of(
        torch.empty(1, model.num_heads, model.head_dim, dtype=model.dtype),
        torch.empty(1, 1, model.num_kv_heads, model.head_dim, dtype=model.stored or model.dtype),
    )
    decodes = decode_candidates(config_of(DecodeConfig, device, shape), is_quick=given.quick)
    prefills = prefill_candidates(config_of(PrefillConfig, device, shape), is_quick=given.quick)
    decode_lens, prefill_chunks = DECODE_SEQ_LENS, PREFILL_CHUNKS
    if given.cpu_smoke:
        decodes, prefills = decodes[:2], prefills[:2]
        decode_lens, prefill_chunks = ((20, 3),), (((4, 20),),)
    if given.processes:
        started = time.monotonic()
        num_failed = compile_ahead(model, [*decodes, *prefills], device, given.processes)
        num = len(decodes) + len(prefills)
        print(f"compiled {num - num_failed} of {num} in {time.monotonic() - started:.0f} s")  # noqa: T201
    repeats = 1 if given.cpu_smoke else _REPEATS
    path = given.out or CONFIG_DIR / f"{file_stem(name)}.json"
    decode = best_of(
        decodes,
        decode_lens,
        lambda config, lens: decode_seconds(model, config, lens, device, repeats),
        print,
    )
    path.write_text(with_rules(before, name, how, shape, [decode]))
    prefill = best_of(
        prefills,
        prefill_chunks,
        lambda config, chunks: prefill_seconds(model, config, chunks, device, repeats),
        print,
    )
    path.write_text(with_rules(before, name, how, shape, [decode, prefill]))
    print(f"wrote {path}")  # noqa: T201


if __name__ == "__main__":
    _main()
