"""The supervisor against children that are small scripts."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_processes import is_alive, until

from quire.cli.up.child import ProcessSpec
from quire.cli.up.service_dir import ServiceProcess
from quire.cli.up.supervisor import Backoff, StartError, Supervisor

SLEEPS = "import time; time.sleep(600)"
IGNORES_SIGTERM = (
    "import signal, pathlib, sys\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "pathlib.Path(sys.argv[1]).touch()\n"
    "while True: signal.pause()\n"
)
ENDS_ONCE = (
    "import pathlib, sys, time\n"
    "mark = pathlib.Path(sys.argv[1])\n"
    "if not mark.exists():\n"
    "    mark.touch()\n"
    "    sys.exit(3)\n"
    "time.sleep(600)\n"
)
FAILS = "import sys; print('first line'); sys.exit('there are no weights')"


def spec(name: str, code: str, *argv: str, stop_group: int = 0) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", code, *argv), "", stop_group)


class Harness:
    """A supervisor with waits for its reports and changes."""

    def __init__(self, specs: list[ProcessSpec], log_dir: Path, drain_s: float = 10.0) -> None:
        self.reports: list[str] = []
        self.supervisor = Supervisor(
            specs,
            log_dir,
            drain_s=drain_s,
            report=self.reports.append,
            on_change=self._on_change,
            backoff=Backoff(first_s=0.0),
        )
        self._waiters: list[asyncio.Event] = []
        self.task = asyncio.create_task(self.supervisor.run())

    def _on_change(self, _: object) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def until(self, condition) -> list[ServiceProcess]:
        changed = asyncio.Event()
        self._waiters.append(changed)
        while not condition(self.supervisor.running):
            await asyncio.wait_for(changed.wait(), 20)
            changed.clear()
        return self.supervisor.running

    async def all_running(self) -> list[ServiceProcess]:
        return await self.until(lambda running: all(r.pid is not None for r in running))


async def test_stop_ends_every_child_and_reports_no_kill(tmp_path: Path):
    harness = Harness([spec("a", SLEEPS), spec("b", SLEEPS, stop_group=1)], tmp_path)
    running = await harness.all_running()
    harness.supervisor.stop()
    await asyncio.wait_for(harness.task, 20)
    assert not any(is_alive(each.pid) for each in running if each.pid)
    assert harness.reports == ["stopping; a second signal kills everything at once"]


async def test_child_that_dies_is_restarted_under_a_new_pid(tmp_path: Path):
    harness = Harness([spec("a", SLEEPS), spec("b", SLEEPS)], tmp_path)
    first = await harness.all_running()
    harness.supervisor.mark_started()
    assert first[0].pid is not None
    os.kill(first[0].pid, signal.SIGKILL)
    second = await harness.until(lambda running: running[0].num_restarts == 1 and running[0].pid)
    assert second[0].pid != first[0].pid
    assert second[1] == first[1]
    assert f"a (pid {first[0].pid}) was ended by SIGKILL after" in harness.reports[0]
    assert harness.reports[1] == f"a started again as pid {second[0].pid}"
    harness.supervisor.stop()
    await asyncio.wait_for(harness.task, 20)


async def test_child_that_ends_while_starting_fails_the_start_with_its_log(tmp_path: Path):
    harness = Harness([spec("good", SLEEPS), spec("bad", FAILS)], tmp_path)
    with pytest.raises(StartError) as failure:
        await asyncio.wait_for(harness.task, 20)
    message = str(failure.value)
    assert "bad ended with exit code 1 while starting" in message
    assert "| first line" in message
    assert "| there are no weights" in message
    good = harness.supervisor.running[0]
    assert good.pid is None or not is_alive(good.pid)


async def test_child_that_ends_harmlessly_while_starting_starts_again(tmp_path: Path):
    child = replace(spec("a", ENDS_ONCE, str(tmp_path / "x")), harmless_exit_code=3)
    harness = Harness([child], tmp_path)
    (process,) = await harness.until(lambda running: running[0].num_restarts and running[0].pid)
    assert process.num_restarts == 1
    assert "a (pid" in harness.reports[0]
    harness.supervisor.stop()
    await harness.task


async def test_program_that_is_missing_fails_the_start_by_name(tmp_path: Path):
    missing = ProcessSpec("a", ("/nowhere/program",), "")
    harness = Harness([missing], tmp_path)
    with pytest.raises(StartError, match="a cannot be started: /nowhere/program: No such file"):
        await asyncio.wait_for(harness.task, 20)


async def test_restart_that_fails_is_tried_again(tmp_path: Path):
    program = tmp_path / "program"
    program.symlink_to(sys.executable)
    hidden = tmp_path / "hidden"
    harness = Harness([ProcessSpec("a", (str(program), "-c", SLEEPS), "")], tmp_path)
    (first,) = await harness.all_running()
    harness.supervisor.mark_started()
    program.rename(hidden)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    await asyncio.to_thread(until, lambda: any("trying again" in r for r in harness.reports))
    hidden.rename(program)
    (second,) = await harness.until(lambda running: running[0].num_restarts == 1)
    assert second.pid not in (None, first.pid)
    harness.supervisor.stop()
    await asyncio.wait_for(harness.task, 20)


async def test_second_stop_kills_what_does_not_end(tmp_path: Path):
    flag = tmp_path / "ready"
    harness = Harness([spec("a", IGNORES_SIGTERM, str(flag))], tmp_path, drain_s=1000)
    (running,) = await harness.all_running()
    await asyncio.to_thread(until, flag.exists)
    harness.supervisor.stop()
    harness.supervisor.stop()
    await asyncio.wait_for(harness.task, 20)
    assert running.pid is not None
    assert not is_alive(running.pid)


async def test_groups_stop_in_order(tmp_path: Path):
    order = tmp_path / "order"
    code = (
        "import signal, sys, pathlib\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        f"pathlib.Path({str(tmp_path)!r}, sys.argv[1]).touch()\n"
        "signal.sigwait({signal.SIGTERM})\n"
        f"open({str(order)!r}, 'a').write(sys.argv[1])\n"
    )
    specs = [spec(name, code, name, stop_group=ord(name)) for name in "cab"]
    harness = Harness(specs, tmp_path)
    for name in "cab":
        await asyncio.to_thread(until, (tmp_path / name).exists)
    harness.supervisor.stop()
    await asyncio.wait_for(harness.task, 20)
    assert order.read_text() == "abc"


async def test_processes_started_by_a_child_end_with_it(tmp_path: Path):
    code = (
        "import subprocess, time, pathlib\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"tmp = pathlib.Path({str(tmp_path)!r})\n"
        "(tmp / 'pid.tmp').write_text(str(child.pid)); (tmp / 'pid.tmp').rename(tmp / 'pid')\n"
        "time.sleep(600)\n"
    )
    harness = Harness([spec("a", code)], tmp_path)
    await asyncio.to_thread(until, (tmp_path / "pid").exists)
    grandchild = int((tmp_path / "pid").read_text())
    assert is_alive(grandchild)
    harness.supervisor.stop()
    await asyncio.wait_for(harness.task, 20)
    await asyncio.to_thread(until, lambda: not is_alive(grandchild))


def test_backoff_doubles_up_to_its_limit():
    backoff = Backoff(first_s=0.5, most_s=3.0)
    assert [backoff.delay_s(n) for n in (1, 2, 3, 4, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]
