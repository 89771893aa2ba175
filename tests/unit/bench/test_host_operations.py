"""The host does few operations for a step on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

MOST = {
    "decode": 38,
    "decode_long": 38,
    "ranks_decode": 45,
    "mixed_128": 320,
    "mixed_512": 320,
    "prefill_512": 210,
}
"""Host operations of a step of 32 layers. Without piecewise graphs, a mixed step had 2,658."""


def test_the_host_does_little_for_a_step(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    command = [sys.executable, "bench/host_operations.py", "--json", tmp_path / "counts.json"]
    subprocess.run(command, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    counts = json.loads((tmp_path / "counts.json").read_text())
    for kind, most in MOST.items():
        assert 0 < counts[f"{kind}_host_operations"] <= most, kind
    assert counts["decode_long_upload_bytes"] == counts["decode_upload_bytes"]
    mixed, eager = (counts[f"mixed_512{kind}_host_operations"] for kind in ("", "_eager"))
    assert mixed * 3 <= eager
    assert counts["mixed_544_host_operations"] == counts["mixed_544_eager_host_operations"]
