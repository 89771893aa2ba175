"""The files that a call brings back: at most six, because few can be carried.

`gpu.json` has every part's numbers, `kernels.json` the kernels', `junit.xml` the tests',
`traces.tgz` the profiles, `logs.tgz` the parts' logs, `triton-cache.tgz` the compiled kernels.
"""

import json
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Final

NAMES: Final = (
    *("gpu.json", "kernels.json", "junit.xml"),
    *("traces.tgz", "logs.tgz", "triton-cache.tgz"),
)
_MAX_BYTES: Final = 15 * 2**20
"""A little less than the largest file that can be carried."""
_TOLD: Final = (".json", ".cubin", ".ptx")
"""Which files of compiled kernels are kept if all files are too large: the code that runs, and the
description of how it was made."""


def pack(work: Path, cache: Path, out: Path) -> None:
    """Write a call's files, except `gpu.json`, from the parts' directories in `work`."""
    for kernels in work.glob("*/kernels.json"):
        if kernels.parent.name == "kernels" or not (out / "kernels.json").exists():
            (out / "kernels.json").write_bytes(kernels.read_bytes())
    _merge_tests(sorted(work.glob("*/junit.xml")), out / "junit.xml")
    _archive(out / "traces.tgz", work, work.glob("*/traces/*"))
    _archive(out / "logs.tgz", work, work.glob("*/*.txt"))
    _archive(out / "triton-cache.tgz", cache, cache.rglob("*"))
    if (out / "triton-cache.tgz").stat().st_size > _MAX_BYTES:
        told = (file for file in cache.rglob("*") if file.suffix in _TOLD)
        _archive(out / "triton-cache.tgz", cache, told)
    for name in NAMES:
        file = out / name
        if file.exists() and file.stat().st_size > _MAX_BYTES:
            print(f"{name} has {file.stat().st_size / 2**20:.1f} MiB, more than can be carried")


def _merge_tests(files: Iterable[Path], out: Path) -> None:
    merged = ET.Element("testsuites")
    for file in files:
        try:
            merged.extend(ET.parse(file).getroot())  # noqa: S314  pytest wrote it
        except ET.ParseError:  # the process that wrote it was killed
            print(f"{file} is damaged")
    ET.ElementTree(merged).write(out)


def _archive(out: Path, root: Path, files: Iterable[Path]) -> None:
    with tarfile.open(out, "w:gz", compresslevel=6) as archive:
        for file in sorted(files):
            if file.is_file():
                archive.add(file, file.relative_to(root))


def read_results(directory: Path, errors: list[str]) -> dict[str, object]:
    """Return the content of a part's JSON files by name; damaged ones are added to `errors`."""
    results: dict[str, object] = {}
    for file in sorted(directory.glob("*.json")):
        try:
            results[file.stem] = json.loads(file.read_text())
        except ValueError as error:
            errors.append(f"{file.name}: {error}")
    return results
