"""A model that config.json rules out is refused before torch is imported."""

import json
import subprocess
import sys

import pytest

from quire.cli.up.layout import SHIPPED_MODEL

WORKER = """
import sys
from gpu_worker.__main__ import main
try:
    main()
finally:
    sys.stderr.write(f"torch imported: {'torch' in sys.modules}\\n")
"""


@pytest.mark.parametrize(
    ("changes", "flags", "problem"),
    [
        ({"num_hidden_layers": "six"}, [], "num_hidden_layers is 'six'"),
        ({"architectures": None}, [], "architectures must be a list of one name"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            [],
            "quant_method is 'hqq'; supported: aw",
        ),
        (
            {
                "architectures": ["GPTNeoXForCausalLM"],
                "num_key_value_heads": None,
                "rotary_pct": 0.01,
            },
            [],
            "rotary_pct is 0.01; it must rotate",
        ),
        ({}, ["--max-model-len", "999999"], "max-model-len is 999999; model takes at most"),
    ],
    ids=str,
)
def test_refusal_does_not_wait_for_torch(tmp_path, changes, flags, problem):
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((SHIPPED_MODEL / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    ports = ("--http-port", "0", "--grpc-port", "0")
    done = subprocess.run(
        [sys.executable, "-c", WORKER, "--model", str(model), *ports, *flags],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert problem in done.stderr
    assert "torch imported: False" in done.stderr
