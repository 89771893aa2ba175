"""The parts of each call of gpu.sh: what each runs, and for how many seconds."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

BENCH: Final = Path(__file__).parents[2]
ROOT: Final = BENCH.parent
KEPT: Final = Path(os.environ.get("QUIRE_BENCH_KEPT") or ROOT / "build" / "gpu")
"""Where a call keeps ceilings and compiled kernels for the next call on the same machine."""
CEILINGS: Final = KEPT / "ceilings.json"
MOST_S: Final = 530.0
"""The seconds of a call, so that it ends within nine minutes with the packing of its files."""

_KERNELS: Final = ("activation", "batch_invariant", "copy", "decode", "greedy", "grouped_linear",
                   "grouped_quantized_linear", "linear", "norm", "ops", "prefill", "quantized",
                   "quantized_linear", "rotary", "rotary_store", "sample", "shared_prefixes",
                   "store", "suppress")  # fmt: skip
_KERNEL_TESTS: Final = tuple(f"tests/kernels/test_{kernel}.py" for kernel in _KERNELS)
_DEVICE_TESTS: Final = (
    "tests/unit/gpu_worker/step/test_piecewise_graphs.py",
    "tests/unit/gpu_worker/memory/test_transfer.py",
    "tests/unit/gpu_worker/memory/test_elastic.py",
)
_SMOKE_S: Final = 300.0
"""The limit on parts that take seconds, on a machine that may be busy."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: tuple[str, ...]
    """`{out}` is the part's directory."""
    seconds: float
    """The part's share of the call's time. A part may also use time that earlier parts saved."""
    environment: dict[str, str] = field(default_factory=dict)


Call = tuple[Part, ...]


def ceilings(*, is_smoke: bool = False) -> Part:
    """Return the part that measures the ceilings, unless an earlier call has kept them."""
    flags = ("--cpu-smoke",) if is_smoke else ()
    kernels = ("--only", "no such case", "--ceilings", str(CEILINGS), "--out", "{out}/kernels.json")
    return Part("ceilings", _kernel_bench(*flags, *kernels), _SMOKE_S if is_smoke else 30)


def whole(bandwidth: float) -> tuple[Call, ...]:
    """Return the parts of each call on a GPU: checks of results, speed, and the rest.

    The most telling parts come first, in case a call is cut short. `bandwidth` is in bytes per
    second.
    """
    numbers = ("--json", "{out}/numbers.json")
    kernels = ("--main", "--ceilings", str(CEILINGS), "--out", "{out}/kernels.json")
    loads = ("--loads", "1,64,256", "--traces", "{out}/traces")
    theirs = ("--shape", "1B", "--concurrency", "1,64")
    return (
        (
            Part("kernel tests", _pytest("-n", "14", *_KERNEL_TESTS), 150, _ON_DEVICE),
            Part("device tests", _pytest("-m", "gpu", *_DEVICE_TESTS), 40, _ON_DEVICE),
            Part("exact", _module("gpu.exact", "--processes", "7", *numbers), 110),
            Part("engine", _module("gpu.engine", *numbers), 185),
        ),
        (
            Part("engine loads", _module("gpu.engine", *loads, *numbers), 120),
            _serve("8B", bandwidth, 200),
            Part("kernels", _kernel_bench(*kernels), 140),
        ),
        (
            Part("formats", _module("gpu.formats", *numbers), 150),
            Part("elastic", _module("gpu.elastic", *numbers), 40),
            Part("swap", _module("gpu.swap", *numbers), 50),
            Part("tuning", _tuning("--processes", "12", *_TUNED), 90),
            _serve("1B", bandwidth, 80, "--concurrency", "1,64", "--open-s", "5"),
            Part("transformers 1B", _module("gpu.transformers_load", *theirs, *numbers), 60),
        ),
    )


def smoke() -> tuple[Call, ...]:
    """Return the same calls with tiny shapes."""
    numbers = ("--device", "cpu", "--json", "{out}/numbers.json")
    tiny = ("--shape", "smoke", *numbers)
    exact = ("--rows", "2", "--tokens", "4", "--processes", "2")
    steps = ("--rows", "1,3", "--contexts", "32", "--prompts", "8,16", "--steps", "2",
             "--step-tokens", "64", "--kv-gb", "0.01")  # fmt: skip
    loads = ("--loads", "1,2", "--lens", "8,8", "--traces", "{out}/traces")
    load = ("--concurrency", "1,2", "--input-len", "8", "--output-len", "8")
    serve = (*load, "--kv-cache-memory-gb", "0.01", "--open-s", "0.2", "--bandwidth", "1e10")
    kernels = ("--cpu-smoke", "--main", "--ceilings", str(CEILINGS), "--only", "norm",
               "--out", "{out}/kernels.json")  # fmt: skip
    swap = ("--num-rows", "2", "--context", "64", "--rounds", "1", "--swapped-blocks", "2",
            "--pool-blocks", "8")  # fmt: skip
    # On a CPU continuous batching does not end.
    theirs = (*tiny, *load, "--kinds", "generate")
    return tuple(
        tuple(
            Part(name, command, _SMOKE_S, _ONE_THREAD | _interpreted(name))
            for name, command in call.items()
        )
        for call in (
            {
                "kernel tests": _pytest("-n", "1", _KERNEL_TESTS[0]),
                "device tests": _pytest(_DEVICE_TESTS[1]),
                "exact": _module("gpu.exact", *numbers, *exact),
                "engine": _module("gpu.engine", *tiny, *steps),
            },
            {
                "engine loads": _module("gpu.engine", *tiny, *steps, *loads),
                "serve smoke": _module("gpu.serve", *tiny, *serve),
                "kernels": _kernel_bench(*kernels),
            },
            {
                "formats": _module(
                    "gpu.formats",
                    *tiny,
                    "--rows",
                    "1",
                    "--steps",
                    "1",
                    "--quick",
                    "--kv-gb",
                    "0.01",
                ),
                "elastic": _module(
                    "gpu.elastic", *tiny, "--rows", "2", "--steps", "6", "--kv-gb", "0.01"
                ),
                "swap": _module("gpu.swap", *tiny, *swap),
                "tuning": _tuning("--cpu-smoke", "--processes", "1", *_TUNED),
                "transformers smoke": _module("gpu.transformers_load", *theirs),
            },
        )
    )


_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
_WITH_KERNELS: Final = ("kernel tests", "kernels", "tuning")
_ON_DEVICE: Final = {"TRITON_INTERPRET": "0"}
_TUNED: Final = ("--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--quick",
                 "--out", "{out}/tuned.json")  # fmt: skip


def _interpreted(name: str) -> dict[str, str]:
    return {"TRITON_INTERPRET": "1"} if name in _WITH_KERNELS else {}


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _tuning(*arguments: str) -> tuple[str, ...]:
    return _module("kernels.tuning", *arguments)


def _kernel_bench(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(BENCH / "gpu_kernels.py"), *arguments)


def _serve(shape: str, bandwidth: float, seconds: float, *flags: str) -> Part:
    numbers = ("--shape", shape, "--bandwidth", str(bandwidth), "--json", "{out}/numbers.json")
    return Part(f"serve {shape}", _module("gpu.serve", *numbers, *flags), seconds)


def _pytest(*arguments: str) -> tuple[str, ...]:
    flags = ("-q", "-rfE", "--tb=short", "-p", "no:randomly", "-p", "no:cacheprovider")
    return (sys.executable, "-m", "pytest", *flags, "--junitxml={out}/junit.xml", *arguments)
