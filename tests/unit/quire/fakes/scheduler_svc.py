"""Is found as `python -m scheduler_svc` in place of the service."""

from fake_process import run

run("scheduler_svc")
