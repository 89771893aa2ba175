"""Runs `docker`. Run as a program, it checks for an engine, and prints what is missing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

_ANSWER_S = 30


def why_no_compose() -> str | None:
    """Why `docker compose` cannot run here; None if it can."""
    if shutil.which("docker") is None:
        return "there is no `docker` command on this machine"
    if _fails("compose", "version"):
        return "`docker compose` is not installed on this machine"
    return None


def why_no_engine() -> str | None:
    """Why images cannot be built and run here; None if they can."""
    if (reason := why_no_compose()) is not None:
        return reason
    if _fails("info"):
        host = os.environ.get("DOCKER_HOST", "its default address")
        return f"no Docker engine answers at {host}"
    if _fails("buildx", "version"):
        return "`docker buildx`, which builds the images, is not installed on this machine"
    return None


def docker(*arguments: str, env: Mapping[str, str] | None = None, within_s: float = 300) -> str:
    """Runs `docker` with `env` added, and returns its output; an error contains the output."""
    done = subprocess.run(
        ["docker", *arguments],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, f"docker {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout


def _fails(*arguments: str) -> bool:
    try:
        docker(*arguments, within_s=_ANSWER_S)
    except (AssertionError, subprocess.TimeoutExpired):
        return True
    return False


if __name__ == "__main__":
    reason = why_no_engine()
    sys.exit(f"compose-test needs a Docker engine: {reason}" if reason else 0)
