"""The optional audit log: a line of JSON for each request, with its prompt and outputs.

A separate thread converts token ids to text and writes the lines.
"""

import json
import logging
import os
import queue
import sys
import time
from collections.abc import Callable, Sequence
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from typing import IO, Any, Final

import structlog

from router import metrics
from router.live.live_request import LiveRequest

log = structlog.get_logger()

_MAX_WAITING: Final = 4096
"""Limit on requests that wait to be written. Further requests are missing from the log; their
clients do not notice."""


class AuditLogError(Exception):
    """The file cannot be opened."""


class AuditLog:
    """Writes one file, which no other process may write."""

    def __init__(self, path: Path, max_bytes: int, num_files: int) -> None:
        """Open the file; may raise AuditLogError.

        A line that would make the file longer than `max_bytes` goes to a new file. The old file is
        renamed to PATH.1, the old PATH.1 to PATH.2, and so on. The `num_files` newest files are
        kept.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = _PrivateFile(path, "a", max_bytes, num_files - 1, "utf-8", errors="replace")
        except OSError as error:
            raise AuditLogError(f"--audit-log {path}: {error.strerror}") from error
        handler.setFormatter(_AuditFormatter())
        handler.handleError = self._on_error  # type: ignore[method-assign]
        self._waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._listener = QueueListener(self._waiting, handler)
        self._handler = handler
        self._has_told = False
        self._listener.start()

    def add(self, live: LiveRequest, decode: Callable[[Sequence[int]], str]) -> None:
        """Queue a request, so that a line is written for it; does not wait for the disk.

        Called when the client has read all outputs, or has left.

        `decode` turns token ids into text.
        """
        record = logging.makeLogRecord(
            {"live": live, "decode": decode, "at": time.time(), "levelno": logging.INFO}
        )
        if self._waiting.qsize() < _MAX_WAITING:
            self._waiting.put(record)
        else:
            self._lose("too many wait for the disk")

    def close(self) -> None:
        """Write all waiting requests, and close the file."""
        self._listener.stop()
        self._handler.close()

    def _on_error(self, record: logging.LogRecord) -> None:
        del record
        self._lose(f"they cannot be written: {sys.exception()!r}")

    def _lose(self, why: str) -> None:
        metrics.AUDIT_LINES_LOST.inc()
        if not self._has_told:
            self._has_told = True
            log.error("requests are missing from the audit log", why=why)


class _PrivateFile(RotatingFileHandler):
    """A log file that only its owner can read."""

    def _open(self) -> IO[Any]:  # type: ignore[override] # it is a text file
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(
            self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=opener
        )


class _AuditFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if not record.msg:  # the rotating handler calls this method twice
            record.msg = self._text(record)
        return str(record.msg)

    def _text(self, record: logging.LogRecord) -> str:
        live: LiveRequest = record.__dict__["live"]
        decode: Callable[[Sequence[int]], str] = record.__dict__["decode"]
        key, usage = live.usage_key, live.usage
        line: dict[str, Any] = {
            "at": record.__dict__["at"],
            "request_id": live.request_id,
            "tenant": key.tenant,
            "key": key.key,
            "model": key.model,
            "adapter": key.adapter,
            "prompt": decode(live.prompt_token_ids),
            "outputs": [
                {
                    "text": decode(output.token_ids),
                    "finish_reason": output.finished and output.finished.finish_reason.value,
                }
                for output in live.outputs
            ],
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "generated_tokens": usage.completion_tokens,
            "goes_on": live.goes_on,
        }
        return json.dumps(line, ensure_ascii=False)
