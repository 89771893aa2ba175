"""Is found as `python -m router` in place of the service."""

from fake_process import run

run("router")
