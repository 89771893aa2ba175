"""Replaces the service's `python -m router`."""

from fake_process import run

run("router")
