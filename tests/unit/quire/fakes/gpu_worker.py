"""Replaces the service's `python -m gpu_worker`."""

from fake_process import run

run("gpu_worker")
