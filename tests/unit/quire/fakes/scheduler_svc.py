"""Replaces the service's `python -m scheduler_svc`."""

from fake_process import run

run("scheduler_svc")
