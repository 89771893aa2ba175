"""Nothing compiles while serving: the warm-up launches every variant that a step may need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models_fixture import make_model

ROOT = Path(__file__).parents[2]


# mistral has a sliding window
@pytest.mark.parametrize(
    ("family", "steps", "quantization"),
    [
        ("llama", "eager", "none"),
        ("mistral", "graphs", "none"),
        ("qwen3", "eager", "int4"),
        ("mixtral", "eager", "none"),
    ],
)
def test_random_steps_need_no_kernel_that_the_warm_up_did_not_launch(
    family: str, steps: str, quantization: str, tmp_path: Path
):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    model = make_model(tmp_path / "model", family, intermediate_size=128)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_keys", str(model), "1", steps, quantization],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["new"] == []
    assert found["num_known"] >= 10
    assert ("_quantized_linear_kernel" in found["kernels"]) == (quantization != "none")
    assert "_reduce_splits_kernel" in found["kernels"]
    if family == "llama":  # the others' windows may be too short for splits
        assert "_merge_chunks_kernel" in found["kernels"]
    assert ("_grouped_linear_kernel" in found["kernels"]) == (family == "mixtral")
    assert all(found["seen"].values()), found["seen"]
