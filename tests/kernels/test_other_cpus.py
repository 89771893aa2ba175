"""The C kernels as compiled for other CPUs pass the tests of the C kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.library import native
from kernels.cpu.targets import runnable_targets

ROOT = Path(__file__).parents[2]
OPS = tuple(
    f"tests/kernels/test_native_{name}.py"
    for name in ("rows", "linear", "attention", "store", "draw", "scan")
)
PROGRAMS = (
    "tests/kernels/test_native_heads.py",
    "tests/kernels/test_native_low_rank.py",
    "tests/unit/gpu_worker/models/test_native_layers.py",
)
CASES = (
    "native_rows and not past_int32",
    "eight_bits or half_precision or (torch_s and 13-)",
    "multiply_as and 256-70",
    "no_other_row and 2-",
    "(decode_is or prefill_is) and (6-2 or 16-1 or 3-1 or 8-2)",
    "options_are and (0 or 3)",
    "its_own_sequence and None-2",
    "any_size and 9-3-96 and plain-480",
    "part_of_the_keys and 4-96",
    "its_numbers_times and 8-2",
    "few_heads and (9 or 2)",
    "bits_and_nothing and (shape1 or shape2)",
    "of_any_bits or not_finite",
    "native_draw and not lie_far and not 300000",
    "outputs_and_states and (float32 or not large)",
    "own_map and 130",
    "several_adapters and 13- or silu_mul_makes",
    "gives_the_bits_of_the_ops and (overrides1 or overrides4 or in_turn)",
)
ARM_CASES = (
    "native_rows and not past_int32",
    "half_precision or (torch_s and 13- and 64-70) or (odd_number and 12-)",
    "multiply_as and 256-70 and True",
    "(decode_is or prefill_is) and (6-2 or 3-1)",
    "its_numbers_times and 6-2 and (int8 or float32)",
    "bits_and_nothing and shape1",
    "draws_are and not 300000",
    "outputs_and_states and not large",
)
ARM = ("aarch64-linux-gnu-gcc", "qemu-aarch64")


def run(plugin, name, files, cases):
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", f"tests.kernels.{plugin}"]
    expression = " or ".join(f"({case})" for case in cases)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", expression, *files],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "QUIRE_TEST_CPU": name, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert " skipped" not in result.stdout


@pytest.mark.skipif(native() is None, reason="needs native code")
@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_kernels_for_less_of_x86_pass_the_tests_of_our_own(name):
    if name not in [target.name for target in runnable_targets()]:
        pytest.skip(f"needs a CPU that runs {name}")
    run("other_cpu", name, OPS + PROGRAMS, CASES)


@pytest.mark.skipif(not all(map(shutil.which, ARM)), reason=f"needs {' and '.join(ARM)}")
@pytest.mark.parametrize("name", ["armv8-a", "armv8.2-a-bf16"])
def test_kernels_for_arm_pass_the_tests_of_our_own_in_an_emulator(name):
    run("on_arm", name, OPS, ARM_CASES)
