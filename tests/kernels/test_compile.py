import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}  # of one block, by capability

ATTENTION = {
    "_rotary_store_kernel",
    "_attend_splits_kernel",
    "_reduce_splits_kernel",
    "_attend_chunks_kernel",
    "_merge_chunks_kernel",
}
OTHERS = {
    "_copy_blocks_kernel",
    "_rms_norm_kernel",
    "_add_rms_norm_kernel",
    "_rotary_kernel",
    "_silu_mul_kernel",
    "_clamped_swiglu_kernel",
    "_tanh_gelu_mul_kernel",
    "_suppress_kernel",
    "_linear_kernel",
    "_quantized_linear_kernel",
    "_sum_splits_kernel",
    "_grouped_linear_kernel",
    "_grouped_quantized_linear_kernel",
    "_tile_maxima_kernel",
    "_row_maxima_kernel",
    "_count_kernel",
    "_choose_kernel",
    "_gather_kernel",
    "_sample_kernel",
}
PRODUCTS = {
    "_quantized_linear_kernel",
    "_grouped_linear_kernel",
    "_grouped_quantized_linear_kernel",
}
"""Their tiles of 16 rows, which have 4 warps, are too small for wgmma."""
FP8 = "float8_e4m3fn"
MAX_STACK_BYTES = 64
"""Of a thread. Some chunks of attention need 56 beside their 255 registers: over quantized caches,
over latents, and with heads of 512 dims."""
MORE_STACK_BYTES = {(80, "float16", 12, 4, 96): 80}
"""By the first of a case. Heads of 96 dims have the tile of 128, and masks beside."""
OTHER_TRITON = ROOT / "build" / "triton-3.6"
"""The Triton that torch 2.11 brings along, as `make triton-3.6` installs it."""


SM = {80: (65536, 164, 2048), 86: (65536, 100, 1536), 90: (65536, 228, 2048)}
"""What a processor has, by capability: registers, KiB of shared memory, threads."""


def print_table(case, launches):
    """Print what each variant uses, and how many of its programs run on a processor at a time.

    To standard error, because the processes of pytest-xdist have no other output.
    """
    registers, shared_kib, threads = SM[case[0]]
    sys.stderr.write(f"\n{case}, Triton {launches[0]['triton']}\n")
    for launch in launches:
        size = 32 * launch["warps"]
        shared = launch["shared_bytes"] + 1024  # the system uses it for each program
        of_a_program = -(-launch["registers"] // 8) * 8 * size
        programs = min(registers // of_a_program, shared_kib * 1024 // shared, threads // size, 32)
        sys.stderr.write(
            f"  {launch['kernel']:26} {launch['registers']:4} registers"
            f" {launch['stack_bytes']:5} B of stack {launch['shared_bytes'] / 1024:6.1f} KiB"
            f" shared {launch['warps']:3} warps {programs:3} at a time"
            f" {programs * size / threads:4.0%} {'wgmma' if launch['has_wgmma'] else ''}\n"
        )


def slow(*case):
    return pytest.param(case, marks=pytest.mark.slow)


def shapes(capability, *first):
    """The shapes of most models, over KV of 16 and 8 bits; `first` are more kinds for the first."""
    common = capability, "bfloat16"
    yield *common, 32, 8, 128, 16, "plain", "int8", *first
    yield *common, 32, 8, 64, 16, "plain", "int8"
    yield *common, 16, 8, 128, 16, "plain", "int8"


@pytest.mark.parametrize(
    "case",  # capability, dtype, query heads, kv heads, head dim, block size, kinds of attention
    [
        *shapes(90, FP8, "shared", "wide", "latent", "others"),
        *shapes(80, "latent"),
        slow(80, "bfloat16", 32, 8, 128, 16, "options", FP8, "shared", "wide", "others"),
        slow(80, "bfloat16", 32, 8, 128, 64, "plain"),
        slow(90, "bfloat16", 32, 8, 128, 128, "options", "int8", FP8),
        slow(90, "bfloat16", 12, 4, 80, 32, "plain", "int8", "others"),
        slow(80, "float16", 12, 4, 96, 16, "plain", "options", "others"),
        slow(90, "float32", 12, 4, 64, 16, "plain", "options", FP8, "others"),
        slow(90, "bfloat16", 16, 8, 256, 64, "plain", FP8),
        slow(90, "bfloat16", 16, 8, 512, 64, "plain", "options", "int8", FP8),
        slow(80, "float16", 16, 8, 512, 16, "plain", "options", "int8"),
        slow(80, "float16", 128, 8, 64, 16, "plain", "latent", "latent int8"),
        # The limit of the device with the least shared memory.
        slow(86, "float16", 12, 4, 256, 16, "plain", "options", "int8", FP8, "others"),
        slow(86, "float32", 12, 4, 256, 16, "plain", "others"),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_other_triton", [False, True], ids=["installed", "3.6"])
def test_kernels_compile_to_machine_code(case, has_other_triton, capsys):
    if has_other_triton and not OTHER_TRITON.exists():
        pytest.skip("needs `make triton-3.6`")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # kept between runs for kernels that have not changed
    env["TRITON_CACHE_DIR"] = str(ROOT / "build" / "triton-cache")
    if has_other_triton:
        paths = [str(OTHER_TRITON), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", *map(str, case)],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {launch["kernel"] for launch in launches}
    is_quantized = any(str(kind).endswith(("int8", FP8)) for kind in case)
    is_stored = not {"plain", "options"}.isdisjoint(case)
    assert kernels == (
        ATTENTION
        | ({"_store_kv_kernel"} if is_stored else set())
        | ({"_store_quantized_kernel"} if is_quantized else set())
        | (OTHERS if "others" in case else set())
    )
    with capsys.disabled():
        print_table(case, launches)
    most_stack_bytes = MORE_STACK_BYTES.get(case[:5], MAX_STACK_BYTES)
    for launch in launches:
        assert launch["cubin_bytes"] > 0, launch
        assert launch["shared_bytes"] <= SHARED_BYTES[case[0]], launch
        assert launch["stack_bytes"] <= most_stack_bytes, launch
        is_wide = launch["kernel"] in PRODUCTS and launch["warps"] == 8
        if case[:2] == (90, "bfloat16") and (
            is_wide or launch["kernel"] == "_attend_chunks_kernel"
        ):
            assert launch["has_wgmma"], launch
        assert launch["triton"].startswith("3.6") == has_other_triton, launch
