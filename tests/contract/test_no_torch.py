import subprocess
import sys

import pytest

FORBIDDEN = ("torch", "transformers", "triton")


@pytest.mark.parametrize(
    "module", ["router.app", "scheduler_svc.app", "quire", "quire.llm", "rpc.server"]
)
def test_it_imports_without_torch(module):
    # A new interpreter, because another test may have imported torch in this one.
    program = f"import sys, {module}; print([m for m in {FORBIDDEN} if m in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"
