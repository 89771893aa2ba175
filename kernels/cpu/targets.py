"""The CPUs for which the C kernels are compiled: this CPU, and kinds of CPU with a shipped library.

A *shipped* library comes with the package, already compiled (`kernels.cpu.build.SHIPPED`). Of the
shipped libraries that a CPU can run, the one that uses the most instruction sets is chosen. It was
never measured whether this library is the fastest of them.
"""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CPU_INFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of CPU, described by the compiler's flags for it."""

    name: str
    flags: tuple[str, ...]
    machine: str = ""
    """The architecture, as `platform.machine` names it; empty for `THIS_CPU`."""
    needs: frozenset[str] = frozenset()
    """The instruction sets that the target's code may use, as /proc/cpuinfo names them."""


THIS_CPU: Final = Target("native", ("-march=native",))


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


_V3: Final = _named(
    "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
)
_V4: Final = _V3 | _named("avx512f avx512bw avx512cd avx512dq avx512vl")
_V4_BF16: Final = _V4 | {"avx512_bf16"}
_AMX: Final = _V4_BF16 | {"amx_tile", "amx_bf16"}
_BF16_FLAGS: Final = ("-march=x86-64-v4", "-mavx512bf16")

SHIPPED_TARGETS: Final = (
    Target("x86-64-v4-bf16-amx", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"), "x86_64", _AMX),
    Target("x86-64-v4-bf16", _BF16_FLAGS, "x86_64", _V4_BF16),
    Target("x86-64-v4", ("-march=x86-64-v4",), "x86_64", _V4),
    Target("x86-64-v3", ("-march=x86-64-v3",), "x86_64", _V3),
    Target(
        "armv8.2-a-bf16",
        ("-march=armv8.2-a+bf16",),
        "aarch64",
        _named("asimd asimdrdm atomics bf16 crc32 dcpop"),
    ),
    Target("armv8-a", ("-march=armv8-a",), "aarch64", _named("asimd fp")),
)
"""The kinds of CPU with a shipped library. A target comes before the targets of the same
architecture that need only some of its instruction sets."""


def cpu_features() -> frozenset[str]:
    """Return this CPU's instruction sets, as far as the system reports them."""
    if not _CPU_INFO.is_file():
        return frozenset()
    lines = _CPU_INFO.read_text().splitlines()
    named = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(named, "").split())


def targets_of(machine: str) -> tuple[Target, ...]:
    """Return the shipped targets of an architecture."""
    return tuple(target for target in SHIPPED_TARGETS if target.machine == machine)


def can_run(target: Target, machine: str, features: frozenset[str]) -> bool:
    """Return whether a CPU with these instruction sets can run a shipped target's code."""
    return target.machine == machine and target.needs <= features


def runnable_targets() -> tuple[Target, ...]:
    """Return the shipped targets whose code this CPU can run, the most specific one first."""
    machine, features = platform.machine(), cpu_features()
    return tuple(target for target in SHIPPED_TARGETS if can_run(target, machine, features))
