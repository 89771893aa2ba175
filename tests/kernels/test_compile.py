import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}  # of one block, by capability

KERNELS = {
    "_store_kv_kernel",
    "_rotary_store_kernel",
    "_attend_splits_kernel",
    "_reduce_splits_kernel",
    "_attend_chunks_kernel",
    "_merge_chunks_kernel",
    "_copy_blocks_kernel",
    "_rms_norm_kernel",
    "_add_rms_norm_kernel",
    "_rotary_kernel",
    "_silu_mul_kernel",
    "_suppress_kernel",
    "_quantized_linear_kernel",
    "_sum_splits_kernel",
    "_grouped_linear_kernel",
    "_tile_maxima_kernel",
    "_row_maxima_kernel",
    "_scale_kernel",
    "_sample_kernel",
}
FP8 = "float8_e4m3fn"
SPILLED_BYTES = {80: 32, 86: 32, 90: 4}
"""What a thread may spill. On sm_80, 24 to 32 bytes are what attention spills with 255 registers.
On sm_90, 4 bytes are of attention to latents in prompts, compiled by Triton 3.6, and of decodes
that share a prefix."""
OTHER_TRITON = ROOT / "build" / "triton-3.6"
"""The Triton that torch 2.11 brings along, as `make triton-3.6` installs it."""


SM = {80: (65536, 164, 2048), 86: (65536, 100, 1536), 90: (65536, 228, 2048)}
"""What a processor has, by capability: registers, KiB of shared memory, threads."""


def print_table(case, launches):
    """Print what each variant uses, and how many of its programs run on a processor at a time."""
    registers, shared_kib, threads = SM[case[0]]
    print(f"\n{case}, Triton {launches[0]['triton']}")  # noqa: T201
    for launch in launches:
        size = 32 * launch["warps"]
        shared = launch["shared_bytes"] + 1024  # which the system takes of each program
        of_a_program = -(-launch["registers"] // 8) * 8 * size
        programs = min(registers // of_a_program, shared_kib * 1024 // shared, threads // size, 32)
        print(  # noqa: T201
            f"  {launch['kernel']:26} {launch['registers']:4} registers"
            f" {launch['spilled_bytes']:5} B spilled {launch['shared_bytes'] / 1024:6.1f} KiB"
            f" shared {launch['warps']:3} warps {programs:3} at a time"
            f" {programs * size / threads:4.0%} {'wgmma' if launch['has_wgmma'] else ''}"
        )


def slow(*case):
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "case",  # capability, dtype, query heads, kv heads, head dim, block size, kinds of attention
    [
        (90, "bfloat16", 32, 8, 128, 16, "plain", "shared", "wide", FP8, "latent"),
        (80, "bfloat16", 32, 8, 128, 64, "plain", "shared", "wide", "latent"),
        slow(80, "bfloat16", 32, 8, 128, 16, "options", "int8", FP8),
        slow(90, "bfloat16", 32, 8, 128, 128, "options", "int8", FP8),
        slow(90, "bfloat16", 12, 4, 80, 32, "plain", "int8"),
        slow(80, "float16", 12, 4, 96, 16, "plain", "options"),
        slow(90, "float32", 12, 4, 64, 16, "plain", "options", FP8),
        slow(90, "bfloat16", 16, 8, 256, 64, "plain", FP8),
        slow(90, "bfloat16", 16, 8, 512, 64, "plain", "options", "int8", FP8),
        slow(80, "float16", 16, 8, 512, 16, "plain", "options", "int8"),
        slow(80, "float16", 128, 8, 64, 16, "plain", "latent", "latent int8"),
        # The most shared memory, on the devices with the least.
        slow(86, "float16", 12, 4, 256, 16, "plain", "options", "int8", FP8),
        slow(86, "float32", 12, 4, 256, 16, "plain"),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_other_triton", [False, True], ids=["installed", "3.6"])
def test_every_kernel_compiles_to_machine_code(case, has_other_triton, capsys):
    if has_other_triton and not OTHER_TRITON.exists():
        pytest.skip("needs `make triton-3.6`")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(ROOT / "build" / "triton-cache")  # of what has not changed
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
    assert kernels - {"_store_quantized_kernel"} == KERNELS - (
        set() if "plain" in case or "options" in case else {"_store_kv_kernel"}
    )
    is_quantized = any(str(kind).endswith(("int8", FP8)) for kind in case)
    assert ("_store_quantized_kernel" in kernels) == is_quantized
    with capsys.disabled():
        print_table(case, launches)
    for launch in launches:
        assert launch["cubin_bytes"] > 0, launch
        assert launch["shared_bytes"] <= SHARED_BYTES[case[0]], launch
        assert launch["spilled_bytes"] <= SPILLED_BYTES[case[0]], launch
        if case[:2] == (90, "bfloat16") and launch["kernel"] == "_attend_chunks_kernel":
            assert launch["has_wgmma"], launch
        assert launch["triton"].startswith("3.6") == has_other_triton, launch
