"""Collects the wheels that Quire needs beside torch, and unpacks those that a machine lacks.

    python bench/gpu/wheels.py collect DIR          for Python 3.12 on x86-64 Linux
    python bench/gpu/wheels.py install DIR SITE     into SITE, which goes to PYTHONPATH
    python bench/gpu/wheels.py sizes DIR            of the checkout and of DIR, with the limit

A package that the machine has in a sufficient version is kept, because the machine's transformers
fits that version. Checkout and wheels travel together, and must stay below a limit.
"""

import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

_ROOT: Final = Path(__file__).parents[2]
_TESTS: Final = (
    *("pytest>=9", "pytest-asyncio", "pytest-timeout", "pytest-randomly", "pytest-xdist"),
    "hypothesis",
)
_NOT_SENT: Final = {"torch", "numpy", "transformers", "triton"}
"""Packages that the machine has, so they are not sent; torch alone would be gigabytes."""
_GLIBC: Final = (17, 24, 27, 28, 31, 34)
_MAX_BYTES: Final = 64 * 1024**2
"""The limit on what can be carried to the machine: the checkout and the wheels."""
_MIB: Final = 1024**2


def requirements() -> list[Requirement]:
    """Return the requirements in pyproject.toml of all processes, and those of kernels' tests."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["worker"], *_TESTS]
    return [each for each in map(Requirement, texts) if each.name not in _NOT_SENT]


def collect(directory: Path) -> None:
    """Download the required wheels and their dependencies."""
    directory.mkdir(parents=True, exist_ok=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux2014_x86_64"]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(directory)),
            *("--only-binary=:all:", "--python-version=3.12", "--implementation=cp"),
            *(f"--platform={name}" for name in platforms),
            *map(str, requirements()),
        ],
        check=True,
    )
    for wheel in directory.glob("*.whl"):
        if parse_wheel_filename(wheel.name)[0] in _NOT_SENT:
            wheel.unlink()
    check_sizes(directory)


def check_sizes(directory: Path) -> None:
    """Print the sizes of the checkout and of `directory`; exit if they are too large together."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=_ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    files = {_ROOT / name for name in listed.split("\0") if name}
    tree = sum(file.lstat().st_size for file in files if file.is_file())
    wheels = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    text = f"checkout {tree / _MIB:.1f} MiB + {directory} {wheels / _MIB:.1f} MiB"
    print(f"{text} = {(tree + wheels) / _MIB:.1f} of {_MAX_BYTES / _MIB:.0f} MiB")
    if tree + wheels > _MAX_BYTES:
        sys.exit(f"{text}: together at most {_MAX_BYTES / _MIB:.0f} MiB can be carried")


def install(directory: Path, site: Path) -> None:
    """Unpack packages that are missing or too old, and their dependencies."""
    wheels = {parse_wheel_filename(wheel.name)[0]: wheel for wheel in directory.glob("*.whl")}
    to_check, taken = requirements(), set()
    while to_check:
        requirement = to_check.pop()
        name = canonicalize_name(requirement.name)
        if name in taken or name not in wheels or _is_there(requirement):
            continue
        taken.add(name)
        with zipfile.ZipFile(wheels[name]) as archive:
            archive.extractall(site)
            to_check += _dependencies(archive)
        print(wheels[name].name, file=sys.stderr)


def _is_there(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _dependencies(wheel: zipfile.ZipFile) -> list[Requirement]:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    texts = message_from_bytes(wheel.read(path)).get_all("Requires-Dist", [])
    parsed = map(Requirement, texts)
    return [each for each in parsed if not each.marker or each.marker.evaluate({"extra": ""})]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["collect", to]:
            collect(Path(to))
        case ["install", source, to]:
            install(Path(source), Path(to))
        case ["sizes", of]:
            check_sizes(Path(of))
        case _:
            sys.exit(__doc__)
