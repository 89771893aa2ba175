"""`quire logs`: shows the logs of a service's processes, in order of time."""

import json
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from quire.cli.command_error import CommandError
from quire.cli.settings import LogsSettings
from quire.cli.target import find_service, services_at
from quire.cli.up.log_files import LogFiles
from quire.cli.up.service_dir import ServiceInfo, ended_services
from rpc.settings import parse_settings

_POLL_S: Final = 0.2
_SUPERVISOR: Final = "up"
"""The name of the supervisor's log. This log has another format than the processes' logs, so only
`quire logs up` shows it."""


_OWN: Final = ("service",)
"""Log fields that are never shown: each line begins with the process's name instead."""
_ALIKE: Final = (*_OWN, "request_id", "trace_id")
"""Log fields that --request leaves out, because they are equal in all lines about a request."""


@dataclass(frozen=True, slots=True)
class _LogLine:
    process: str
    text: str
    fields: dict[str, Any] | None
    """The fields of a JSON line; None: the line is not JSON, as with --log-format console."""
    timestamp: str
    """The line's time; a line without a time gets the time of its process's previous line."""


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(LogsSettings, "quire logs", argv)
    service = _find_service(settings.http_port)
    log_dir = Path(service.log_dir)
    known = tuple(process.name for process in service.processes)
    if settings.process and settings.process not in (*known, _SUPERVISOR):
        names = ", ".join((*known, _SUPERVISOR))
        raise CommandError(f"{settings.process}: no such process; there are {names}")
    chosen = (settings.process,) if settings.process else known
    about = _About(settings.request) if settings.request else None
    with closing(LogFiles(log_dir, chosen)) as files:
        parser = _Parser()
        while True:
            lines = sorted(parser.parse(files.new_lines()), key=lambda line: line.timestamp)
            for line in lines if about is None else about.choose(lines):
                print(_show(line, _ALIKE if about else _OWN), flush=settings.follow)
            if not settings.follow:
                return 0
            time.sleep(_POLL_S)


def _find_service(http_port: int | None) -> ServiceInfo:
    if services_at(http_port):
        return find_service(http_port)
    for ended in ended_services():
        if ended.is_at(http_port):
            sys.stderr.write(f"{ended.title} is down; its logs: {ended.log_dir}\n")
            return ended
    return find_service(http_port)  # raises


class _Parser:
    def __init__(self) -> None:
        self._process_to_timestamp: dict[str, str] = {}

    def parse(self, lines: Iterable[tuple[str, str]]) -> Iterator[_LogLine]:
        for process, text in lines:
            fields = None
            if text.startswith("{"):
                try:
                    fields = json.loads(text)
                except ValueError:
                    fields = None
            if fields is not None and isinstance(at := fields.get("timestamp"), str):
                self._process_to_timestamp[process] = at
            yield _LogLine(process, text, fields, self._process_to_timestamp.get(process, ""))


class _About:
    """Selects the lines about one request: those with the id of the request or of its trace."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._trace_ids: set[str] = set()

    def choose(self, lines: Sequence[_LogLine]) -> list[_LogLine]:
        for line in lines:
            if line.fields and line.fields.get("request_id") == self._request_id:
                self._trace_ids.update(filter(None, [line.fields.get("trace_id")]))
        return [line for line in lines if self._is_about(line)]

    def _is_about(self, line: _LogLine) -> bool:
        if line.fields is None:
            return self._request_id in line.text
        return (
            line.fields.get("request_id") == self._request_id
            or line.fields.get("trace_id") in self._trace_ids
        )


def _show(line: _LogLine, without: Collection[str]) -> str:
    name = f"{line.process:<10}"
    if line.fields is None:
        return f"{name} {line.text}"
    fields = {key: value for key, value in line.fields.items() if key not in without}
    return f"{name} {_RENDER(None, '', fields)}"


_RENDER: Final = structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty(), pad_event_to=0)
