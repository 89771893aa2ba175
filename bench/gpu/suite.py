"""Runs the GPU tests and benchmarks, in up to three calls, and prints one table: see gpu.sh.

Every part is a separate process with a time limit. If a part fails or has no time left, its line in
the table says so; the table and gpu.json are written in any case. --cpu-smoke runs every part with
the smallest shapes on a CPU: it measures nothing, and shows that the scripts work.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from harness.machine import machine_facts

_BENCH: Final = Path(__file__).parents[1]
_ROOT: Final = _BENCH.parent
_KERNELS: Final = ("activation", "batch_invariant", "copy", "decode", "greedy", "grouped_linear",
                   "linear", "norm", "ops", "prefill", "quantized", "quantized_linear", "rotary",
                   "rotary_store", "sample", "shared_prefixes", "store", "suppress")  # fmt: skip
_KERNEL_TESTS: Final = tuple(f"tests/kernels/test_{kernel}.py" for kernel in _KERNELS)
_POOL_TEST: Final = "tests/unit/gpu_worker/memory/test_elastic.py"
_GRAPH_TESTS: Final = (
    "tests/unit/gpu_worker/step/test_piecewise_graphs.py",
    "tests/unit/gpu_worker/memory/test_transfer.py",
)
_LOG_LINES: Final = 12
_SMOKE_LIMIT_S: Final = 200
"""For parts that take seconds, on a machine that may be busy."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    commands: tuple[tuple[str, ...], ...]
    """The commands, which run at the same time; `{out}` is the part's directory."""
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a part."""

    name: str
    seconds: float
    error: str | None
    """The reason why it failed; some results may exist."""
    results: dict[str, Any]
    """Results by the name of the file that the part wrote."""


@dataclass(frozen=True, slots=True)
class Target:
    """A goal: the place of its number in the results, and its bound."""

    text: str
    part: str
    file: str
    number: str
    bound: float
    is_upper: bool = False


_TARGETS: Final = (
    Target("tokens in float32 that differ from the CPU's", "exact", "numbers", "wrong_float32", 0,
           is_upper=True),
    *(
        Target(f"{shape}: idle between decode steps, batch {batch}", f"serve {shape}", "numbers",
               f"idle_share_c{batch}", 0.01, is_upper=True)
        for shape in ("0.6B", "1B", "8B")
        for batch in (1, 256)
    ),
    Target("1B: bandwidth of a decode at batch 1", "serve 1B", "numbers", "bandwidth_share_c1",
           0.75),
    Target("8B: bandwidth of a decode at batch 1", "serve 8B", "numbers", "bandwidth_share_c1",
           0.85),
    Target("8B: three processes ÷ one, batch 1", "serve 8B", "numbers", "three_over_one_c1", 0.95),
    Target("8B: three processes ÷ one, batch 256", "serve 8B", "numbers", "three_over_one_c256",
           0.99),
    Target("1B: ÷ transformers' continuous batching", "ratios", "numbers",
           "over_continuous_batching", 5.0),
    Target("swap ÷ pinned memcpy", "swap", "numbers", "payload_over_memcpy", 0.95),
    Target("decode slowdown while swapping", "swap", "numbers", "decode_slowdown", 0.02,
           is_upper=True),
)  # fmt: skip


def whole(bandwidth: float) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each call on a GPU: correctness, the speed of 8B, and the rest.

    `bandwidth` is in bytes per second. The limits of a call add up to less than 9 minutes.
    """
    tests = tuple(_pytest(file) for file in _KERNEL_TESTS)
    transformers = _module("gpu.transformers_load", "--shape", "1B", "--json", "{out}/numbers.json")
    return (
        (
            Part("kernel tests", tests, 240, {"TRITON_INTERPRET": "0"}),
            Part("exact", (_module("gpu.exact", "--json", "{out}/numbers.json"),), 130),
            Part("graphs on the device", (_pytest(*_GRAPH_TESTS, "-m", "gpu"),), 50),
            Part("elastic pool", (_pytest(_POOL_TEST),), 60),  # alone: it reads the free memory
        ),
        (
            Part("kernels", (_kernel_bench("--out", "{out}/kernels.json"),), 200),
            _serve("8B", bandwidth, 200),
        ),
        (
            Part("swap", (_module("gpu.swap", "--json", "{out}/numbers.json"),), 60),
            _serve("1B", bandwidth, 150),
            Part("transformers 1B", (transformers,), 100),
            _serve("0.6B", bandwidth, 120),
        ),
    )


def smoke() -> tuple[tuple[Part, ...], ...]:
    """Return the same calls with tiny shapes."""
    tiny = ("--shape", "smoke", "--device", "cpu", "--json", "{out}/numbers.json")
    load = ("--concurrency", "1,2", "--input-len", "8", "--output-len", "8")
    exact = _module("gpu.exact", *tiny[2:], "--rows", "4", "--tokens", "6")
    kernels = _kernel_bench("--cpu-smoke", "--only", "none", "--out", "{out}/kernels.json")
    serve = ("--split-concurrency", "2", "--split-rounds", "1", "--kv-cache-memory-gb", "0.01")
    rows = ("--num-rows", "2", "--context", "64", "--rounds", "1", "--swapped-blocks", "2")
    swap = _module("gpu.swap", *tiny, *rows, "--pool-blocks", "8")
    # On a CPU continuous batching does not end.
    transformers = _module("gpu.transformers_load", *tiny, *load, "--kinds", "generate")
    return (
        (
            Part(
                "kernel tests",
                (_pytest(_KERNEL_TESTS[0]),),
                _SMOKE_LIMIT_S,
                {"TRITON_INTERPRET": "1"},
            ),
            Part("exact", (exact,), _SMOKE_LIMIT_S),
        ),
        (
            Part("kernels", (kernels,), _SMOKE_LIMIT_S),
            Part(
                "serve smoke",
                (_module("gpu.serve", *tiny, *load, *serve, "--bandwidth", "1e10"),),
                _SMOKE_LIMIT_S,
            ),
        ),
        (
            Part("swap", (swap,), _SMOKE_LIMIT_S),
            Part("transformers smoke", (transformers,), _SMOKE_LIMIT_S),
        ),
    )


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _kernel_bench(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(_BENCH / "gpu_kernels.py"), *arguments)


def _serve(shape: str, bandwidth: float, limit_s: float) -> Part:
    numbers = ("--shape", shape, "--bandwidth", str(bandwidth), "--json", "{out}/numbers.json")
    return Part(f"serve {shape}", (_module("gpu.serve", *numbers),), limit_s)


def _pytest(*arguments: str) -> tuple[str, ...]:
    flags = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider")
    return (sys.executable, "-m", "pytest", *flags, *arguments)


def run(part: Part, out: Path, limit_s: float) -> Outcome:
    """Run a part in its own directory; failures are recorded in the outcome."""
    directory = out / part.name.replace(" ", "-")
    started = time.monotonic()
    errors: list[str] = []
    processes: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = (str(_BENCH), str(_ROOT), os.environ.get("PYTHONPATH"))
        path = os.pathsep.join(filter(None, paths))
        environment = {**os.environ, "PYTHONPATH": path, **part.environment}
        for i, command in enumerate(part.commands):
            log = directory / f"log-{i}.txt"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [word.replace("{out}", str(directory)) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=_ROOT,
                    env=environment,
                    start_new_session=True,
                )
            processes.append((process, log))
        for process, log in processes:
            left_s = max(0.0, started + limit_s - time.monotonic())
            try:
                code = process.wait(left_s)
            except subprocess.TimeoutExpired:
                errors.append(f"took longer than {limit_s:.0f} s")
                continue
            if code:
                errors.append(f"{log.name}: ended with {code}: {_tail(log)}")
    except OSError as error:
        errors.append(str(error))
    finally:
        for process, _ in processes:
            _end(process)
    results = {}
    for file in sorted(directory.glob("*.json")):
        try:
            results[file.stem] = json.loads(file.read_text())
        except ValueError as error:
            errors.append(f"{file.name}: {error}")
    if not results:
        results = {"summary": [_tail(log, 1) for _, log in processes]}
    return Outcome(part.name, time.monotonic() - started, " | ".join(errors) or None, results)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and its children; SIGTERM first, so that it can end its own sessions."""
    for number, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


def _tail(log: Path, num_lines: int = _LOG_LINES) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def run_all(parts: tuple[Part, ...], out: Path, budget_s: float) -> list[Outcome]:
    """Run the parts in order while there is time; write gpu.json after each."""
    ends_s = time.monotonic() + budget_s
    outcomes: list[Outcome] = []
    for part in parts:
        left_s = ends_s - time.monotonic()
        if left_s < 5:
            outcomes.append(Outcome(part.name, 0.0, "no time was left", {}))
        else:
            print(f"{part.name} …", file=sys.stderr, flush=True)
            outcomes.append(run(part, out, min(part.limit_s, left_s)))
        write(outcomes, out)
    return outcomes


def write(outcomes: list[Outcome], out: Path) -> None:
    """Write the outcomes so far."""
    result = {"about": machine_facts(), "parts": [asdict(outcome) for outcome in outcomes]}
    (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")


def table(outcomes: list[Outcome]) -> str:
    """Return all numbers by part, then which goals were met."""
    lines = ["  ".join(f"{name} {value}" for name, value in machine_facts().items())]
    for outcome in outcomes:
        state = "ok" if outcome.error is None else f"FAILED {outcome.error}"
        lines.append(f"\n{outcome.name} ({outcome.seconds:.0f} s): {state}")
        for file, numbers in outcome.results.items():
            if file == "kernels":
                lines += _kernel_lines(numbers)
            elif isinstance(numbers, dict):
                lines += [
                    f"  {name:<32} {_text(value)}"
                    for name, value in numbers.items()
                    if name != "machine"
                ]
            else:
                lines += [f"  {line}" for line in numbers]
    found = {(o.name, file): n for o in outcomes for file, n in o.results.items()}
    theirs = found.get(("transformers 1B", "numbers"), {})
    ours = found.get(("serve 1B", "numbers"), {}).get("output_tok_s_c256")
    batching = theirs.get("continuous_batching_tok_s_c256")
    if isinstance(batching, float) and ours:
        found["ratios", "numbers"] = {"over_continuous_batching": ours / batching}
    lines.append("\ntargets")
    for target in _TARGETS:
        value = found.get((target.part, target.file), {}).get(target.number)
        sign = "≤" if target.is_upper else "≥"
        state = "not measured"
        if isinstance(value, int | float):
            is_met = value <= target.bound if target.is_upper else value >= target.bound
            state = f"{value:.3f} {'met' if is_met else 'MISSED'}"
        lines.append(f"  {target.text:<44} {sign} {target.bound:<5} {state}")
    return "\n".join(lines)


def _kernel_lines(result: dict[str, Any]) -> list[str]:
    bandwidth, flops = result["ceilings"]["bytes_per_s"], result["ceilings"]["flops"]
    device = result["device"]
    lines = [f"  {device}: {bandwidth / 1e9:,.0f} GB/s, {flops / 1e12:,.0f} TFLOP/s"]
    for row in result["rows"]:
        rate = row["error"] or f"{row['us']:10,.1f} us  {row['share']:.3f} of {row['bound']}"
        lines.append(f"  {row['kernel']:<16} {row['shape']:<44} {rate}")
    return lines


def _text(value: object) -> str:
    return f"{value:,.4f}" if isinstance(value, float) else str(value)


def _bandwidth(out: Path) -> float:
    """Return the bytes per second that the device can read; 0 if measuring fails."""
    part = Part("bandwidth", (_kernel_bench("--only", "none", "--out", "{out}/kernels.json"),), 40)
    results = run(part, out, part.limit_s).results
    ceilings = results.get("kernels", {}).get("ceilings", {})
    value: float = ceilings.get("bytes_per_s", 0.0)
    return value


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="directory")
    parser.add_argument(
        "--call", type=int, choices=(1, 2, 3), help="1: correctness; 2: speed; 3: the rest"
    )
    parser.add_argument("--budget-s", type=float, default=560.0, help="seconds for all parts")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny shapes, no GPU")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes: list[Outcome] = []
    started = time.monotonic()
    try:
        calls = smoke() if given.cpu_smoke else whole(_bandwidth(out))
        if given.call is not None:
            calls = calls[given.call - 1 : given.call]
        parts = tuple(part for call in calls for part in call if given.only in part.name)
        outcomes += run_all(parts, out, given.budget_s - (time.monotonic() - started))
    except KeyboardInterrupt:
        with contextlib.suppress(OSError, ValueError):
            saved = json.loads((out / "gpu.json").read_text())["parts"]
            outcomes = [Outcome(**part) for part in saved]
    finally:
        print(table(outcomes), flush=True)
    print(f"\n{time.monotonic() - started:.0f} s; {out / 'gpu.json'}")
    # On a GPU a failed part is a result, in the table; on a CPU it is a bug in these scripts.
    return 1 if given.cpu_smoke and any(outcome.error for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(_main())
