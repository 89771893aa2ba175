"""`quire drain` against a fake of a process, and errors of `quire restart`."""

import asyncio

import grpc.aio
import pytest

from quire.cli.__main__ import main
from quire.cli.commands import restart
from quire.cli.up.service_dir import ServiceInfo, ServiceProcess
from quire.v1 import admin_pb2, admin_pb2_grpc


class FakeProcess(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.key = ""
        self.worker = ""

    async def Drain(self, request, context):  # noqa: N802
        self.worker = request.worker
        if (
            self.key
            and ("authorization", f"Bearer {self.key}") not in context.invocation_metadata()
        ):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")
        yield admin_pb2.DrainResponse(num_live=2)
        yield admin_pb2.DrainResponse(num_live=0)


@pytest.fixture
async def process(serve) -> tuple[str, FakeProcess]:
    fake = FakeProcess()
    return await serve(admin_pb2_grpc.add_AdminServiceServicer_to_server, fake), fake


async def test_it_says_what_is_live_until_it_has_drained(process, capsys):
    target, _ = process
    assert await asyncio.to_thread(main, ["drain", target]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{target} drains: 2 live",
        f"{target} drains: 0 live",
        f"{target} has drained and ends",
    ]


async def test_a_scheduler_has_a_worker_drain(process, capsys):
    target, fake = process
    assert await asyncio.to_thread(main, ["drain", target, "--worker", "w:1"]) == 0
    assert fake.worker == "w:1"
    assert capsys.readouterr().out.splitlines()[-1] == "w:1 has drained and ends"


async def test_a_router_is_shown_the_key(process, capsys):
    target, fake = process
    fake.key = "secret"
    assert await asyncio.to_thread(main, ["drain", target]) == 1
    assert "no key" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["drain", target, "--api-key", "secret"]) == 0


SERVICE = ServiceInfo(
    pid=1,
    model="/m",
    model_name="m",
    http_address="127.0.0.1:8000",
    grpc_target="127.0.0.1:50051",
    log_dir="/l",
    processes=tuple(
        ServiceProcess(name, f"127.0.0.1:{port}", 100 + port, 0)
        for port, name in enumerate(("worker-0", "scheduler", "router"))
    ),
)


@pytest.mark.parametrize(
    ("services", "argv", "problem"),
    [
        ([], [], "--http-port: unset: it must select one service; it selects 0"),
        ([SERVICE, SERVICE], [], "it selects 2"),
        (
            [SERVICE],
            ["--http-port", "8001"],
            "--http-port: 8001: it must select one service; it selects 0",
        ),
        ([SERVICE], ["worker-1"], "worker-1: no such process; it must be one of worker-0"),
    ],
)
def test_restarting_an_unknown_process_is_an_error(services, argv, problem, monkeypatch, capsys):
    monkeypatch.setattr(restart, "running_services", lambda: iter(services))
    assert main(["restart", *argv]) == 1
    assert problem in capsys.readouterr().err
