"""Measures every kernel on this GPU: bytes or operations per second, and the share of the ceiling.

    python bench/gpu_kernels.py --out kernels.json

The ceilings are measured in the same run: bytes per second of a large read or a large copy,
whichever is more, and operations per second of a large matrix product. Each kernel is timed from a
CUDA graph with a cold cache (`kernels/tuning/timing.py`). The baselines of attention are torch's
SDPA and, for some shapes, FlexAttention, over dense keys and values; the results of our attention
are compared with SDPA's. The baselines of the other kernels are their twins in `kernels/reference`.
Decode attention is measured on block-major and layer-major pools, with blocks of 16 to 128 tokens.

If a kernel fails, its row has the error, and the other kernels still run; after a device fault they
run in a new process. With --ceilings FILE, the ceilings are read from the file if it was written
for this device; otherwise they are measured and written to it. `--cpu-smoke` runs every case with
tiny shapes in Triton's interpreter: it measures nothing, and shows that the script works.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if "--cpu-smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

sys.path.insert(1, str(Path(__file__).parents[1]))

import torch
from gpu.rows import continues, is_lost, reason, start_again
from harness.machine import headline, machine_facts

from kernels.tuning.timing import seconds_of

if TYPE_CHECKING:
    from gpu.kernel_cases import Case, Prepared

_CEILING_BYTES = 1 << 31
_GEMM_SIZE = 8192
_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured limits of the device."""

    bytes_per_s: float
    flops: float


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one case."""

    kernel: str
    shape: str
    us: float | None = None
    gb_s: float | None = None
    tflops: float | None = None
    share: float | None = None
    """The least time that the binding ceiling allows ÷ the measured time."""
    bound: str | None = None
    """"bytes" or "flops"."""
    baselines_us: dict[str, float | str] | None = None
    """Each baseline's time, or its error."""
    max_difference: float | None = None
    """Largest difference from SDPA's numbers."""
    error: str | None = None


def measure_ceilings(device: torch.device, num_bytes: int, gemm_size: int) -> Ceilings:
    """Read and copy `num_bytes`, and multiply square matrices."""
    data = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(data)
    read_s = seconds_of(data.sum, device, _REPEATS)
    copy_s = seconds_of(lambda: target.copy_(data), device, _REPEATS)
    x = torch.randn(gemm_size, gemm_size, device=device).bfloat16()
    gemm_s = seconds_of(lambda: x @ x, device, _REPEATS)
    return Ceilings(num_bytes / min(read_s, copy_s / 2), 2 * gemm_size**3 / gemm_s)


def kept_ceilings(file: Path | None, name: str, sizes: tuple[int, int]) -> Ceilings:
    """Return the ceilings of the device `name`, from the file if it has them."""
    if file is not None and file.exists():
        kept = json.loads(file.read_text())
        if kept["device"] == name and kept["sizes"] == list(sizes):
            return Ceilings(**kept["ceilings"])
    is_gpu = torch.cuda.is_available()
    ceilings = measure_ceilings(torch.device("cuda" if is_gpu else "cpu"), *sizes)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, {"device": name, "sizes": sizes, "ceilings": asdict(ceilings)})
    return ceilings


def measure(case: "Case", device: torch.device, ceilings: Ceilings, repeats: int) -> Row:
    """Time one case and its baselines; failures are in the row."""
    try:
        torch.manual_seed(0)
        prepared = case.prepare(device)
        seconds = seconds_of(prepared.launch, device, repeats)
    except Exception as error:  # noqa: BLE001  a kernel may fail in any way
        return Row(case.kernel, case.shape, error=reason(error))
    least_bytes_s = prepared.num_bytes / ceilings.bytes_per_s
    least_flops_s = prepared.flops / ceilings.flops
    difference, baselines = _measure_baselines(prepared, device, repeats)
    return Row(
        case.kernel,
        case.shape,
        us=seconds * 1e6,
        gb_s=prepared.num_bytes / seconds * 1e-9,
        tflops=prepared.flops / seconds * 1e-12 if prepared.flops else None,
        share=max(least_bytes_s, least_flops_s) / seconds,
        bound="bytes" if least_bytes_s >= least_flops_s else "flops",
        baselines_us=baselines,
        max_difference=difference,
    )


def _measure_baselines(
    prepared: "Prepared", device: torch.device, repeats: int
) -> tuple[float | None, dict[str, float | str]]:
    difference: float | None = None
    baselines: dict[str, float | str] = {}
    for name, prepare in prepared.baselines.items():
        try:
            launch = prepare()
            if name == prepared.expected:
                ours, theirs = prepared.launch(), launch()
                difference = float((ours.float() - theirs.float()).abs().max())
            baselines[name] = seconds_of(launch, device, repeats) * 1e6
        except Exception as error:  # noqa: BLE001  as above
            baselines[name] = reason(error)
    return difference, baselines


def table_line(row: Row) -> str:
    """Return a row as text."""
    head = f"{row.kernel:<16} {row.shape:<44}"
    if row.error is not None:
        return f"{head} FAILED {row.error}"
    others = "  ".join(
        f"{name} {value:,.1f} us" if isinstance(value, float) else f"{name} FAILED {value[:60]}"
        for name, value in (row.baselines_us or {}).items()
    )
    rate = f"{row.gb_s:>8,.0f} GB/s" if row.bound == "bytes" else f"{row.tflops:>6,.0f} TFLOP/s"
    off = "" if row.max_difference is None else f"  differs by {row.max_difference:.4f}"
    return f"{head} {row.us:>10,.1f} us {rate:>14} {row.share:>7.3f}  {others}{off}"


def run(
    cases: "list[Case]",
    device: torch.device,
    ceilings: Ceilings,
    repeats: int,
    say: Callable[[list[Row]], None],
    done: Sequence[Row] = (),
) -> list[Row]:
    """Measure the cases that are not in `done`; after each, call `say` with all rows so far."""
    rows = list(done)
    for case in cases[len(rows) :]:
        rows.append(measure(case, device, ceilings, repeats))
        say(rows)
        if is_lost():  # a baseline may have lost the device
            start_again()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def write(file: Path, result: Mapping[str, object]) -> None:
    """Replace a file of results atomically."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(file)


def _main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", "--out", dest="out", type=Path, help="where to write JSON")
    parser.add_argument("--quick", action="store_true", help="five repeats of each case")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny shapes, no GPU")
    parser.add_argument("--main", action="store_true", help="only the cases that matter most")
    parser.add_argument("--ceilings", type=Path, metavar="FILE", help="where ceilings are kept")
    parser.add_argument("--only", default="", help="cases whose kernel or shape contains this")
    given = parser.parse_args()
    if not given.cpu_smoke and not torch.cuda.is_available():
        parser.exit(2, "there is no GPU; --cpu-smoke runs without one\n")
    from gpu.kernel_cases import TINY, WHOLE, all_cases, main_cases  # noqa: PLC0415  imports Triton

    device = torch.device("cpu" if given.cpu_smoke else "cuda")
    started = time.perf_counter()
    sizes = (1 << 16, 64) if given.cpu_smoke else (_CEILING_BYTES, _GEMM_SIZE)
    name = "cpu-smoke, nothing measured" if given.cpu_smoke else torch.cuda.get_device_name()
    ceilings = kept_ceilings(given.ceilings, name, sizes)
    print(
        f"{name}: {ceilings.bytes_per_s * 1e-9:,.0f} GB/s, {ceilings.flops * 1e-12:,.0f} TFLOP/s",
        flush=True,
    )
    print(headline(machine_facts()), flush=True)
    cases = [
        case
        for case in (main_cases if given.main else all_cases)(TINY if given.cpu_smoke else WHOLE)
        if given.only in f"{case.kernel} {case.shape}"
    ]
    repeats = 1 if given.cpu_smoke else 5 if given.quick else _REPEATS
    result = {
        "machine": machine_facts(),
        "device": name,
        "is_measured": not given.cpu_smoke,
        "ceilings": asdict(ceilings),
    }

    def say(rows: list[Row]) -> None:
        if rows:
            print(table_line(rows[-1]), flush=True)
        if given.out is not None:  # a call that is cut off keeps its measurements so far
            write(given.out, {**result, "rows": [asdict(row) for row in rows]})

    done: list[Row] = []
    if given.out is not None and continues(given.out):
        done = [Row(**row) for row in json.loads(given.out.read_text())["rows"]]
    say(done)
    rows = run(cases, device, ceilings, repeats, say, done)
    failed = sum(row.error is not None for row in rows)
    print(f"{len(rows)} rows, {failed} failed, {time.perf_counter() - started:.0f} s")
    # A failed kernel is a result, which JSON contains; on a CPU it is a bug in this script.
    return 1 if given.cpu_smoke and failed else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(_main())
