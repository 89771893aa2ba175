"""Intel's AMX: its emulation against the manual, and our C compiled for the instructions."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernels.cpu import build
from kernels.cpu.library import native
from kernels.cpu.targets import THIS_CPU

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = ("ldtilecfg", "tileloadd", "tilezero", "tdpbf16ps", "tilestored", "tilerelease")
FOR_AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
STRICT = ("-Wall", "-Wextra", "-Werror")
FILES = (
    *(f"tests/kernels/test_native_{n}.py" for n in ("linear", "heads", "low_rank", "attention")),
    "tests/kernels/test_amx_choice.py",
    "tests/unit/gpu_worker/models/test_native_layers.py",
)
CASES = (
    "no_other_row and 2-dtype0",
    "need_no_offsets and dtype0",
    "torch_s and dtype0 and True and (1- or 13- or 193-)",
    "stand_for and dtype0 and True and (128-1 or 384)",
    "multiple_of_eight and dtype0",
    "as_float32",
    "own_map and bfloat16",
    "silu_mul_makes",
    "several_adapters and 13-64",
    "this_library or uses_are_timed or formats_that_are_named or if_it_is_named or without_amx",
    "any_size and bfloat16",
    "twin_s and torch and bfloat16 and (128-16 or decode or options)",
    "its_own_sequence and None-3 and bfloat16",
    "part_of_the_keys and bfloat16 and (576 or 4-96)",
    "few_heads and bfloat16 and (9 or 2)",
    "gives_the_bits_of_the_ops and (overrides1 or overrides4 or in_turn)",
)
"""Bfloat16 (in some files dtype0), because AMX does not compute float32."""

needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None or platform.machine() != "x86_64", reason="needs gcc for x86"
)

DRIVER = """
#include AMX_EMULATION

/* c += a b, of one set of rows, pairs (or fours) and columns. */
void multiply(int is_bf16, int rows, int steps, int columns, void *c, const void *a, const void *b)
{
    uint8_t shape[64] = {1};
    const int heights[3] = {rows, rows, steps};
    const int row_bytes[3] = {4 * columns, 4 * steps, 4 * columns};
    for (int i = 0; i < 3; i++) shape[16 + 2 * i] = row_bytes[i], shape[48 + i] = heights[i];
    _tile_loadconfig(shape);
    _tile_loadd(0, c, 4 * columns);
    _tile_stream_loadd(1, a, 4 * steps);
    _tile_loadd(2, b, 4 * columns);
    if (is_bf16) _tile_dpbf16ps(0, 1, 2);
    else _tile_dpbssd(0, 1, 2);
    _tile_stored(0, c, 4 * columns);
    _tile_release();
}

void multiply_unconfigured(void) { _tile_release(); _tile_dpbf16ps(0, 1, 2); }
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    directory = tmp_path_factory.mktemp("amx")
    source, made = directory / "driver.c", directory / "driver.so"
    source.write_text(DRIVER)
    header = f'-DAMX_EMULATION="{Path(__file__).parent / "amx_emulated.h"}"'
    flags = ["-O2", "-std=gnu11", "-fPIC", "-shared", *STRICT, header, "-lm"]
    subprocess.run(["gcc", str(source), *flags, "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


def bf16(numbers):
    """Their upper halves: uint16."""
    return (np.asarray(numbers, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def pairs_of(numbers):
    """b[k][n] as the instruction reads it: [k / 2][n][2]."""
    num_in, columns = numbers.shape
    return np.ascontiguousarray(numbers.reshape(num_in // 2, 2, columns).transpose(0, 2, 1))


def multiply_bf16(emulated, a, b, c):
    out = np.array(c, dtype=np.float32)
    a, b = np.ascontiguousarray(bf16(a)), pairs_of(bf16(b))
    shape = len(a), len(b), b.shape[1]
    emulated.multiply(1, *shape, *(x.ctypes.data_as(ctypes.c_void_p) for x in (out, a, b)))
    return out


@needs_gcc
def test_even_and_odd_products_are_summed_apart_and_rounded_each_time(emulated):
    rng = np.random.default_rng(0)
    a = (rng.standard_normal((5, 12)) * 2.0 ** rng.integers(0, 9, (5, 12))).astype(np.float32)
    b = rng.standard_normal((12, 7)).astype(np.float32)
    a, b = (((x.view(np.uint32) >> 16) << 16).view(np.float32) for x in (a, b))
    c = rng.standard_normal((5, 7)).astype(np.float32)
    sums = np.zeros((2, 5, 7), dtype=np.float32)
    for k in range(12):  # float64 holds each product and sum before it is rounded
        exact = a[:, k, None].astype(np.float64) * b[k] + sums[k % 2]
        sums[k % 2] = exact.astype(np.float32)
    assert np.array_equal(multiply_bf16(emulated, a, b, c), c + (sums[0] + sums[1]))


@needs_gcc
def test_denormals_are_zeros_whether_given_or_made(emulated):
    tiny, denormal = 2.0**-126, 2.0**-130
    one = np.ones((1, 2))
    given = multiply_bf16(emulated, [[denormal, 0]], one.T, [[0.0]])
    made = multiply_bf16(emulated, [[tiny, 0]], 0.5 * one.T, [[0.0]])
    summed = multiply_bf16(emulated, [[0, 0]], one.T, [[denormal]])
    kept = multiply_bf16(emulated, [[tiny, 0]], one.T, [[0.0]])
    assert [given, made, summed, kept] == [0, 0, 0, tiny]


@needs_gcc
def test_bytes_have_signs_and_sums_wrap_around(emulated):
    rng = np.random.default_rng(0)
    a = rng.integers(-128, 128, (16, 64)).astype(np.int8)
    b = rng.integers(-128, 128, (64, 16)).astype(np.int8)
    fours = np.ascontiguousarray(b.reshape(16, 4, 16).transpose(0, 2, 1))
    out = np.full((16, 16), 2**31 - 1, dtype=np.int32)
    expected = (out.astype(np.int64) + a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
    emulated.multiply(0, 16, 16, 16, *(x.ctypes.data_as(ctypes.c_void_p) for x in (out, a, fours)))
    assert np.array_equal(out, expected)


@needs_gcc
@pytest.mark.parametrize(
    "call",
    ["multiply_unconfigured()", "multiply(1, 17, 1, 1, 0, 0, 0)", "multiply(1, 1, 1, 0, 0, 0, 0)"],
)
def test_what_a_cpu_refuses_ends_the_process(emulated, call):
    program = f"import ctypes; ctypes.CDLL({emulated._name!r}).{call}"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode < 0
    assert b"emulated AMX" in done.stderr


@pytest.mark.skipif(native() is None, reason="needs native code")
@needs_gcc
def test_kernels_with_emulated_amx_pass_the_tests_of_our_own():
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "tests.kernels.other_cpu"]
    cases = " or ".join(f"({case})" for case in CASES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", cases, *FILES],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "QUIRE_TEST_CPU": "amx", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@needs_gcc
@pytest.mark.parametrize("name", ["linear", "attention"])
def test_the_sources_become_instructions_of_amx(tmp_path, name):
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    made = tmp_path / f"{name}.o"
    flags = ["-O1", *build.flags_for(THIS_CPU)[1:]]  # compiles faster
    source = build.SOURCES / f"{name}.c"
    subprocess.run(
        ["gcc", *flags, *FOR_AMX, *STRICT, "-c", str(source), "-o", str(made)], check=True
    )
    code = subprocess.run(["objdump", "-d", str(made)], check=True, capture_output=True, text=True)
    assert [
        each for each in INSTRUCTIONS if f"\t{each} " not in code.stdout.replace("\n", " \n")
    ] == []


@needs_gcc
def test_amx_is_there_only_where_the_system_gives_it(tmp_path):
    made = tmp_path / "amx.so"
    source = build.SOURCES / "amx.c"
    subprocess.run(
        ["gcc", *build.flags_for(THIS_CPU), *FOR_AMX, "-shared", str(source), "-o", str(made)],
        check=True,
    )
    use_amx = ctypes.CDLL(str(made)).quire_use_amx
    use_amx.argtypes, use_amx.restype = (ctypes.c_int64,), ctypes.c_bool
    has_amx = " amx_tile " in Path("/proc/cpuinfo").read_text()
    assert use_amx(1) == has_amx
    assert not use_amx(0)
