"""Determines how the user can run `quire`, for messages that suggest commands."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def invocation() -> str:
    """Return a command that runs `quire`, for example `.venv/bin/python -m quire.cli`."""
    program = sys.argv[0]
    found = shutil.which("quire")
    if found is not None and os.path.realpath(found) == os.path.realpath(program):
        return "quire"
    if Path(program).name == "quire":
        return shlex.quote(_from_here(program))
    return f"{shlex.quote(_from_here(sys.executable))} -m quire.cli"


def _from_here(program: str) -> str:
    """Return the path of a program, relative if the program is in the working directory or below.

    Links are not resolved, because a virtual environment's Python is a link to a Python that does
    not find Quire.
    """
    path, here = Path(program).absolute(), Path.cwd()
    if path.parent == here:
        return f"./{path.name}"
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
