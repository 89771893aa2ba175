"""Compiles the C sources once for each kind of CPU, and keeps the result in a cache."""

import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent / "src"
SHIPPED: Final = Path(__file__).parent / "compiled"
"""The directory for libraries that ship with the package; `python -m kernels.cpu` fills it."""

_COMPILERS: Final = ("cc", "gcc", "clang")
_FLAGS: Final = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-Wno-psabi", "-fopenmp")
_LINK_FLAGS: Final = ("-shared", "-lm")
"""OpenMP is not linked, because its symbols come from the library that torch has loaded."""
_CPU_INFO: Final = Path("/proc/cpuinfo")
_TIMEOUT_S: Final = 300


class BuildError(Exception):
    """There is no compiled library, and none can be made; the message says why."""


def cache_directory() -> Path:
    """Return the directory of a user's compiled libraries.

    Raises:
        BuildError: The user has no home directory.
    """
    try:
        return Path.home() / ".cache" / "quire" / "kernels"
    except RuntimeError as error:
        raise BuildError(f"no place to keep compiled kernels: {error}") from error


def find_or_build(directory: Path) -> Path:
    """Return the library for this CPU: shipped with the package, in `directory`, or compiled there.

    Several processes may do this at once: each compiles to a unique name, then renames it.

    Raises:
        BuildError: there is no compiler, it fails, or `directory` cannot be written.
    """
    key = _key()
    for place in (SHIPPED, directory):
        path = place / f"{key}.so"
        if path.is_file():
            return path
    return build(directory)


def build(directory: Path) -> Path:
    """Compile into `directory`, even if the library is there; return its path.

    Raises:
        BuildError: there is no compiler, it fails, or `directory` cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C compiler; looked for {', '.join(_COMPILERS)}")
    path = directory / f"{_key()}.so"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as own:
            made = Path(own) / path.name
            _compile(compiler, Path(own), made)
            made.rename(path)
    except OSError as error:
        raise BuildError(f"{directory} cannot be written: {error}") from error
    return path


def _compile(compiler: str, work_directory: Path, made: Path) -> None:
    """Run the compiler on all sources at once, then the linker."""
    sources = sorted(SOURCES.glob("*.c"))
    objects = [work_directory / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *_FLAGS, "-c", "-o", str(to), str(source)]
        for source, to in zip(sources, objects, strict=True)
    ]
    _run_all(commands)
    _run_all([[compiler, *map(str, objects), *_LINK_FLAGS, "-o", str(made)]])


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


def _key() -> str:
    """Return a hash of a library's sources, flags and CPU.

    It does not include the compiler, so a library is found even without one.
    """
    digest = hashlib.sha256("\0".join((*_FLAGS, *_LINK_FLAGS, _cpu())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """Return the CPU's instruction sets, as far as the system reports them."""
    features = [platform.machine()]
    if _CPU_INFO.is_file():
        lines = _CPU_INFO.read_text().splitlines()
        named = (line for line in lines if line.startswith(("flags", "Features")))
        features += sorted(next(named, "").split())
    return " ".join(features)
