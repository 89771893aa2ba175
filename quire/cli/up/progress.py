"""Shows the progress of a service's start: bars on a terminal, lines elsewhere."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from quire.cli.readiness import Readiness

if TYPE_CHECKING:
    from rich.progress import TaskID

_MAX_STATUS_CHARS: Final = 72


class _Lines:
    """Prints a line when a process's status changes, or its progress passes 25, 50, 75 or 100 %."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[str, int]] = {}

    def show(self, name_to_readiness: Mapping[str, Readiness]) -> None:
        for name, readiness in name_to_readiness.items():
            quarter = int((readiness.progress or 0.0) * 4)
            if self._shown.get(name) == (readiness.status, quarter):
                continue
            self._shown[name] = (readiness.status, quarter)
            percent = "" if readiness.progress is None else f" {readiness.progress:.0%}"
            print(f"{name}: {_shorten(readiness.status)}{percent}", flush=True)

    def close(self) -> None:
        """Do nothing, because lines need no cleanup."""


class _Bars:
    def __init__(self) -> None:
        # This import is slow, and needed only here.
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        # auto_refresh would start a thread, and this process forks.
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}", markup=False),
            TimeElapsedColumn(),
            auto_refresh=False,
            transient=True,
        )
        self._name_to_task: dict[str, TaskID] = {}
        self._progress.start()

    def show(self, name_to_readiness: Mapping[str, Readiness]) -> None:
        for name, readiness in name_to_readiness.items():
            if name not in self._name_to_task:
                self._name_to_task[name] = self._progress.add_task(name, total=None, status="")
            done = 1.0 if readiness.ready else readiness.progress
            self._progress.update(
                self._name_to_task[name],
                total=None if done is None else 1.0,
                completed=done or 0.0,
                status=_shorten(readiness.status),
            )
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


Display: TypeAlias = _Bars | _Lines


def make_display() -> Display:
    return _Bars() if sys.stdout.isatty() else _Lines()


def _shorten(status: str) -> str:
    """Cut a status to fit one line; the process's log has the whole status."""
    return status if len(status) <= _MAX_STATUS_CHARS else status[: _MAX_STATUS_CHARS - 1] + "…"
