"""The rows of a table: each is written when it is known, and a failure is a row, too.

After a device fault, such as an illegal address, every further CUDA call in the process fails. The
remaining rows are then measured in a new process, which replaces this one.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from harness.machine import machine_facts

_CONTINUES: Final = "QUIRE_BENCH_CONTINUES"
"""Set in the process that runs the rows after a device fault."""
_MAX_ERROR: Final = 300


class Rows:
    """Named rows, each a mapping of names to numbers or texts."""

    def __init__(self, file: Path | None, restart: Callable[[], None] | None = None) -> None:
        """`file` is replaced after each row; None: rows are only printed."""
        self.rows: dict[str, dict[str, Any]] = {}
        self._file = file
        self._restart = restart or start_again
        self._machine = machine_facts()
        if file is not None and continues(file):
            self.rows = json.loads(file.read_text())["rows"]

    def run(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Measure, print and write a row, unless the process before this one has measured it."""
        if name in self.rows:
            return
        started = time.perf_counter()
        try:
            row = dict(measure())
        except Exception as error:  # noqa: BLE001  what runs here may fail in any way
            row = {"error": reason(error)}
        self.rows[name] = row
        texts = (f"{key} {_text(value)}" for key, value in row.items())
        seconds = time.perf_counter() - started
        print(f"{name:<44} {'  '.join(texts)}  ({seconds:.1f} s)", flush=True)
        self.write()
        if "error" in row and is_lost():
            print("the device has failed; the rows that are left run in a new process", flush=True)
            self._restart()

    def start(self, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Measure the row "start", even if the process before this one has measured it.

        Raises:
            SystemExit: The device fault came from this row, so it would come again.
        """
        if next(reversed(self.rows), None) == "start":
            sys.exit("the device has failed at the start")
        self.rows.pop("start", None)
        self.run("start", measure)

    def numbers(self, of: str) -> dict[str, Any]:
        """Return each row's number named `of`, by the name of the row."""
        return {name: row[of] for name, row in self.rows.items() if of in row}

    @property
    def errors(self) -> dict[str, str]:
        return self.numbers("error")

    def write(self, **others: Any) -> None:
        """Write all rows and the numbers in `others`."""
        if self._file is None:
            return
        new = self._file.with_suffix(".new")
        result = {"machine": self._machine, **others, "rows": self.rows}
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.replace(self._file)


def reason(error: Exception) -> str:
    """Return an error as one line of text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_ERROR]}"


def _text(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def continues(file: Path) -> bool:
    """Whether the process that wrote `file` met a device fault, and this process replaces it."""
    return os.environ.pop(_CONTINUES, None) is not None and file.exists()


def is_lost() -> bool:
    """Whether the device no longer answers."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def start_again() -> None:
    """Replace this process by a new one, which frees all that this one holds on the device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[_CONTINUES] = "1"
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606  the same command
