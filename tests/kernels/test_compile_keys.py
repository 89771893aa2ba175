"""Nothing compiles while serving: the warm-up launches every variant that a step may need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.quantize import FORMS, write
from tests.lora_fixture import make_adapter
from tests.models_fixture import make_model
from tests.mxfp4_fixture import write_mxfp4

ROOT = Path(__file__).parents[2]


# mistral has a sliding window, deepseek_v3 latents
@pytest.mark.parametrize(
    ("family", "has"),
    [
        ("llama", ()),
        ("mistral", ("graphs",)),
        ("qwen3", ("weights=int4",)),
        ("mixtral", ("kv=fp8",)),
        ("mixtral", ("graphs", "weights=stored")),
        ("qwen2_moe", ("graphs",)),
        ("glm4", ("graphs",)),
        ("olmo2", ("kv=int8",)),
        ("gpt_oss", ("graphs", "weights=mxfp4")),
        ("deepseek_v3", ("graphs", "weights=int8")),
        ("deepseek_v3", ("graphs", "kv=int8")),
        ("llama", ("graphs", "adapter=a", "ranks")),
        ("llama", ("late=a", "ngram", "kv=int8")),
        ("llama", ("graphs", "shared", "weights=stored")),
        ("qwen2", ("graphs", "kv=fp8", "draft=draft")),
    ],
    ids=str,
)
def test_random_steps_need_no_kernel_that_the_warm_up_did_not_launch(
    family: str, has: tuple[str, ...], tmp_path: Path
):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    model = make_model(tmp_path / "model", family, intermediate_size=128)
    if "draft=draft" in has:
        make_model(tmp_path / "draft", "llama", num_attention_heads=2, num_hidden_layers=1)
    if "adapter=a" in has or "late=a" in has:
        make_adapter(tmp_path / "a", model, seed=1)
    if "weights=stored" in has:
        model = write(model, tmp_path / "packed", FORMS["fp8"])
    if "weights=mxfp4" in has:
        model, _ = write_mxfp4(model, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_keys", str(model), "1", *has],
        env=env | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["new"] == []
    assert found["num_known"] >= 10
    is_quantized = any("weights" in x for x in has)
    assert ("_quantized_linear_kernel" in found["kernels"]) == is_quantized
    assert "_reduce_splits_kernel" in found["kernels"]
    assert "_suppress_kernel" in found["kernels"]
    if family == "llama":  # the others' windows may be too short for splits
        assert "_merge_chunks_kernel" in found["kernels"]
    has_experts = family in {"mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3"}
    assert ("_grouped_quantized_linear_kernel" in found["kernels"]) == (
        has_experts and is_quantized
    )
    has_groups = (family in {"mixtral", "qwen2_moe"} and not is_quantized) or "adapter=a" in has
    assert ("_grouped_linear_kernel" in found["kernels"]) == has_groups
    assert all(found["seen"].values()), found["seen"]
