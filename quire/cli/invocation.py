"""Determines the command that starts this program, for messages that suggest commands."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def invocation() -> str:
    """Return the command that runs `quire`: the word `quire` if it is on PATH, else a path."""
    program = sys.argv[0]
    found = shutil.which("quire")
    if found is not None and os.path.realpath(found) == os.path.realpath(program):
        return "quire"
    if Path(program).name == "quire":
        return shlex.quote(_from_here(program))
    return f"{shlex.quote(_from_here(sys.executable))} -m quire.cli"


def _from_here(program: str) -> str:
    """Return a path, short if possible; keep links, because virtual environments need them."""
    path, here = Path(program).absolute(), Path.cwd()
    if path.parent == here:
        return f"./{path.name}"
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
