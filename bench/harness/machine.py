"""Describes the machine of a measurement: CPU, instruction sets, versions, commit."""

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "vllm")
_INSTRUCTION_SETS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("neon", "asimddp", "sve", "sve2", "bf16", "i8mm"),  # Arm's
)
"""Instruction sets that the kernels use, or that determine the speed of matrix products."""


def machine_facts(cpu: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Describe the machine, the versions in use and the state of the checkout.

    Args:
        cpu: The fields of a processor in /proc/cpuinfo; by default the first of this machine.
    """
    cpu = _cpuinfo() if cpu is None else cpu
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model": _family_and_model(cpu),
        "instruction_sets": _instruction_sets(cpu),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "system": platform.system(),
        **_versions(),
        "commit": _commit(),
    }


def headline(facts: Mapping[str, Any]) -> str:
    """Return, in one line, the facts that every table of measurements needs."""
    return (
        f"{facts['cpu']} ({facts['cpu_family_model']}), {facts['cores']} cores,"
        f" {facts['instruction_sets'] or 'no known instruction sets'}; {facts['date']}"
    )


def _family_and_model(cpu: Mapping[str, str]) -> str:
    """Return the numbers that tell CPUs of one name apart; Arm calls them implementer and part."""
    return "/".join(
        cpu.get(name, cpu.get(arm, "?"))
        for name, arm in (("cpu family", "CPU implementer"), ("model", "CPU part"))
    )


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; empty if there is none."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
        lines = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in lines}
    return {}


def _instruction_sets(cpu: Mapping[str, str]) -> str:
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    if "asimd" in flags:  # the kernel's name for NEON on 64-bit Arm
        flags.add("neon")
    return " ".join(name for name in _INSTRUCTION_SETS if name in flags)


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _commit() -> str | None:
    """Return the commit that is checked out, with "-dirty" if files differ; None if git fails."""
    git = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()
    return None
