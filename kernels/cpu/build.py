"""Compiles the C sources to a library for a kind of CPU, once, and keeps the library in a cache."""

import hashlib
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kernels.cpu.targets import THIS_CPU, Target, cpu_features, runnable_targets

SOURCES: Final = Path(__file__).parent / "src"
SHIPPED: Final = Path(__file__).parent / "compiled"
"""The directory for libraries that ship with the package; `python -m kernels.cpu` fills it."""

_COMPILERS: Final = ("gcc", "cc")
"""The compilers to try. Clang cannot be used: its OpenMP code calls libomp, and torch brings only
libgomp."""
_FLAGS: Final = ("-O3", "-std=gnu11", "-fPIC", "-Wno-psabi", "-fopenmp")
_LINK_FLAGS: Final = ("-shared", "-lm")
"""The linker's flags. OpenMP is not linked: its symbols come from the library that torch loads."""
_TIMEOUT_S: Final = 300


class BuildError(Exception):
    """There is no compiled library, and none can be compiled; the message says why."""


@dataclass(frozen=True, slots=True)
class Build:
    """A compiled library."""

    path: Path
    target: Target
    why_shipped: str | None = None
    """Why the library was not compiled for this very CPU; None if it was."""


def cache_directory() -> Path:
    """Return the directory for the user's compiled libraries.

    Raises:
        BuildError: The user has no home directory.
    """
    try:
        return Path.home() / ".cache" / "quire" / "kernels"
    except RuntimeError as error:
        raise BuildError(f"no place to keep compiled kernels: {error}") from error


def find_or_build(directory: Path | None = None) -> Build:
    """Return the library for this very CPU from `directory`; if it is missing, compile it there.

    If compiling fails, return a shipped library whose code this CPU can run. Several processes may
    compile at once: each compiles to a file with a unique name, and then renames the file.

    Args:
        directory: The directory for the library; None: `cache_directory()`.

    Raises:
        BuildError: The library cannot be compiled, and no shipped library runs on this CPU.
    """
    try:
        directory = directory or cache_directory()
        path = directory / _file_name(THIS_CPU)
        return Build(path if path.is_file() else build(directory, THIS_CPU), THIS_CPU)
    except BuildError as error:
        for target in runnable_targets():
            path = SHIPPED / _file_name(target)
            if path.is_file():
                return Build(path, target, str(error))
        raise


def build(directory: Path, target: Target) -> Path:
    """Compile the library into `directory`, even if it is there already; return its path.

    Raises:
        BuildError: there is no compiler, the compiler fails, or `directory` cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C compiler; looked for {', '.join(_COMPILERS)}")
    path = directory / _file_name(target)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as own:
            made = Path(own) / path.name
            _compile([compiler, *flags_for(target)], Path(own), made)
            made.rename(path)
    except OSError as error:
        raise BuildError(f"{directory} cannot be written: {error}") from error
    return path


def flags_for(target: Target) -> tuple[str, ...]:
    return *_FLAGS, *target.flags


def _compile(compiler: list[str], work_directory: Path, made: Path) -> None:
    """Run the compiler on all sources at once, then the linker."""
    sources = sorted(SOURCES.glob("*.c"))
    objects = [work_directory / f"{source.stem}.o" for source in sources]
    commands = [
        [*compiler, "-c", "-o", str(to), str(source)]
        for source, to in zip(sources, objects, strict=True)
    ]
    _run_all(commands)
    _run_all([[compiler[0], *map(str, objects), *_LINK_FLAGS, "-o", str(made)]])


def _run_all(commands: list[list[str]]) -> None:
    """Run commands at the same time, and wait for all of them."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603  our own commands
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in running]
    except subprocess.TimeoutExpired:
        raise BuildError(f"compiling took more than {_TIMEOUT_S} s") from None
    finally:
        for process in running:
            process.kill()
            process.wait()
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{output}")


def _file_name(target: Target) -> str:
    """Return the file name of a target's library; a part of the name is a hash.

    The hash covers the sources, the flags and, for `THIS_CPU`, the CPU's features. It does not
    cover the compiler, so a library is found on a machine without a compiler.
    """
    digest = hashlib.sha256("\0".join((*flags_for(target), *_LINK_FLAGS)).encode())
    if target is THIS_CPU:
        digest.update(" ".join((platform.machine(), *sorted(cpu_features()))).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"{target.name}-{digest.hexdigest()[:24]}.so"
