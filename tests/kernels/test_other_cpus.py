"""The C kernels as compiled for other CPUs pass the tests of the C kernels."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.library import native

ROOT = Path(__file__).parents[2]
CPU = "x86-64-v3"
CASES = "eight_bits or half_precision or (torch_s and 13) or low_rank"


@pytest.mark.skipif(native() is None, reason="needs native code")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86 CPU")
def test_kernels_for_avx2_alone_pass_the_tests_of_our_own():
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs AVX2")
    files = [f"tests/kernels/test_native_{module}.py" for module in ("linear", "low_rank")]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "tests.kernels.other_cpu", "-k", CASES]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "QUIRE_TEST_CPU": CPU, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
