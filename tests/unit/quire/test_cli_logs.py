"""`quire logs`: the processes' lines in order of time, or those of one request."""

import json
import tempfile

import pytest

from quire.cli.__main__ import main
from quire.cli.commands.observe import logs
from quire.cli.up.service_dir import ServiceDir, ServiceInfo, ServiceProcess

NAMES = ("worker-0", "scheduler", "router")
TRACE = "0af7651916cd43dd8448eb211c80319c"


def line(second, event, **fields):
    timestamp = f"2026-11-23T04:00:{second:02}.000000Z"
    return json.dumps({"event": event, "level": "info", "timestamp": timestamp, **fields}) + "\n"


class Directory:
    def __init__(self, http_port):
        self.held = ServiceDir.create()
        processes = tuple(ServiceProcess(name, "127.0.0.1:1", 1, 0) for name in NAMES)
        address = f"127.0.0.1:{http_port}"
        self.held.write(
            ServiceInfo(1, "/m", "m", address, "t", str(self.held.log_dir), processes=processes)
        )

    def log(self, process, *lines):
        with (self.held.log_dir / f"{process}.log").open("a") as file:
            file.writelines(lines)


@pytest.fixture
def service(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    service = Directory(8000)
    service.log("router", line(1, "listening"), line(5, "request ended", request_id="req-1",
                                                     trace_id=TRACE))  # fmt: skip
    service.log("scheduler", line(2, "admission", request_id="req-1", trace_id=TRACE, worker="w"),
                line(3, "admission", request_id="other", trace_id="f" * 32))  # fmt: skip
    service.log("worker-0", "no JSON: a warning about req-1\n", line(4, "prefill", trace_id=TRACE),
                "Traceback of prefill\n", line(6, "stopped"))  # fmt: skip
    service.log("up", "04:00:09 router started again\n")
    return service


def shown(capsys, *argv):
    assert main(["logs", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [(each.split()[0], each) for each in lines]


@pytest.mark.usefixtures("service")
def test_lines_of_all_processes_are_in_order_of_time(capsys):
    told = shown(capsys)
    assert [name for name, _ in told] == [
        *("worker-0", "router", "scheduler", "scheduler", "worker-0", "worker-0"),
        *("router", "worker-0"),
    ]
    assert "Traceback of prefill" in told[5][1], "after the line that it belongs to"


@pytest.mark.usefixtures("service")
def test_one_request_is_followed_through_all_processes(capsys):
    told = shown(capsys, "--request", "req-1")
    assert [name for name, _ in told[1:]] == ["scheduler", "worker-0", "router"]
    assert "a warning about req-1" in told[0][1]
    assert TRACE not in told[1][1], "what is alike is not repeated"
    assert "worker=w" in told[1][1]


@pytest.mark.usefixtures("service")
def test_one_process_or_the_supervisor(capsys):
    assert {name for name, _ in shown(capsys, "scheduler")} == {"scheduler"}
    assert shown(capsys, "up") == [("up", "up         04:00:09 router started again")]
    assert main(["logs", "x"]) == 1
    assert (
        "x: no such process; there are worker-0, scheduler, router, up" in capsys.readouterr().err
    )


def test_logs_of_a_service_that_is_down_are_found(service, capsys):
    service.held.leave()
    assert len(shown(capsys)) == 8
    assert main(["logs", "--http-port", "8001"]) == 1
    assert "8001: no service of yours has this port" in capsys.readouterr().err


def test_follow_shows_what_is_added(service, capsys, monkeypatch):
    class EnoughError(Exception):
        pass

    added = iter([line(7, "tokenize", trace_id=TRACE), line(8, "x"), None])

    def sleep(_: float) -> None:
        if (new := next(added)) is None:
            raise EnoughError
        service.log("router", new)

    monkeypatch.setattr(logs.time, "sleep", sleep)
    with pytest.raises(EnoughError):
        main(["logs", "--request", "req-1", "--follow"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "tokenize" in lines[-1]
