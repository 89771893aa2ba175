"""`quire up` as a process, with fakes in place of the three services."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_processes import TIMEOUT_S, is_alive, until

from quire.cli.up.service_dir import ServiceInfo, running_services

FAKES = Path(__file__).parent / "fakes"


class Machine:
    """A temporary directory that holds all services, and the `quire` commands run so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (self.model / name).write_text("{}")
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")},
            "PYTHONPATH": os.pathsep.join([str(FAKES), *sys.path]),
            "FAKE_DIR": str(folder),
            "TMPDIR": str(folder),
        }
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *argv: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire.cli", *argv],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        return process

    def up(self, *flags: str, **environment: str) -> subprocess.Popen[str]:
        ports = ("--http-port", "0", "--grpc-port", "0")
        return self.start("up", "--model", str(self.model), *ports, *flags, **environment)

    def record(self, name: str) -> dict:
        return json.loads((self.folder / f"{name}.json").read_text())

    @property
    def services(self) -> list[ServiceInfo]:
        return list(running_services(self.folder / f"quire-{os.getuid()}"))

    def close(self) -> None:
        pids = {service.pid for service in self.services}
        for pid in pids | {process.pid for process in self._processes if process.poll() is None}:
            os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    pytest.fail(f"ended without {text!r}:\n{''.join(lines)}")


def pids(service: ServiceInfo) -> list[int]:
    return [process.pid for process in service.processes if process.pid is not None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_starts_three_processes_and_a_signal_ends_them_all(machine, number):
    process = machine.up()
    output = read_until(process, "Ctrl-C stops it")
    assert "model is up after" in output
    (service,) = machine.services
    assert [each.name for each in service.processes] == ["worker-0", "scheduler", "router"]
    assert all(map(is_alive, pids(service)))
    process.send_signal(number)
    assert process.wait(TIMEOUT_S) == 0
    assert not any(map(is_alive, pids(service)))
    assert machine.services == []
    left = Path(service.log_dir).parent
    assert sorted(path.name for path in left.iterdir()) == ["lock", "logs", "service.json"]
    assert "fake router listens" in Path(service.log_dir, "router.log").read_text()


def test_children_end_with_a_supervisor_that_is_killed_outright(machine):
    process = machine.up()
    read_until(process, "Ctrl-C stops it")
    (service,) = machine.services
    process.kill()
    until(lambda: not any(map(is_alive, pids(service))))
    until(lambda: machine.services == [])  # its lock is released with its last thread


def test_dead_child_is_restarted_and_a_line_says_so(machine):
    process = machine.up()
    read_until(process, "Ctrl-C stops it")
    (service,) = machine.services
    scheduler = service.processes[1]
    assert scheduler.pid is not None
    os.kill(scheduler.pid, signal.SIGKILL)
    output = read_until(process, "started again")
    assert f"scheduler (pid {scheduler.pid}) was ended by SIGKILL" in output
    assert "| fake scheduler_svc listens" in output
    (service,) = machine.services
    assert [each.num_restarts for each in service.processes] == [0, 1, 0]


def test_start_that_fails_shows_the_log_and_leaves_nothing(machine):
    process = machine.up(FAKE_FAILS="gpu_worker")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "quire: worker-0 ended with exit code 1 while starting" in output
    assert "| fake: there is no such thing as weights" in output
    assert "Traceback" not in output
    assert machine.services == []


def test_progress_is_shown_until_ready(machine):
    (machine.folder / "gpu_worker.not-ready").touch()
    process = machine.up()
    assert "worker-0: loading 50%" in read_until(process, "worker-0: loading")
    (machine.folder / "gpu_worker.not-ready").unlink()
    assert "worker-0: ready" in read_until(process, "Ctrl-C stops it")


def test_interrupt_while_starting_ends_cleanly(machine):
    (machine.folder / "gpu_worker.not-ready").touch()
    process = machine.up()
    read_until(process, "worker-0: loading")
    (service,) = machine.services
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 0
    assert not any(map(is_alive, pids(service)))


def test_second_interrupt_ends_at_once(machine):
    process = machine.up("--drain-s", "1000", FAKE_IGNORES_SIGTERM="router")
    read_until(process, "Ctrl-C stops it")
    (service,) = machine.services
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping")
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 0
    assert not any(map(is_alive, pids(service)))


def test_detach_returns_when_ready_and_down_stops(machine):
    up = machine.up("--detach")
    output, _ = up.communicate(timeout=TIMEOUT_S)
    assert up.returncode == 0, output
    (service,) = machine.services
    assert all(map(is_alive, [service.pid, *pids(service)]))
    down = machine.start("down")
    output, _ = down.communicate(timeout=TIMEOUT_S)
    assert down.returncode == 0
    assert output == f"model on {service.http_address} is down; logs: {service.log_dir}\n"
    until(lambda: not any(map(is_alive, [service.pid, *pids(service)])))


def test_detach_shows_a_start_that_fails(machine):
    process = machine.up("--detach", FAKE_FAILS="scheduler_svc")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "quire: scheduler ended with exit code 1 while starting" in output
    assert "| fake: there is no such thing as weights" in output


def test_second_up_of_the_same_model_says_it_is_up_already(machine):
    machine.up("--detach").communicate(timeout=TIMEOUT_S)
    (service,) = machine.services
    same = (
        *("--http-port", service.http_address.rpartition(":")[2]),
        *("--grpc-port", service.grpc_target.rpartition(":")[2]),
    )
    again = machine.up(*same, "--detach")
    output, _ = again.communicate(timeout=TIMEOUT_S)
    assert again.returncode == 0
    assert "model is already up" in output
    other = machine.folder / "other"
    machine.model.rename(other)
    machine.model = other
    refused = machine.up(*same, "--detach")
    output, _ = refused.communicate(timeout=TIMEOUT_S)
    assert refused.returncode == 1
    assert f"`{sys.executable} -m quire.cli down`" in output


def test_environment_reaches_the_processes_but_ports_do_not(machine):
    process = machine.up(
        "--workers",
        "2",
        QUIRE_MAX_WAITING="7",
        QUIRE_BLOCK_SIZE="32",
        QUIRE_MODEL_CLASS="my_models.gpt2:Gpt2",
        QUIRE_QUANTIZATION="int4",
        QUIRE_SCHEDULER_HTTP_PORT="0",
    )
    read_until(process, "Ctrl-C stops it")
    scheduler, worker = machine.record("scheduler_svc"), machine.record("gpu_worker")
    assert scheduler["environment"]["QUIRE_MAX_WAITING"] == "7"
    assert "QUIRE_BLOCK_SIZE" not in scheduler["environment"]
    assert "QUIRE_SCHEDULER_HTTP_PORT" not in scheduler["environment"]
    flags = worker["argv"]
    assert flags[flags.index("--block-size") + 1] == "32"
    assert flags[flags.index("--model-class") + 1] == "my_models.gpt2:Gpt2"
    assert flags[flags.index("--quantization") + 1] == "int4"
    (service,) = machine.services
    assert [each.name for each in service.processes][:2] == ["worker-0", "worker-1"]


def test_workers_have_the_roles_that_are_asked_for(machine):
    process = machine.up("--prefill-workers", "1", "--decode-workers", "1")
    read_until(process, "Ctrl-C stops it")
    (service,) = machine.services
    assert [each.name for each in service.processes][:2] == ["worker-0", "worker-1"]
    flags = machine.record("gpu_worker")["argv"]
    role = {"worker-0": "prefill", "worker-1": "decode"}[flags[flags.index("--worker-id") + 1]]
    assert flags[flags.index("--role") + 1] == role


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefill-workers", "1"], "--decode-workers 0: both must be given"),
        (["--workers=2", "--prefill-workers=1", "--decode-workers=1"], "--workers: 2: cannot be"),
    ],
)
def test_roles_that_do_not_fit_are_refused(machine, flags, message):
    process = machine.up(*flags)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert message in output


def test_interrupted_detach_leaves_nothing(machine):
    (machine.folder / "gpu_worker.not-ready").touch()
    process = machine.up("--detach")
    read_until(process, "worker-0: loading")
    (service,) = machine.services
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130
    assert not any(map(is_alive, [service.pid, *pids(service)]))


def test_status_shows_processes_and_readiness(machine):
    machine.up("--detach").communicate(timeout=TIMEOUT_S)
    (service,) = machine.services
    (machine.folder / "scheduler_svc.not-ready").touch()
    status = machine.start("status", COLUMNS="120")
    output, _ = status.communicate(timeout=TIMEOUT_S)
    assert status.returncode == 1
    rows = [line.split() for line in output.splitlines() if service.http_address[:9] in line]
    text = "\n".join(" ".join(row) for row in rows)
    assert f"worker-0 │ {service.processes[0].pid} │ ready" in text
    assert f"scheduler │ {service.processes[1].pid} │ loading 50%" in text


def test_commands_without_a_service_say_so(machine):
    status = machine.start("status")
    output, _ = status.communicate(timeout=TIMEOUT_S)
    assert (status.returncode, "no service of yours is up" in output) == (1, True)
    down = machine.start("down", "--http-port", "1234")
    output, _ = down.communicate(timeout=TIMEOUT_S)
    assert (down.returncode, output) == (
        1,
        "quire: --http-port: 1234: no service of yours has this port\n",
    )


def test_verbose_shows_the_logs_of_the_processes(machine):
    process = machine.up("--verbose")
    read_until(process, "scheduler  | fake scheduler_svc listens")


@pytest.mark.parametrize("name", ["http", "secrets", "email"])
def test_file_named_like_a_module_of_python_breaks_nothing(machine, name):
    (machine.folder / f"{name}.py").write_text("raise RuntimeError('not the one of Python')")
    process = machine.up("--detach")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    (service,) = machine.services
    assert all(map(is_alive, pids(service)))


def test_second_up_with_other_flags_names_the_difference_and_fails(machine):
    machine.up("--detach", "--workers", "2").communicate(timeout=TIMEOUT_S)
    (service,) = machine.services
    port = ("--http-port", service.http_address.rpartition(":")[2])
    same = (*port, "--grpc-port", service.grpc_target.rpartition(":")[2])
    refused = machine.up(*same, "--workers", "3", "--policy", "fair", "--demo")
    output, _ = refused.communicate(timeout=TIMEOUT_S)
    assert refused.returncode == 1
    assert "with other flags: " in output
    assert "--workers is 2, and 3 is given" in output
    assert "--policy is , and fair is given" in output
    assert "--demo" not in output
    again = machine.up(*same, "--workers", "2", "--detach", QUIRE_API_KEY="secret")
    output, _ = again.communicate(timeout=TIMEOUT_S)
    assert (again.returncode, "already up" in output) == (0, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminated_detach_leaves_nothing(machine, number):
    (machine.folder / "gpu_worker.not-ready").touch()
    ours = signal.signal(number, signal.SIG_DFL)  # under nohup a child would ignore SIGHUP, too
    process = machine.up("--detach")
    signal.signal(number, ours)
    read_until(process, "worker-0: loading")
    (service,) = machine.services
    process.send_signal(number)
    assert process.wait(TIMEOUT_S) == 128 + number
    assert not any(map(is_alive, [service.pid, *pids(service)]))
