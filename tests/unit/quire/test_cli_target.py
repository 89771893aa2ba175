"""Which service the client commands use, and how messages name the command `quire`."""

import sys
import tempfile

import pytest

from quire.cli.__main__ import main
from quire.cli.invocation import invocation
from quire.cli.target import DEFAULT_TARGET, find_target
from quire.cli.up.service_dir import ServiceDir, ServiceInfo


@pytest.fixture
def services(tmp_path, monkeypatch):
    """Hides this machine's services; returns a function that adds one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directories = []

    def add(grpc_target):
        directory = ServiceDir.create()
        directories.append(directory)
        directory.write(ServiceInfo(1, "/m", "m", "127.0.0.1:8000", grpc_target, "/logs"))

    yield add
    for directory in directories:
        directory.remove()


def test_the_only_service_is_the_target(services):
    services("127.0.0.1:12345")
    assert find_target("") == "127.0.0.1:12345"
    assert find_target("elsewhere:1") == "elsewhere:1"


def test_without_a_service_or_with_several_it_is_the_default(services):
    assert find_target("") == DEFAULT_TARGET
    services("127.0.0.1:1")
    services("127.0.0.1:2")
    assert find_target("") == DEFAULT_TARGET


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
