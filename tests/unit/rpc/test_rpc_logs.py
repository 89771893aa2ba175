import json
import logging

import pytest
import structlog
from opentelemetry import context as otel_context

from rpc.observe import logs, telemetry

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def configure():
    """Configure the logs, and restore everything afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level

    def configure_logs(level="info", log_format="json"):
        logs.configure(level, log_format, "quire-test")

    yield configure_logs
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(capsys):
    """Return the lines written since the last call."""
    printed = capsys.readouterr()
    assert printed.out == ""
    return [json.loads(line) for line in printed.err.splitlines()]


def test_a_line_has_level_time_service_and_what_is_bound(configure, capsys):
    configure()
    structlog.get_logger().bind(request_id="r").warning("slow", queue_s=3)
    (line,) = lines(capsys)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "slow",
        "level": "warning",
        "service": "quire-test",
        "request_id": "r",
        "queue_s": 3,
    }


def test_a_line_within_a_trace_names_it(configure, capsys):
    configure()
    token = otel_context.attach(telemetry.extract(f"00-{TRACE_ID}-b7ad6b7169203331-01"))
    try:
        structlog.get_logger().info("in")
        logging.getLogger("library").warning("in too")
    finally:
        otel_context.detach(token)
    structlog.get_logger().info("out")
    assert [line.get("trace_id") for line in lines(capsys)] == [TRACE_ID, TRACE_ID, None]


def test_libraries_lines_look_alike(configure, capsys):
    configure()
    logging.getLogger("library").error("port %d", 3)
    (line,) = lines(capsys)
    assert (line["event"], line["level"], line["service"]) == ("port 3", "error", "quire-test")


def test_lines_below_the_level_are_dropped(configure, capsys):
    configure("warning")
    structlog.get_logger().info("dropped")
    logging.getLogger("library").info("dropped")
    structlog.get_logger().warning("kept")
    assert [line["event"] for line in lines(capsys)] == ["kept"]


def test_an_exception_is_one_line_with_its_traceback(configure, capsys):
    configure()
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        structlog.get_logger().exception("failed")
    (line,) = lines(capsys)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_auto_is_json_where_there_is_no_terminal_and_console_is_not(configure, capsys):
    configure(log_format="auto")
    structlog.get_logger().info("a")
    assert lines(capsys)[0]["event"] == "a"
    configure(log_format="console")
    structlog.get_logger().info("b")
    with pytest.raises(json.JSONDecodeError):
        lines(capsys)
