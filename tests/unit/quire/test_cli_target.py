"""Which service the client commands use, and how messages name the command `quire`."""

import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from docs.generate.flags import commands
from quire.cli.__main__ import main
from quire.cli.command_error import CommandError
from quire.cli.invocation import invocation
from quire.cli.settings import KvSettings, SchedulerClientSettings
from quire.cli.target import (
    DEFAULT_TARGET,
    _find_scheduler,
    find_operator_targets,
    find_service,
    find_target,
    scheduler_channel,
)
from quire.cli.up.service_dir import ServiceDir, ServiceInfo


@pytest.fixture
def services(tmp_path, monkeypatch):
    """Hides this machine's services; returns a function that adds one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directories = []

    def add(grpc_target, http_port=8000, **fields):
        directory = ServiceDir.create()
        directories.append(directory)
        http_address = f"127.0.0.1:{http_port}"
        directory.write(ServiceInfo(1, "/m", "m", http_address, grpc_target, "/logs", **fields))

    yield add
    for directory in directories:
        directory.remove()


def router(**flags):
    return find_target(KvSettings(**flags))


def test_the_only_service_is_the_target(services):
    services("127.0.0.1:12345")
    assert router() == "127.0.0.1:12345"
    assert router(target="elsewhere:1") == "elsewhere:1"


def test_the_scheduler_that_answers_is_the_target(services, tmp_path):
    first, second = (f"unix:{tmp_path}/{name}" for name in ("a", "b"))
    services("127.0.0.1:1", scheduler_target=f"{first},{second}")
    assert _find_scheduler(None, "") == first
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    server.add_insecure_port(second)
    server.start()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(first.removeprefix("unix:"))
        listener.listen()  # as a stopped process, this accepts connections and is silent
        assert _find_scheduler(None, "") == second
    server.stop(None).wait()


def test_without_a_service_or_with_several_it_is_the_default(services):
    assert router() == DEFAULT_TARGET
    services("127.0.0.1:1")
    services("127.0.0.1:2")
    assert router() == DEFAULT_TARGET


def test_http_port_chooses_one_of_several_for_every_kind_of_command(services):
    services("127.0.0.1:1", 8001, scheduler_target="unix:/s1", operator_target="unix:/r1")
    services("127.0.0.1:2", 8002, scheduler_target="unix:/s2", operator_target="unix:/r2")
    assert router(http_port=8002) == "127.0.0.1:2"
    assert find_operator_targets(KvSettings(http_port=8002)) == ("unix:/r2",)
    assert find_operator_targets(KvSettings(target="b:1", http_port=8002)) == ("b:1",)
    assert _find_scheduler(8001, "") == "unix:/s1"
    several = {"a": "unix:/a", "b": "unix:/b"}
    services("127.0.0.1:3", 8004, scheduler_target="unix:/a", scheduler_targets=several)
    assert _find_scheduler(8004, "", "b") == "unix:/b"
    for model in ("", "c"):
        with pytest.raises(CommandError, match=r"--served-model: .* one of a, b"):
            _find_scheduler(8004, "", model)
    assert _find_scheduler(8001, "127.0.0.1:50052") == "unix:/s1"
    assert find_service(8001).http_address == "127.0.0.1:8001"
    for find in (find_service, lambda port: router(http_port=port)):
        with pytest.raises(CommandError, match="8003: no service of yours has this port"):
            find(8003)
    with pytest.raises(CommandError, match=r"\(127.0.0.1:8001, 127.0.0.1:8002, 127.0.0.1:8004\)"):
        find_service(None)


@pytest.mark.usefixtures("services")
def test_container_whose_process_has_its_port_from_the_environment_is_no_service():
    assert router(http_port=8000) == DEFAULT_TARGET


def test_a_scheduler_and_the_name_of_a_model_are_not_given_together():
    settings = SchedulerClientSettings(scheduler="127.0.0.1:1", served_model="b")
    with (
        pytest.raises(CommandError, match="--served-model b chooses among"),
        scheduler_channel(settings),
    ):
        pass


ABOUT_A_SERVICE = (
    *("status", "down", "restart", "logs", "requests", "cancel", "kv", "top", "generate", "chat"),
    *("lora", "load", "unload", "resize", "migrate", "defragment"),
)


@pytest.mark.parametrize("name", ABOUT_A_SERVICE)
def test_every_command_about_a_service_takes_the_same_flag(name):
    field = commands()[f"quire {name}"].model_fields["http_port"]
    assert field.description is not None
    assert field.description.startswith("Choose the service on this machine by its router's")


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",)])
def test_a_service_that_is_not_there_is_one_line_that_says_what_to_do(
    services, capsys, monkeypatch, tmp_path, command
):
    services("127.0.0.1:1")
    said = tmp_path / "said"
    said.write_text("hello\n")
    with said.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main([*command, "--timeout-s", "20"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("quire: nothing answers at 127.0.0.1:1: ")
    assert "status" in error
    assert "--target" in error
    assert error.count("\n") == 1


def test_messages_say_the_command_as_it_can_be_typed(tmp_path, monkeypatch):
    script = tmp_path / ".venv" / "bin" / "quire"
    script.parent.mkdir(parents=True)
    script.write_text("")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    for typed in (".venv/bin/quire", str(script)):
        monkeypatch.setattr(sys, "argv", [typed])
        assert invocation() == ".venv/bin/quire"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert invocation() == str(script)
    monkeypatch.chdir(script.parent)
    assert invocation() == "./quire"
    monkeypatch.setenv("PATH", str(script.parent))
    assert invocation() == "quire"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "quire" / "cli" / "__main__.py")])
    assert invocation() == f"{sys.executable} -m quire.cli"
