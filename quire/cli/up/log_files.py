"""Reads the log files of a service's processes line by line as they grow."""

from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


class LogFiles:
    """Reads the log files of the named processes in a directory; a file need not exist yet."""

    def __init__(self, log_dir: Path, names: tuple[str, ...]) -> None:
        self._paths = {name: log_dir / f"{name}.log" for name in names}
        self._files: dict[str, TextIO] = {}

    def new_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the lines appended since the last call, each with the process's name."""
        for name, path in self._paths.items():
            if name not in self._files and path.exists():
                self._files[name] = path.open(errors="replace")
            for line in self._files.get(name, ()):
                yield name, line.rstrip("\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
