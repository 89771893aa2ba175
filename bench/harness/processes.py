"""Starts the processes that a benchmark measures, and ends all of them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from harness.case import ROOT, BenchError

BENCH = ROOT / "bench"
HOST = "127.0.0.1"
_POLL_S = 0.05
_START_S = 600.0
_STOP_S = 15.0
_DIE_WITH_PARENT = (  # in a program of its own, because forking with gRPC's threads is not safe
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)


def free_ports(count: int) -> list[int]:
    """Return TCP ports that nothing listens on, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]


def environment() -> dict[str, str]:
    """Return the environment for a process that imports the checkout and the modules of bench/."""
    paths = (str(BENCH), str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Process:
    """A Python program that can be started, stopped and restarted; it ends with this process."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        http_port: int,
        *,
        ready_path: str = "/ready",
    ) -> None:
        """`argv` follows the interpreter. A process is ready when `ready_path` answers 200."""
        self.name = name
        self._ready_path = ready_path
        self.base_url = f"http://{HOST}:{http_port}"
        self._argv = [sys.executable, *argv]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the program; its output is appended to its log."""
        assert self.exit_code is not None or self._process is None, f"{self.name} runs already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-ISc", _DIE_WITH_PARENT, *self._argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The code of `subprocess`; None while it runs, or if it was never started."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the program has ended."""
        if self._process is not None and self.exit_code is None:
            os.killpg(self.pid, number)

    async def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it has ended."""
        self.signal(signal.SIGKILL)
        await self._wait()

    async def stop(self, within_s: float = _STOP_S) -> None:
        """Send SIGTERM; kill the process if it has not ended in time."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._wait()
        await self.kill()

    async def _wait(self) -> None:
        while self._process is not None and self.exit_code is None:  # noqa: ASYNC110 - no handler
            await asyncio.sleep(_POLL_S)

    async def get(self, path: str) -> str | None:
        """Return the body of the process's answer; None unless the status is 200."""
        timeout = aiohttp.ClientTimeout(total=5)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with (
                aiohttp.ClientSession(self.base_url, timeout=timeout) as session,
                session.get(path) as response,
            ):
                return await response.text() if response.status == 200 else None
        return None

    async def wait_until_ready(self) -> None:
        """Wait until the process is ready; raises BenchError, with the log's end, if it fails."""
        deadline = time.monotonic() + _START_S
        while await self.get(self._ready_path) is None:
            self.check_runs()
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} is not ready; its log ends:\n{self.log_tail()}")
            await asyncio.sleep(_POLL_S)

    def check_runs(self) -> None:
        if self.exit_code is not None:
            raise BenchError(
                f"{self.name} ended with {self.exit_code}; its log ends:\n{self.log_tail()}"
            )

    def log_tail(self, num_lines: int = 30) -> str:
        with self._log.open(errors="replace") as lines:
            return "".join(deque(lines, maxlen=num_lines))

    def rss_bytes(self) -> int:
        """Return the process's resident memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024

    def running_s(self) -> float:
        """Return the processor time that the process's threads have taken, to the nanosecond."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def cpu_s(self) -> float:
        """Return the processor time of the process and of all processes below it."""
        parents, ticks = {}, {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                fields = path.read_text().rpartition(")")[2].split()
                pid = int(path.parent.name)
                parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
        members = {self.pid}
        while more := {pid for pid, parent in parents.items() if parent in members} - members:
            members |= more
        return sum(ticks.get(pid, 0) for pid in members) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def modules(
    directory: Path, module_to_flags: Mapping[str, Sequence[str]]
) -> AsyncIterator[dict[str, Process]]:
    """Start modules, each with its gRPC at DIRECTORY/MODULE.sock; yields when all are ready.

    With --grpc-port among its flags, a module listens at that port instead.
    """
    processes: dict[str, Process] = {}
    for (module, flags), port in zip(
        module_to_flags.items(), free_ports(len(module_to_flags)), strict=True
    ):
        listen = [f"--http-port={port}"]
        if not any(flag.startswith("--grpc-port=") for flag in flags):
            listen.append(f"--uds={directory}/{module}.sock")
        argv = ["-m", module, *listen, *flags]
        processes[module] = Process(module, argv, directory / f"{module}.log", port)
    try:
        for process in processes.values():
            process.start()
        for process in processes.values():
            await process.wait_until_ready()
        yield processes
    finally:
        for process in reversed(processes.values()):
            await process.stop(10.0)


class Service(Process):
    """Router, scheduler and worker, in processes of their own or in one."""

    def __init__(self, program: Sequence[str], model: Path, flags: Sequence[str], at: Path) -> None:
        """`at` is a directory for the log and for the socket of the router's gRPC."""
        (port,) = free_ports(1)
        self.grpc_target = f"unix:{at}/grpc.sock"
        listen = ("--model", str(model), "--http-port", str(port), "--uds", f"{at}/grpc.sock")
        super().__init__(" ".join(program), (*program, *listen, *flags), at / "log", port)


@contextlib.asynccontextmanager
async def service(
    model: Path, flags: Sequence[str], *, in_one_process: bool = False
) -> AsyncIterator[Service]:
    """Start a whole service of a model; `flags` are the worker's. It may not be ready yet."""
    program = ("-m", *(("engines.one_service",) if in_one_process else ("quire.cli", "up")))
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        started = Service(program, model, flags, Path(directory))
        started.start()
        try:
            yield started
        finally:
            await started.stop()


@contextlib.asynccontextmanager
async def model_directory(given: Path | None) -> AsyncIterator[Path]:
    """Yield `given`; without it, a random 125M Llama that is deleted after the block."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise BenchError(f"{given}: it must be a model directory; see make_model.py")
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="quire-bench-model-") as name:
        # in a separate process, to free torch's memory
        await run_script(str(BENCH / "make_model.py"), name)
        yield Path(name)


async def run_script(*argv: str) -> str:
    """Run a Python program to its end, and return its output; raises BenchError if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdout=asyncio.subprocess.PIPE, env=environment()
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise BenchError(f"{' '.join(argv)} ended with {process.returncode}")
    return output.decode()


class Answerer:
    """A process that answers each line of JSON with another line, and ends when its input ends."""

    def __init__(self, *argv: str) -> None:
        self._argv = argv
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # a terminal's Ctrl-C is for the parent only
        )

    def ask(self, question: object) -> Any:
        """Return the answer; raises BenchError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
        if not (answer := self._process.stdout.readline()):
            raise BenchError(f"no answer; try: echo '{question}' | {' '.join(self._argv)}")
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
