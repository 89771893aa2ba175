"""Structured logs on standard error: JSON lines for machines, columns on a terminal."""

import logging
import sys
from typing import Literal

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]


def configure(level: LogLevel, format: LogFormat, service: str) -> None:  # noqa: A002
    """Configure `structlog` and standard loggers.

    The `format` "auto" means "console" on a terminal, and "json" elsewhere.
    """
    numeric_level = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_trace_id,
    ]
    rendering: list[Processor]
    if format == "console" or (format == "auto" and sys.stderr.isatty()):
        plain = structlog.dev.plain_traceback
        rendering = [structlog.dev.ConsoleRenderer(exception_formatter=plain)]
    else:
        rendering = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ]

    def add_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    structlog.configure(
        processors=[*shared, add_service, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(numeric_level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, add_service],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(numeric_level)


def _add_trace_id(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
    return event
