"""Where Dynamo's runtime is installed."""

import os
import shutil
import subprocess

import pytest


def dynamo_python() -> str:
    """Return the Python of Dynamo's environment; skips if there is none."""
    python = shutil.which(os.environ.get("DYNAMO", "dynamo-python"))
    # The installation may have failed.
    find = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('dynamo.indexer'))"
    if python is None or subprocess.run([python, "-c", find], check=False).returncode:
        pytest.skip("Dynamo's runtime is not installed: run make dynamo-test")
    return os.path.abspath(python)  # noqa: PTH100 - the link leads out of the environment
