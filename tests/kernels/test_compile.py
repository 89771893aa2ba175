import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES = {86: 99 * 1024, 90: 227 * 1024}  # of one block, by capability

KERNELS = {
    "_store_kv_kernel",
    "_store_quantized_kernel",
    "_attend_splits_kernel",
    "_reduce_splits_kernel",
    "_attend_chunks_kernel",
    "_copy_rows_kernel",
    "_rms_norm_kernel",
    "_add_rms_norm_kernel",
    "_rotary_kernel",
    "_silu_mul_kernel",
}


def compiled_launches(tmp_path, capability, dtype, num_heads, num_kv_heads, head_dim):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)  # compile, do not remember
    shape = map(str, (capability, dtype, num_heads, num_kv_heads, head_dim))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", *shape],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("capability", "dtype", "num_heads", "num_kv_heads", "head_dim"),
    [
        (90, "bfloat16", 32, 8, 128),
        pytest.param(90, "float32", 12, 4, 64, marks=pytest.mark.slow),
        # The most shared memory, on the devices with the least.
        pytest.param(86, "float16", 12, 4, 256, marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles_to_machine_code(
    tmp_path, capability, dtype, num_heads, num_kv_heads, head_dim
):
    launches = compiled_launches(tmp_path, capability, dtype, num_heads, num_kv_heads, head_dim)
    assert {launch["kernel"] for launch in launches} == KERNELS
    for launch in launches:
        assert launch["cubin_bytes"] > 0, launch
        assert launch["shared_bytes"] <= SHARED_BYTES[capability], launch
