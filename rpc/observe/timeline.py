"""Records a timeline of a process for Perfetto (ui.perfetto.dev) or chrome://tracing.

Until `configure` is called with a directory, nothing is recorded, and a span costs only one check.
The processes of a machine share a clock, so `merge` can join their files. The viewer shows the
events of a process in named lanes, such as one for each thread.
"""

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_MAX_EVENTS: Final = 2_000_000
"""Maximum number of events in a file; this many events take about 200 MB."""


@dataclass(slots=True)
class _Timeline:
    """The events, kept in memory until the process ends."""

    process: str
    path: Path
    events: list[tuple[str, str, int, int, dict[str, Any]]] = field(default_factory=list)
    """Each event's name, lane, start and end in nanoseconds, and values to show."""


_timeline: _Timeline | None = None
_NO_SPAN: Final = nullcontext()


def configure(process: str, directory: Path | None) -> None:
    """Start to record a timeline if `directory` is set. Call once per process."""
    global _timeline  # noqa: PLW0603 - one per process, like a tracer provider
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        _timeline = _Timeline(process, directory / f"{process}-{os.getpid()}.json")


def is_on() -> bool:
    """Whether a timeline is recorded."""
    return _timeline is not None


def span(name: str) -> AbstractContextManager[None]:
    """Record the duration of the `with` block, in the lane of the calling thread."""
    return _NO_SPAN if _timeline is None else _span(name)


@contextmanager
def _span(name: str) -> Iterator[None]:
    start_ns = time.monotonic_ns()
    try:
        yield
    finally:
        add(name, threading.current_thread().name, start_ns)


def add(name: str, lane: str, start_ns: int, **shown: object) -> None:
    """Record an event from `start_ns`, on the clock of `time.monotonic_ns`, until now."""
    if _timeline is not None and len(_timeline.events) < _MAX_EVENTS:
        _timeline.events.append((name, lane, start_ns, time.monotonic_ns(), shown))


def write() -> None:
    """Write the recorded events, if any, to this process's file; called when the process ends."""
    if _timeline is not None:
        _timeline.path.write_text(json.dumps({"traceEvents": list(_trace_events(_timeline))}))


def _trace_events(timeline: _Timeline) -> Iterable[dict[str, object]]:
    """Yield events in the trace event format; its times are in microseconds."""
    pid = os.getpid()
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": timeline.process}}
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(e[1] for e in timeline.events))}
    for lane, tid in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
    for name, lane, start_ns, end_ns, shown in timeline.events:
        yield {
            "ph": "X",
            "name": name,
            "pid": pid,
            "tid": lanes[lane],
            "ts": start_ns / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "args": shown,
        }


def merge(directory: Path) -> dict[str, Any]:
    """Return the events of all files in a directory as one trace."""
    files = sorted(directory.glob("*.json"))
    events = [event for path in files for event in json.loads(path.read_text())["traceEvents"]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
