"""`quire lora` against a fake of the scheduler."""

import asyncio
from pathlib import Path

import pytest

from contract.errors import AlreadyExistsError
from quire.cli import target
from quire.cli.__main__ import main
from quire.v1 import adapters_pb2, adapters_pb2_grpc, common_pb2

HERE = Path("adapters/c").absolute()


class FakeScheduler(adapters_pb2_grpc.AdapterServiceServicer):
    def __init__(self):
        self.adapters = {}
        self.leaving = set()

    async def LoadAdapter(self, request, context):  # noqa: N802, ARG002
        loaded = common_pb2.LoraAdapter(
            name=request.name, digest=b"\x5a" * 32, directory=request.directory
        )
        before = self.adapters.setdefault(request.name, loaded)
        if before.directory != request.directory:
            raise AlreadyExistsError("it has other contents")
        return adapters_pb2.LoadAdapterResponse(adapter=loaded, was_there=before is not loaded)

    async def UnloadAdapter(self, request, context):  # noqa: N802, ARG002
        del self.adapters[request.name]
        return adapters_pb2.UnloadAdapterResponse()

    async def ListAdapters(self, request, context):  # noqa: N802, ARG002
        return adapters_pb2.ListAdaptersResponse(
            adapters=[
                adapters_pb2.LoadedAdapter(adapter=each, is_leaving=name in self.leaving)
                for name, each in self.adapters.items()
            ]
        )


@pytest.fixture
async def scheduler(serve):
    fake = FakeScheduler()
    fake.target = await serve(adapters_pb2_grpc.add_AdapterServiceServicer_to_server, fake)
    return fake


async def run(*argv):
    return await asyncio.to_thread(main, ["lora", *argv])


async def test_they_are_loaded_listed_and_unloaded(scheduler, capsys):
    where = ("--scheduler", scheduler.target)
    assert await run(*where) == 0
    assert await run("load", "sql=/adapters/sql", *where) == 0
    assert await run("load", "chatty=adapters/c", *where) == 0  # relative to the working directory
    assert await run("load", "sql=/adapters/sql", *where) == 0
    scheduler.leaving.add("sql")
    assert await run("list", *where) == 0
    assert await run("unload", "sql", *where) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no adapters are loaded",
        "sql is loaded: 5a5a5a5a from /adapters/sql",
        f"chatty is loaded: 5a5a5a5a from {HERE}",
        "sql was loaded already: 5a5a5a5a from /adapters/sql",
        "sql     5a5a5a5a  /adapters/sql  (being unloaded)",
        f"chatty  5a5a5a5a  {HERE}",
        "sql is unloaded",
    ]
    assert list(scheduler.adapters) == ["chatty"]


async def test_a_refusal_is_one_line_and_exit_code_1(scheduler, capsys):
    await run("load", "sql=/adapters/sql", "--scheduler", scheduler.target)
    assert await run("load", "sql=/other", "--scheduler", scheduler.target) == 1
    assert capsys.readouterr().err == "quire: it has other contents\n"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["load"], "load: needs NAME=DIR, not ''"),
        (["load", "sql"], "load: needs NAME=DIR, not 'sql'"),
        (["unload"], "unload: needs NAME, not ''"),
        (["unload", "sql=x"], "unload: needs NAME, not 'sql=x'"),
        (["list", "sql"], "list: takes no adapter, but 'sql' is given"),
        (["drop", "sql"], "action"),
    ],
)
async def test_invalid_values_are_errors(argv, problem, capsys):
    with pytest.raises(SystemExit) as caught:
        await run(*argv, "--scheduler", "unix:/nowhere")
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


async def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as caught:
        await run("--help")
    assert caught.value.code == 0
    assert "quire lora load NAME=DIR" in " ".join(capsys.readouterr().out.split())


async def test_it_needs_a_scheduler(capsys, monkeypatch):
    monkeypatch.setattr(target, "running_services", lambda: iter(()))
    assert await run("unload", "sql") == 1
    assert "--scheduler HOST:PORT names a scheduler elsewhere" in capsys.readouterr().err
