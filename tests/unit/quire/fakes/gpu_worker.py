"""Is found as `python -m gpu_worker` in place of the service."""

from fake_process import run

run("gpu_worker")
